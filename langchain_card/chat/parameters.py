"""JSON schemas of tools' arguments, complete where LangChain's converters drop parts."""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping
from enum import Enum
from types import UnionType, new_class
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from langchain_core.tools import BaseTool, create_schema_from_function
from langchain_core.utils.json_schema import dereference_refs
from langchain_core.utils.pydantic import is_basemodel_subclass
from pydantic import BaseModel, Field, TypeAdapter
from pydantic.errors import PydanticUserError
from pydantic_core import to_jsonable_python
from typing_extensions import NotRequired, Required, TypedDict, get_type_hints, is_typeddict

from langchain_card.constraints.schema_parts import SchemaParts

_DEFINITIONS = {"$defs", "definitions"}
_ANNOTATIONS = {*_DEFINITIONS, "title", "description", "default", "$schema", "$id"}
_TYPES = (None, "object", "array", "string", "number", "integer", "boolean", "null")
_ARGUMENT = re.compile(r"( *)(\w+)(?: *\([^)]*\))? *: *(.*)")
_OTHER_SECTIONS = ("Returns:", "Example:")
_TYPED_DICT: Any = TypedDict


def is_pydantic(schema: Any) -> bool:
    """Return whether a schema is a pydantic class, of version 2 or 1."""
    return isinstance(schema, type) and is_basemodel_subclass(schema)


def pydantic_schema(model: Any) -> dict[str, Any]:
    """Return the JSON schema of a pydantic class."""
    schema: dict[str, Any] = model.model_json_schema() if issubclass(model, BaseModel) else model.schema()
    return schema


def readable_tool(tool: Any) -> Any:
    """Return a tool in a form that LangChain's converter reads completely.

    MCP's `inputSchema`, a JSON schema without `properties` and a TypedDict become a function's dict; a function becomes
    the pydantic class of its arguments; others stay as they are. The converter knows neither `NotRequired` nor that a
    TypedDict's value may be null.
    """
    if is_typeddict(tool):
        try:
            schema = typed_dict_schema(tool)
        except PydanticUserError:  # what only pydantic 1 knows, which the converter reads them by
            return tool
        about = SchemaParts(schema).target(schema.get("$ref")) or schema
        description = {"description": about["description"]} if about.get("description") else {}
        return {"name": tool.__name__, **description, "parameters": _parameters(schema)}
    if callable(tool) and not isinstance(tool, type | BaseTool):
        return create_schema_from_function(
            tool.__name__, tool, filter_args=(), parse_docstring=True, include_injected=False
        )
    if not isinstance(tool, Mapping):
        return tool
    named = {key: tool[key] for key in ("name", "description") if tool.get(key) is not None}
    if "inputSchema" in tool and "name" in tool and "parameters" not in tool:
        return {**named, "parameters": tool["inputSchema"]}
    rest = {key: value for key, value in tool.items() if key not in ("title", "description")}
    is_schema = "title" in tool and "name" not in tool and tool.get("type") in _TYPES
    if is_schema and "properties" not in tool and rest != {"type": "object"}:
        return {**named, "name": tool["title"], "parameters": rest}
    return tool


def recursive_parameters(tool: Any) -> dict[str, Any] | None:
    """Return the schema of a tool's arguments, its definitions kept, if it refers to itself, else None.

    The converter writes `{}` for a part that refers to itself. Other schemas it reads as well and more plainly, with
    references written out.

    Args:
        tool: a result of `readable_tool`: a LangChain tool, whose injected arguments are left out, or a pydantic class.
    """
    arguments: Any = tool
    if isinstance(tool, BaseTool):
        arguments = tool.tool_call_schema
    elif not is_pydantic(tool):
        return None
    schema = arguments if isinstance(arguments, dict) else pydantic_schema(arguments)
    return _parameters(schema) if SchemaParts(schema).is_recursive() else None


def _parameters(schema: Mapping[str, Any]) -> dict[str, Any]:
    """Return a schema in the converter's form: without titles, references written out unless it refers to itself."""
    whole = SchemaParts(schema).rewritten(lambda _, part: {key: part[key] for key in part if key != "title"})
    parts = SchemaParts(whole)
    recursive = parts.is_recursive()
    target = parts.target(whole.get("$ref"))
    if not recursive:
        whole = dereference_refs(whole)
    elif isinstance(target, Mapping) and whole.keys() <= {"$ref", *_ANNOTATIONS}:
        whole = {**target, **{key: whole[key] for key in whole if key != "$ref"}}
    left_out = {"description"} if recursive else {"description", *_DEFINITIONS}
    return {key: value for key, value in whole.items() if key not in left_out}


# TypedDicts, by pydantic's rules and LangChain's conventions.


def typed_dict_schema(typed_dict: type) -> dict[str, Any]:
    """Return the JSON schema of a TypedDict, with references.

    Keys are required unless they are `NotRequired`, of a class with `total=False`, or have a default. A default (`...`
    for none) and a description may be given as `Annotated[type, default, "description"]`; a description in the `Args`
    of the docstring takes precedence.

    Args:
        typed_dict: of `typing` or `typing_extensions`; TypedDicts within it may refer to each other.

    Raises:
        Exception: pydantic, or the resolution of type hints, cannot read it.
    """
    return TypeAdapter(_rebuilt(typed_dict, {})).json_schema()


def _rebuilt(kind: Any, known: dict[type, type]) -> Any:
    """Return a type with each TypedDict in it rebuilt in the form that pydantic takes on every Python."""
    if isinstance(kind, type) and is_typeddict(kind):
        return known[kind] if kind in known else _rebuilt_typed_dict(kind, known)
    arguments = get_args(kind)
    if not arguments or get_origin(kind) is Literal:
        return kind
    changed = tuple(_rebuilt(argument, known) for argument in arguments)
    if changed == arguments:
        return kind
    origin = get_origin(kind)
    if origin in (Union, UnionType):
        return Union[changed]  # noqa: UP007 - of any number of types
    return Annotated[changed] if origin is Annotated else origin[changed]


def _rebuilt_typed_dict(typed_dict: Any, known: dict[type, type]) -> Any:
    description, descriptions = _parsed_docstring(typed_dict.__doc__)
    rebuilt: Any = new_class(typed_dict.__name__, (_TYPED_DICT,))
    if config := getattr(typed_dict, "__pydantic_config__", None):
        rebuilt.__pydantic_config__ = config
    known[typed_dict] = rebuilt  # its keys may refer to it
    keys: dict[str, Any] = {}
    for name, hint in get_type_hints(typed_dict, include_extras=True).items():
        required = name in typed_dict.__required_keys__
        hint, required = _without_required(hint, required)
        hint, options = _without_convention(hint)
        hint, required = _without_required(hint, required)
        if name in descriptions:
            options["description"] = descriptions[name]
        if "default" in options:
            required, options["json_schema_extra"] = False, {"default": to_jsonable_python(options.pop("default"))}
        hint = _rebuilt(hint, known)
        keys[name] = Annotated[hint, Field(**options)] if options else hint
        rebuilt.__required_keys__ |= {name} if required else frozenset()
    rebuilt.__annotations__, rebuilt.__doc__ = keys, description
    return rebuilt


def _without_required(hint: Any, required: bool) -> tuple[Any, bool]:
    """Return a key's type without `Required` or `NotRequired`, and whether the key is required."""
    if get_origin(hint) in (Required, NotRequired):
        return get_args(hint)[0], get_origin(hint) is Required
    return hint, required


def _without_convention(hint: Any) -> tuple[Any, dict[str, Any]]:
    """Return a key's type, and its default and description by LangChain's convention; other annotations stay."""
    if get_origin(hint) is not Annotated:
        return hint, {}
    kind, first, *rest = get_args(hint)
    is_value = first is ... or first is None or isinstance(first, bool | int | float | str | list | dict | Enum)
    if not is_value or (rest and not isinstance(rest[0], str)):
        return hint, {}
    default = {} if first is ... else {"default": first}
    return kind, {**default, **({"description": rest[0]} if rest else {})}


def _parsed_docstring(docstring: str | None) -> tuple[str, Mapping[str, str]]:
    """Return the general text of a docstring in Google's style, and its description of each key."""
    general: list[str] = []
    descriptions: dict[str, str] = {}
    in_other_section = False
    for block in inspect.cleandoc(docstring or "").split("\n\n"):
        if block.startswith("Args:"):
            name, margin = "", None
            for line in block.splitlines()[1:]:
                entry = _ARGUMENT.fullmatch(line)
                if entry and (margin is None or len(entry[1]) <= margin):
                    name, margin = entry[2], len(entry[1])
                    descriptions[name] = entry[3].strip()
                elif name:
                    descriptions[name] += " " + line.strip()
            break
        in_other_section = in_other_section or block.startswith(_OTHER_SECTIONS)
        general += [] if in_other_section else [block]
    return " ".join(general).strip(), descriptions
