"""How a model writes a call: as its own chat template has it, or in a block of JSON.

A template is used as it is when it tells the model of tools, calls and results the way Qwen 2.5, Qwen 3, Hermes and
many others were trained on: JSON between `<tool_call>` tags. Where a model's template knows no tools, or garbles them
(conversions of Qwen2.5-Coder to GGUF double the braces, and the model copies them), tools are described in the system
message, and a call is a fenced block of JSON: what coder models write of themselves.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

from jinja2 import TemplateError

Turn = dict[str, Any]

SYSTEM = "You are a helpful assistant."
"""Said where tools are to be described and there is no system message."""

_INTRODUCTION = """

# Functions

You can call these functions:
{functions}

To call a function, answer with nothing but a JSON block that holds its name and its arguments:
```json
{{"name": "function_name", "arguments": {{"argument": "value"}}}}
```
You are then told the result. When no function is needed, or you know the results, answer in plain text."""

_DOCUMENT = """

# Answer

Write your answer as a JSON document of this schema, with nothing around it:
{schema}"""

NEXT = "Answer the question with it, or call the next function if something is still missing."
"""Said after the results of an answer's calls. Without it small models make the same call again (docs/LOG.md)."""


@dataclass(frozen=True, slots=True)
class ToolForm:
    """How a model writes calls.

    Attributes:
        opening, closing: around the JSON of a call.
        native: the chat template describes tools, calls and results itself.
    """

    opening: str
    closing: str
    native: bool


BLANKS = " \t\r\n"
"""What may stand around the parts of a call, and behind a thought."""

MAX_BLANKS = 2
"""In a row, in front of a call or of the mark of a thought: models that may write blanks without end do so."""

FENCED = ToolForm("```json\n", "\n```", native=False)
TAGGED = ToolForm("<tool_call>\n", "\n</tool_call>", native=True)


def tool_form(tokenizer: Any) -> ToolForm:
    """The form of a tokenizer of transformers, found out by trying its chat template once."""
    if tokenizer not in _known:
        _known[tokenizer] = TAGGED if _renders_tags(tokenizer) else FENCED
    return _known[tokenizer]


_known: WeakKeyDictionary[Any, ToolForm] = WeakKeyDictionary()


def describe_document(turns: Sequence[Turn], schema: Mapping[str, Any]) -> list[Turn]:
    """A conversation that asks for a document of a schema in its system message."""
    return _with_system(turns, _DOCUMENT.format(schema=json.dumps(schema, ensure_ascii=False, default=str)))


def describe_tools(turns: Sequence[Turn], tools: Sequence[dict[str, Any]]) -> list[Turn]:
    """A conversation for templates that know no tools: `tools`, calls and their results written out.

    Args:
        turns: as chat templates take them, `tool_calls` and turns of the role `tool` included.
        tools: in OpenAI's form.
    """
    names = {call["id"]: call["function"]["name"] for turn in turns for call in turn.get("tool_calls", ())}
    described = [_described(turn, names) for turn in turns]
    if not tools:
        return described
    for i, turn in enumerate(turns):
        if turn["role"] == "tool" and (i + 1 == len(turns) or turns[i + 1]["role"] != "tool"):
            described[i]["content"] += f"\n\n{NEXT}"
    functions = "\n".join(json.dumps(tool["function"], ensure_ascii=False, default=str) for tool in tools)
    return _with_system(described, _INTRODUCTION.format(functions=functions))


def _with_system(turns: Sequence[Turn], more: str) -> list[Turn]:
    """The conversation with more in its system message."""
    if not turns or turns[0]["role"] != "system":
        turns = [{"role": "system", "content": SYSTEM}, *turns]
    return [{**turns[0], "content": turns[0]["content"] + more}, *turns[1:]]


def _described(turn: Turn, names: dict[Any, str]) -> Turn:
    if turn["role"] == "tool":
        name = turn.get("name") or names.get(turn.get("tool_call_id"), "the function")
        return {"role": "user", "content": f"Result of {name}:\n{turn['content']}"}
    if not turn.get("tool_calls"):
        return turn
    calls = [_call_text(call["function"]) for call in turn["tool_calls"]]
    said = [turn["content"]] if turn["content"] else []
    rest = {key: value for key, value in turn.items() if key != "tool_calls"}
    return {**rest, "content": "\n".join([*said, *calls])}


def _call_text(function: dict[str, Any]) -> str:
    call = {"name": function["name"], "arguments": function["arguments"]}
    return FENCED.opening + json.dumps(call, ensure_ascii=False, default=str) + FENCED.closing


def _renders_tags(tokenizer: Any) -> bool:
    """Whether the template tells of tools, calls and results, and a call looks as `TAGGED` says."""
    function = {"name": "zebra", "description": "of a stripe", "parameters": {"type": "object", "properties": {}}}
    call = {"type": "function", "id": "zebra-id1", "function": {"name": "zebra", "arguments": {"stripes": 7}}}
    turns = [
        {"role": "user", "content": "Count."},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "seven of them", "name": "zebra", "tool_call_id": "zebra-id1"},
    ]
    try:
        tools = [{"type": "function", "function": function}]
        text = tokenizer.apply_chat_template(turns, tools=tools, tokenize=False, add_generation_prompt=True)
    except (TemplateError, TypeError, ValueError, KeyError, AttributeError):
        return False
    written = TAGGED.opening + '{"name": "zebra", "arguments": {"stripes": 7}}' + TAGGED.closing
    told = all(words in text for words in (written, "of a stripe", "seven of them"))
    return told and "{{" not in text and not _hidden(tokenizer)


def _hidden(tokenizer: Any) -> bool:
    """Whether the tags are control tokens that are left out of an answer's text."""
    tags = (TAGGED.opening.strip(), TAGGED.closing.strip())
    return any(token.special and token.content in tags for token in tokenizer.added_tokens_decoder.values())
