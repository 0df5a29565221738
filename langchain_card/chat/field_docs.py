"""Descriptions of a chat model's fields, for `help()`, which shows none of pydantic's, and for JSON schemas."""

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
    "name": "Name of the runnable in traces and graphs.",
    "cache": "Where whole answers are kept: a `BaseCache`, True for LangChain's global one, False for none, None for "
    "the global one if it is set. Streams are never kept. Draft, schedule and devices are not part of its keys; "
    "sampled answers without a `seed` are kept, too.",
    "verbose": "Whether LangChain prints inputs and outputs.",
    "callbacks": "Handlers that are notified of every call.",
    "tags": "Labels of every trace.",
    "metadata": "Values of every trace; versions of packages are added.",
    "custom_get_token_ids": "A function that counts tokens in place of the target's tokenizer.",
    "rate_limiter": "A limiter that each call waits for, unless the cache answers it.",
    "disable_streaming": 'True makes `stream` give the answer in one piece, `"tool_calling"` only with tools.',
    "output_version": '`"v0"` for text in `content`, `"v1"` for standard content blocks, None for `"v0"`. The '
    "environment's `LC_OUTPUT_VERSION` is another default.",
    "profile": "Capabilities of the model, such as `max_input_tokens`; by default read from its files, without loading "
    "it.",
}
"""LangChain's own fields, which have no descriptions of their own."""


def attribute_docs(kind: type) -> dict[str, str]:
    """Return the descriptions in the `Attributes:` section of a class's docstring, by name."""
    section = inspect.cleandoc(kind.__doc__ or "").partition("Attributes:\n")[2]
    entries = re.findall(r"^    (\w+): (.*(?:\n {6,}.*)*)", section, re.MULTILINE)
    return {name: text[0].upper() + " ".join(text.split())[1:] for name, text in entries}


def described(field: str, info: FieldInfo) -> str:
    """Return the description of a field; empty if it has none."""
    return info.description or INHERITED.get(field, "")


def fields_section(model: type[BaseModel]) -> str:
    """Return a docstring section with each field's type, default and description; LangChain's fields come last."""
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
        return "default computed"  # a factory of the user may have side effects
    value: Any = info.get_default(call_default_factory=True)
    return f"default {f'{type(value).__name__}()' if is_dataclass(value) else repr(value)}"


class JsonFields(GenerateJsonSchema):
    """A generator of JSON schemas that leaves out what JSON cannot hold: functions, caches, callbacks."""

    def handle_invalid_for_json_schema(self, schema: core_schema.CoreSchema, error_info: str) -> JsonSchemaValue:
        """Leave out the field, or the choice of a union."""
        raise PydanticOmit
