"""What form a call's answer takes: from its options to the tools told to the model and the shape of the answer."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from langchain_card.chat.schemas import response_format_dict, tool_choice_form, tool_dicts
from langchain_card.constraints.json_schema import ANY_OBJECT, json_rule
from langchain_card.errors import InvalidInputError
from langchain_card.text.tool_form import ToolForm
from langchain_card.text.tool_grammar import AnswerShape

_NO_NAME = re.compile(r"[^A-Za-z0-9_.-]")
_MOST_CHARS = 48


def answer_shape(options: Mapping[str, Any], form: ToolForm) -> tuple[list[dict[str, Any]], AnswerShape]:
    """Of a call's `tools`, `tool_choice`, `parallel_tool_calls` and `response_format`; others are ignored.

    Where `parallel_tool_calls` is left open, an answer may hold several calls if the model's own template knows tools
    and none must be called; other models repeat theirs, or guess results that they are not told yet.

    Args:
        options: of the call.
        form: in which the model writes calls.

    Returns:
        The tools that the model is told of, none where it may not call any, the one for the answer's document among
        them; and what the answer may be.

    Raises:
        InvalidInputError: one of them cannot be read.
    """
    tools = tool_dicts(options.get("tools") or ())
    choice = tool_choice_form(options.get("tool_choice"), tools)
    parallel = options.get("parallel_tool_calls")
    if not isinstance(parallel, bool | None):
        raise InvalidInputError("parallel_tool_calls", parallel, "must be True, False or None")
    if choice == "none":
        tools = []
    named = choice["function"]["name"] if isinstance(choice, Mapping) else None
    callable_ = tuple(tool for tool in tools if named in (None, tool["function"]["name"]))
    must_call = choice == "required" or named is not None
    several = form.native and not must_call if parallel is None else parallel
    document = _document(options.get("response_format"))
    if must_call or document is None:
        return tools, AnswerShape(callable_, must_call, several)
    strict = bool(document.get("strict"))
    if not tools:
        return tools, AnswerShape(schema=document["schema"], strict=strict)
    answer = _answer_tool(document, tools)
    return [*tools, answer], AnswerShape(callable_, parallel=several, strict=strict, answer=answer)


def _document(response_format: Any) -> Mapping[str, Any] | None:
    """Name, schema and `strict` of the document that the answer is to be; None for any text."""
    if response_format is None or (form := response_format_dict(response_format))["type"] == "text":
        return None
    document: Mapping[str, Any] = form.get("json_schema") or {
        "name": "answer",
        "schema": form.get("schema", ANY_OBJECT),
    }
    json_rule(document["schema"], field="response_format schema")
    return document


def _answer_tool(document: Mapping[str, Any], tools: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The tool that a model calls with the document of its answer."""
    schema = document["schema"]
    kinds = schema.get("type", "object")
    if "object" not in (kinds if isinstance(kinds, list) else [kinds]):
        hint = "make it a property of an object"
        raise InvalidInputError("response_format type", kinds, "must be object where there are tools", hint)
    name = _NO_NAME.sub("_", str(document["name"]))[:_MOST_CHARS] or "answer"
    while any(name == tool["function"]["name"] for tool in tools):
        name += "_"
    parameters = {**schema, "type": "object"}  # of several kinds, objects alone are arguments
    description = document.get("description") or schema.get("description") or "Give the final answer."
    return {"type": "function", "function": {"name": name, "description": description, "parameters": parameters}}


@contextmanager
def named_by_user(shape: AnswerShape) -> Iterator[None]:
    """Errors of a grammar are those of the tools or of the schema that it was made of."""
    try:
        yield
    except InvalidInputError as error:
        if error.field != "grammar":
            raise
        field, value = ("tools", shape.names) if shape.tools else ("response_format", shape.schema)
        raise InvalidInputError(field, value, error.limit, error.hint) from error
