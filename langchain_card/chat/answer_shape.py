"""The form of an answer, read from a call's options: the tools that the prompt describes, and an `AnswerShape`."""

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
    """Read `tools`, `tool_choice`, `parallel_tool_calls` and `response_format`; other options are ignored.

    Without `parallel_tool_calls`, an answer may hold several calls if the model's own template supports tools and no
    call is required; other models repeat their calls, or invent results that they do not have yet.

    Args:
        options: options of the call.
        form: the form in which the model writes calls.

    Returns:
        The tools for the prompt, none if no call is allowed, with the tool for the answer's document last; and the
        shape of the answer.

    Raises:
        InvalidInputError: an option cannot be read.
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
    """Return name, schema and `strict` of the document that the answer must be; None for any text."""
    if response_format is None or (form := response_format_dict(response_format))["type"] == "text":
        return None
    document: Mapping[str, Any] = form.get("json_schema") or {
        "name": "answer",
        "schema": form.get("schema", ANY_OBJECT),
    }
    json_rule(document["schema"], field="response_format schema")
    return document


def _answer_tool(document: Mapping[str, Any], tools: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the tool that the model calls with its answer's document as arguments."""
    schema = document["schema"]
    kinds = schema.get("type", "object")
    if "object" not in (kinds if isinstance(kinds, list) else [kinds]):
        hint = "make it a property of an object"
        raise InvalidInputError("response_format type", kinds, "must be object where there are tools", hint)
    name = _NO_NAME.sub("_", str(document["name"]))[:_MOST_CHARS] or "answer"
    while any(name == tool["function"]["name"] for tool in tools):
        name += "_"
    parameters = {**schema, "type": "object"}  # arguments are always an object
    description = document.get("description") or schema.get("description") or "Give the final answer."
    return {"type": "function", "function": {"name": name, "description": description, "parameters": parameters}}


@contextmanager
def named_by_user(shape: AnswerShape) -> Iterator[None]:
    """Report errors of a grammar as errors of the tools or the schema that it was made from."""
    try:
        yield
    except InvalidInputError as error:
        if error.field != "grammar":
            raise
        field, value = ("tools", shape.names) if shape.tools else ("response_format", shape.schema)
        raise InvalidInputError(field, value, error.limit, error.hint) from error
