"""The fields of a chat model in words: for `help()`, where pydantic shows none, and for JSON schemas."""

from __future__ import annotations

import inspect
import re
import textwrap
from collections.abc import Mapping
from dataclasses import is_dataclass
from typing import Any

from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic.json_schema import GenerateJsonSchema, JsonSchemaValue
from pydantic_core import PydanticOmit, core_schema

INHERITED: Mapping[str, str] = {
    "name": "Of the runnable, as traces and graphs show it.",
    "cache": "Where whole answers are kept: a `BaseCache`, True for LangChain's global one, False for none, None for "
    "the global one where it is set. Streams are never kept. Equal questions to equal models count as one, whatever "
    "draft, schedule and devices; sampled answers without a `seed`, too.",
    "verbose": "Whether LangChain prints what goes in and out.",
    "callbacks": "Handlers that are told about every call.",
    "tags": "Labels of every trace.",
    "metadata": "Values of every trace; versions of packages are added.",
    "custom_get_token_ids": "A function that counts tokens in place of the target's tokenizer.",
    "rate_limiter": "Waited for before each call that is not answered from the cache.",
    "disable_streaming": 'True makes `stream` give the answer in one piece, `"tool_calling"` only with tools.',
    "output_version": '`"v0"` for text in `content`, `"v1"` for standard content blocks, None for `"v0"`. The '
    "environment's `LC_OUTPUT_VERSION` is another default.",
    "profile": "What the model can do, such as `max_input_tokens`; by default it is read from the model's files, "
    "without loading it.",
}
"""LangChain's own fields, in short."""


def described(field: str, info: FieldInfo) -> str:
    """What a field means; empty where nobody says so."""
    return info.description or INHERITED.get(field, "")


def fields_section(model: type[BaseModel]) -> str:
    """A section of a docstring with each field's type, default and meaning; a model's own fields come first."""
    names = sorted(model.model_fields, key=lambda name: name in INHERITED)
    return "\n".join(["Fields:", *(_entry(name, model.model_fields[name]) for name in names)])


def _entry(name: str, info: FieldInfo) -> str:
    kind = re.sub(r"[a-z_]+\.", "", inspect.formatannotation(info.annotation))
    head = f"    {name} ({kind}, {_default(info)}):"
    text = textwrap.wrap(described(name, info), 108, initial_indent=" " * 8, subsequent_indent=" " * 8)
    return "\n".join([head, *text])


def _default(info: FieldInfo) -> str:
    if info.is_required():
        return "required"
    factory: Any = info.default_factory
    if factory is not None and not str(factory.__module__).startswith(("langchain_card.", "langchain_core.")):
        return "default computed"  # a user's own may do anything
    value: Any = info.get_default(call_default_factory=True)
    return f"default {f'{type(value).__name__}()' if is_dataclass(value) else repr(value)}"


class JsonFields(GenerateJsonSchema):
    """A JSON schema without what JSON cannot hold: functions, caches, callbacks."""

    def handle_invalid_for_json_schema(self, schema: core_schema.CoreSchema, error_info: str) -> JsonSchemaValue:
        """Leaves the field, or the choice of a union, out."""
        raise PydanticOmit
