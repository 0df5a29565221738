"""Tools and schemas of all kinds, converted to OpenAI's dicts. Each function also accepts its own results."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from langchain_core.utils.function_calling import convert_to_openai_function, convert_to_openai_tool

from langchain_card.chat.parameters import is_pydantic, pydantic_schema, readable_tool, recursive_parameters
from langchain_card.errors import CARDError, InvalidInputError, check_choice

_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")
_CHOICES = {"auto": "auto", "none": "none", "any": "required", "required": "required", True: "required", False: "none"}
_FORMATS = ("text", "json_object", "json_schema")
_JSON_TYPES = ("object", "array", "string", "number", "integer", "boolean", "null")
_KEYWORDS = {"type", "properties", "$ref", "anyOf", "oneOf", "allOf", "enum", "const"}
_FUNCTION_KEYS = {"parameters", "input_schema", "toolSpec", "inputSchema"}  # OpenAI's, Anthropic's, Bedrock's, MCP's


def tool_dicts(tools: Sequence[Any], strict: bool | None = None, *, distinct: bool = True) -> list[dict[str, Any]]:
    """Convert tools to OpenAI's dicts.

    Args:
        tools: LangChain tools, functions, pydantic classes, TypedDicts, or dicts in a form that LangChain knows.
        strict: for tools without their own `strict`; True makes each property required and allows no others.
        distinct: whether names must differ.

    Raises:
        InvalidInputError: a tool is not a function, its name is invalid, or two names are equal.
    """
    if not isinstance(tools, Sequence) or isinstance(tools, str):
        raise InvalidInputError("tools", tools, "must be a list of tools", "put a single one into a list")
    dicts = [tool_dict(tool, strict, f"tools[{i}]") for i, tool in enumerate(tools)]
    names = [tool["function"]["name"] for tool in dicts]
    for i, name in enumerate(names):
        if distinct and name in names[:i]:
            raise InvalidInputError(f"tools[{i}]", name, "is the name of an earlier tool, too", "rename one of them")
    return dicts


def tool_dict(tool: Any, strict: bool | None = None, field: str = "tool") -> dict[str, Any]:
    """Convert a tool to OpenAI's dict, with an object for `parameters`; see `tool_dicts`.

    Args:
        tool: a tool of any kind.
        strict: for a tool without its own `strict`.
        field: name of the tool in errors.
    """
    with _reading(field, tool, "tool"):
        tool = readable_tool(tool)
        given = dict(convert_to_openai_tool(tool))
        kind = tool.get("type", "function") if isinstance(tool, Mapping) else given["type"]
        if kind not in ("function", "object") and "input_schema" not in tool:
            raise InvalidInputError(field, tool, "must be a function", "tools that a provider runs are not there")
        function = convert_to_openai_function(given.get("function", given))
        name, parameters = function["name"], recursive_parameters(tool) or function.get("parameters") or {}
        if not isinstance(name, str) or not _NAME.fullmatch(name):
            limit = "must have a name of 1 to 64 letters, digits, _, . and -"
            raise InvalidInputError(f"{field} name", name, limit, "rename it")
        if not isinstance(parameters, Mapping) or parameters.get("type", "object") != "object":
            limit = "parameters must be a JSON schema of an object"
            raise InvalidInputError(f"{field} parameters", parameters, limit, "make what they are a property of it")
        default: dict[str, Any] = {} if parameters and "properties" not in parameters else {"properties": {}}
        function["parameters"] = {"type": "object", **default, **parameters}
        if strict is not None and "strict" not in function:
            function = convert_to_openai_function(function, strict=strict)
    return {"type": "function", "function": function}


def tool_choice_form(choice: Any, tools: Sequence[Mapping[str, Any]]) -> str | dict[str, Any]:
    """Return `"auto"`, `"none"`, `"required"`, or in OpenAI's form the tool that must be called.

    Args:
        choice: a result of this function, None for `"auto"`, `"any"` or True for `"required"`, False for `"none"`, or
            a tool's name.
        tools: results of `tool_dicts`.

    Raises:
        InvalidInputError: the tool does not exist, or a call is required and there are no tools.
    """
    names = tuple(tool["function"]["name"] for tool in tools)
    if choice is None or choice in ("auto", "none", False):
        return _CHOICES["auto" if choice is None else choice]
    if not names:
        raise InvalidInputError("tool_choice", choice, "needs tools, and there are none", "pass tools, or leave it out")
    if isinstance(choice, str | bool) and choice in _CHOICES:
        return _CHOICES[choice]
    function = choice.get("function") if isinstance(choice, Mapping) and choice.get("type") == "function" else choice
    name = function.get("name") if isinstance(function, Mapping) else function
    check_choice(
        "tool_choice", name, names if isinstance(choice, Mapping) else (*names, "auto", "any", "none", "required")
    )
    return {"type": "function", "function": {"name": name}}


def response_format_dict(value: Any, strict: bool | None = None, field: str = "response_format") -> dict[str, Any]:
    """Convert a response format to OpenAI's form; a schema becomes `{"type": "json_schema", ...}`.

    Args:
        value: OpenAI's form, a pydantic class, a TypedDict, a JSON schema, or a tool, for the schema of its arguments.
        strict: written beside the schema's name unless the value has its own `strict`.
        field: name of the value in errors.

    Raises:
        InvalidInputError: the value is of another kind.
    """
    if not isinstance(value, Mapping) or _is_function(value) or value.get("type") not in _FORMATS:
        if isinstance(value, Mapping) and not _is_function(value) and isinstance(value.get("type"), str):
            check_choice(f"{field} type", value["type"], (*_FORMATS, *_JSON_TYPES))
        schema = json_schema(value, field)
        description = {"description": schema["description"]} if schema.get("description") else {}
        named_schema = {"name": schema.get("title") or "response", **description, "schema": schema}
        value = {"type": "json_schema", "json_schema": named_schema}
    form = dict(value)
    if form["type"] == "json_object" and "schema" in form:
        form["schema"] = json_schema(form["schema"], f"{field} schema")
    if form["type"] == "json_schema":
        named = form.get("json_schema")
        if not isinstance(named, Mapping) or "schema" not in named:
            hint = 'write {"type": "json_schema", "json_schema": {"name": ..., "schema": ...}}'
            raise InvalidInputError(field, value, "must hold a schema", hint)
        defaults = {"name": "response"} if strict is None else {"name": "response", "strict": strict}
        form["json_schema"] = {**defaults, **named, "schema": json_schema(named["schema"], f"{field} schema")}
    return form


def json_schema(value: Any, field: str = "schema") -> dict[str, Any]:
    """Return the JSON schema of a pydantic class, a TypedDict, a JSON schema or a tool's arguments; references stay.

    Args:
        value: an object of these kinds.
        field: name of the value in errors.

    Raises:
        InvalidInputError: the value is of another kind.
    """
    with _reading(field, value, "schema"):
        if is_pydantic(value):
            return pydantic_schema(value)
        if not isinstance(value, Mapping) or _is_function(value):
            function = tool_dict(value, field=field)["function"]
            description = {"description": function["description"]} if function.get("description") else {}
            return {"title": function["name"], **description, **function["parameters"]}
        if isinstance(value.get("type"), str):
            check_choice(f"{field} type", value["type"], _JSON_TYPES)
        if value and _KEYWORDS.isdisjoint(value):
            raise InvalidInputError(field, value, "is no JSON schema", "say its `type`, such as object")
        return dict(value)


def _is_function(value: Mapping[str, Any]) -> bool:
    return value.get("type") == "function" or not _FUNCTION_KEYS.isdisjoint(value)


@contextmanager
def _reading(field: str, value: Any, kind: str) -> Iterator[None]:
    """Raise an error that names the unreadable value; LangChain's converters raise errors of any kind."""
    try:
        yield
    except CARDError:
        raise
    except Exception as error:
        reason = (str(error) or type(error).__name__).strip().splitlines()[0]
        hint = "it may be a function, a pydantic class, a TypedDict or a dict, with a `title` if that is a JSON schema"
        raise InvalidInputError(field, value, f"cannot be read as a {kind} ({reason})", hint) from error
