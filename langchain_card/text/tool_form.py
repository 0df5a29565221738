"""`ToolForm`: the way a model writes calls, by its own chat template or as a block of JSON.

A template is used as it is if it describes tools, calls and results in the form that Qwen 2.5, Qwen 3, Hermes and many
others were trained on: JSON between `<tool_call>` tags. If a template does not support tools, or garbles them
(conversions of Qwen2.5-Coder to GGUF double the braces, and the model copies them), tools are described in the system
message, and a call is a fenced block of JSON, which coder models write by themselves. Where an answer may be text, the
model is asked to name all calls in a line before the first, and is reminded of the next one after each result: small
models that decide alone whether to call or to answer stop after their first call (docs/LOG.md, 2026-11-28).
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

from jinja2 import TemplateError

Turn = dict[str, Any]

SYSTEM = "You are a helpful assistant."
"""The system message, if there is none, to which descriptions are appended."""

_FUNCTIONS = """

# Functions

You can call these functions:
{functions}

"""

_CALLING = """To call a function, answer with nothing but a JSON block that holds its name and its arguments:
```json
{"name": "function_name", "arguments": {"argument": "value"}}
```
You are then told the result. When no function is needed, or you know the results, answer in plain text."""

PLAN = "Plan:"
"""Start of the line that names the calls an answer needs, before the first of them."""

_PLANNING = f"""To call functions, write a plan in one line, with the names of all functions that the question needs, \
in order, and then the first call as a JSON block:
{PLAN} function_name, other_function
```json
{{"name": "function_name", "arguments": {{"argument": "value"}}}}
```
You are then told the result. When no function is needed, answer in plain text."""

_DOCUMENT = """

# Answer

Write your answer as a JSON document of this schema, with nothing around it:
{schema}"""

NEXT = "Answer the question with it, or call the next function if something is still missing."
"""Text after the results of an answer's calls; without it small models repeat their call (docs/LOG.md, 2026-11-22)."""

STEP = "Now call {name}. The question is: {question}"
"""Text after results where a plan names the next call."""

DONE = "All calls are made. Answer the question: {question}"
"""Text after results where all calls of a plan are made."""

_QUESTION_CHARS = 400
"""Characters of the longest question that is repeated; with a longer one, `NEXT` follows the results."""


@dataclass(frozen=True, slots=True)
class ToolForm:
    """The form of a model's calls.

    Attributes:
        opening: text before the JSON of a call.
        closing: text after it.
        native: whether the chat template describes tools, calls and results itself.
    """

    opening: str
    closing: str
    native: bool


BLANKS = " \t\r\n"
"""White space that may separate the parts of a call, and follow a thought."""

MAX_BLANKS = 2
"""Most blanks before a call or the mark of a thought; without a bound models may write blanks for ever."""

FENCED = ToolForm("```json\n", "\n```", native=False)
TAGGED = ToolForm("<tool_call>\n", "\n</tool_call>", native=True)


def tool_form(tokenizer: Any) -> ToolForm:
    """Return the form for a tokenizer of transformers, determined once from its chat template."""
    if tokenizer not in _known:
        _known[tokenizer] = TAGGED if _renders_tags(tokenizer) else FENCED
    return _known[tokenizer]


_known: WeakKeyDictionary[Any, ToolForm] = WeakKeyDictionary()


def describe_document(turns: Sequence[Turn], schema: Mapping[str, Any]) -> list[Turn]:
    """Return the conversation with a system message that requests a document of a schema."""
    return _with_system(turns, _DOCUMENT.format(schema=json.dumps(schema, ensure_ascii=False, default=str)))


def describe_tools(turns: Sequence[Turn], tools: Sequence[dict[str, Any]], *, planned: bool = True) -> list[Turn]:
    """Return the conversation with tools, calls and results as text, for templates without support for tools.

    Args:
        turns: turns for a chat template, with `tool_calls` and turns of the role `tool`.
        tools: tools in OpenAI's form.
        planned: whether the answer may be text, and names its calls first if it needs any.
    """
    names = {call["id"]: call["function"]["name"] for turn in turns for call in turn.get("tool_calls", ())}
    described = [_described(turn, names) for turn in turns]
    if not tools:
        return described
    plan = _Plan({tool["function"]["name"] for tool in tools})
    for i, turn in enumerate(turns):
        plan.read(turn)
        if turn["role"] == "tool" and (i + 1 == len(turns) or turns[i + 1]["role"] != "tool"):
            described[i]["content"] += f"\n\n{plan.advice() if planned else NEXT}"
    functions = "\n".join(json.dumps(tool["function"], ensure_ascii=False, default=str) for tool in tools)
    return _with_system(described, _FUNCTIONS.format(functions=functions) + (_PLANNING if planned else _CALLING))


class _Plan:
    """The calls that an answer has planned and not made yet.

    A plan ends with the next message of the user, with an error, and with a call that it does not name next.
    """

    def __init__(self, names: Collection[str]) -> None:
        self._names = names
        self._calls: deque[str] | None = None
        self._question = ""

    def read(self, turn: Turn) -> None:
        """Read the next turn of the conversation."""
        text = str(turn["content"]).lstrip()
        if turn["role"] == "user":
            self._calls, self._question = None, text
        elif turn["role"] == "tool" and text[:5].lower() == "error":
            self._calls = None
        elif turn.get("tool_calls"):
            if text.startswith(PLAN):
                calls = [name.strip() for name in text.partition("\n")[0].removeprefix(PLAN).split(",")]
                self._calls = deque(calls) if {*calls} <= {*self._names} else None
            for call in turn["tool_calls"]:
                if self._calls is not None and (not self._calls or self._calls.popleft() != call["function"]["name"]):
                    self._calls = None

    def advice(self) -> str:
        """Return what a model is to do with the results that it has."""
        if self._calls is None or not 0 < len(self._question) <= _QUESTION_CHARS:
            return NEXT
        if not self._calls:
            return DONE.format(question=self._question)
        return STEP.format(name=self._calls[0], question=self._question)


def _with_system(turns: Sequence[Turn], more: str) -> list[Turn]:
    """Return the conversation with text appended to its system message."""
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
    text = turn["content"]
    if text.lstrip().startswith(PLAN):  # a model that reads its plan writes it again, and calls without end
        text = text.lstrip().partition("\n")[2]
    content = [text] if text else []
    rest = {key: value for key, value in turn.items() if key != "tool_calls"}
    return {**rest, "content": "\n".join([*content, *calls])}


def _call_text(function: dict[str, Any]) -> str:
    call = {"name": function["name"], "arguments": function["arguments"]}
    return FENCED.opening + json.dumps(call, ensure_ascii=False, default=str) + FENCED.closing


def _renders_tags(tokenizer: Any) -> bool:
    """Return whether the template writes tools, calls and results, and calls in the form `TAGGED`."""
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
    complete = all(part in text for part in (written, "of a stripe", "seven of them"))
    return complete and "{{" not in text and not _hides_tags(tokenizer)


def _hides_tags(tokenizer: Any) -> bool:
    """Return whether the tags are special tokens, which are left out of an answer's text."""
    tags = (TAGGED.opening.strip(), TAGGED.closing.strip())
    return any(token.special and token.content in tags for token in tokenizer.added_tokens_decoder.values())
