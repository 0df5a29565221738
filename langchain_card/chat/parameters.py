"""Schemas of tools' arguments that LangChain's converters cut short."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from langchain_core.tools import BaseTool, create_schema_from_function
from langchain_core.utils.json_schema import dereference_refs
from langchain_core.utils.pydantic import is_basemodel_subclass
from pydantic import BaseModel
from pydantic.errors import PydanticUserError
from typing_extensions import is_typeddict

from langchain_card.chat.typed_dicts import typed_dict_schema
from langchain_card.constraints.schema_parts import SchemaParts

_DEFINITIONS = {"$defs", "definitions"}
_ASIDE = {*_DEFINITIONS, "title", "description", "default", "$schema", "$id"}
_TYPES = (None, "object", "array", "string", "number", "integer", "boolean", "null")


def is_pydantic(schema: Any) -> bool:
    """Whether a schema is a pydantic class, of version 2 or 1."""
    return isinstance(schema, type) and is_basemodel_subclass(schema)


def pydantic_schema(model: Any) -> dict[str, Any]:
    """The JSON schema of a pydantic class."""
    schema: dict[str, Any] = model.model_json_schema() if issubclass(model, BaseModel) else model.schema()
    return schema


def readable_tool(tool: Any) -> Any:
    """A tool as LangChain's converter takes it whole.

    MCP's `inputSchema`, a JSON schema without `properties` and a TypedDict become a function's dict, a function becomes
    the pydantic class of its arguments; others stay as they are. The converter knows neither `NotRequired` nor that a
    TypedDict's value may be null.
    """
    if is_typeddict(tool):
        try:
            schema = typed_dict_schema(tool)
        except PydanticUserError:  # what pydantic 1 alone knows, which the converter reads them by
            return tool
        parameters = _told(schema)
        about = SchemaParts(schema).target(schema.get("$ref")) or schema
        described = {"description": about["description"]} if about.get("description") else {}
        return {"name": tool.__name__, **described, "parameters": parameters}
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
    """The schema of a tool's arguments if it refers to itself, else None.

    The converter writes `{}` for what refers to itself: there the schema is taken from the tool, its definitions kept.
    Else the converter's is as good, and plainer: its references are written out.

    Args:
        tool: of `readable_tool`: a LangChain tool, whose injected arguments are left out, or a pydantic class.
    """
    arguments: Any = tool
    if isinstance(tool, BaseTool):
        arguments = tool.tool_call_schema
    elif not is_pydantic(tool):
        return None
    schema = arguments if isinstance(arguments, dict) else pydantic_schema(arguments)
    return _told(schema) if SchemaParts(schema).is_recursive() else None


def _told(schema: Mapping[str, Any]) -> dict[str, Any]:
    """Parameters in the converter's form: no titles, what is referred to written out unless it refers to itself."""
    whole = SchemaParts(schema).rewritten(lambda _, part: {key: part[key] for key in part if key != "title"})
    parts = SchemaParts(whole)
    recursive = parts.is_recursive()
    target = parts.target(whole.get("$ref"))
    if not recursive:
        whole = dereference_refs(whole)
    elif isinstance(target, Mapping) and whole.keys() <= {"$ref", *_ASIDE}:
        whole = {**target, **{key: whole[key] for key in whole if key != "$ref"}}
    aside = {"description"} if recursive else {"description", *_DEFINITIONS}
    return {key: value for key, value in whole.items() if key not in aside}
