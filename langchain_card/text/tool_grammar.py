"""Grammars of answers that may call tools, must be documents of a schema, or either.

Calls may follow text, and the first may deviate from the model's form: it may be a fenced block, stand between tags, or
be bare JSON at the start. Once the name of a tool is complete it must go on as a call: the grammar and `CallReader`
agree on what a call is.
"""

from __future__ import annotations

import json
import re
from collections.abc import Container, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from langchain_card.constraints.json_schema import json_rule
from langchain_card.text.tool_form import MAX_BLANKS, TAGGED, ToolForm

MAX_CALLS = 16
"""Most calls in one answer, to stop a model that repeats itself."""

_SPACE = r"[ \t\r\n]"
"""The characters of `tool_form.BLANKS` as a regular expression."""

Thinking = Literal["never", "first", "begun"]
"""The place of a thought: none, at the start of the answer, or begun by the prompt."""


@dataclass(frozen=True, slots=True)
class AnswerShape:
    """The forms that an answer may have.

    Attributes:
        tools: tools that may be called, in OpenAI's form.
        must_call: whether the answer must consist of calls.
        parallel: whether an answer may hold several calls.
        schema: schema of the document that the answer must be; None for any text, and if there are tools.
        strict: whether to refuse schemas of which a part cannot be enforced.
        answer: a tool whose arguments are the answer's document, besides those that may be called. A model that calls
            functions calls its last one again if the prompt requests a document; it calls a function for the answer
            if there is one (docs/LOG.md, 2026-11-22).
    """

    tools: tuple[Mapping[str, Any], ...] = ()
    must_call: bool = False
    parallel: bool = True
    schema: Mapping[str, Any] | None = None
    strict: bool = False
    answer: Mapping[str, Any] | None = None

    @property
    def names(self) -> list[str]:
        """Names of the tools, the one for the answer last."""
        return [tool["function"]["name"] for tool in (*self.tools, *([self.answer] if self.answer else []))]

    @property
    def is_free(self) -> bool:
        """Whether the answer may be any text."""
        return not self.must_call and self.schema is None and self.answer is None


def answer_grammar(shape: AnswerShape, form: ToolForm, control: Container[str], thinking: Thinking = "never") -> str:
    """Return the grammar of an answer for `SamplingParams.grammar`; "" if any text is allowed and there are no tools.

    Args:
        shape: the forms that the answer may have.
        form: the form of calls.
        control: the tokenizer's added tokens; a tag among them is written as one token.
        thinking: the place of a thought before the answer.
    """
    if not shape.tools and shape.schema is None:
        return ""
    rules = ["%llguidance {}", f"start: {_THOUGHTS[thinking]} body"]
    if thinking != "never":
        rules.append(f"thought: (thought_end{' | TEXT? </think>' if '</think>' in control else ''}) SPACE?")
        rules.append(r"thought_end[lazy]: /(?s:.*)<\/think>/")
    if thinking == "first":  # lazy, so that nothing after it can be text
        rules.append(f"think: think_begin{' | SPACE? <think>' if '<think>' in control else ''}")
        rules.append(f"think_begin[lazy]: /{_SPACE}{{0,{MAX_BLANKS}}}<think>/")
    terminals = ["TEXT: /(?s:.+)/", f"SPACE: /{_SPACE}{{1,{MAX_BLANKS}}}/"]
    return "\n".join([*rules, *_body(shape, form, control), *terminals, ""])


_THOUGHTS: Mapping[Thinking, str] = {"never": "", "first": "(think thought)?", "begun": "thought"}


def _body(shape: AnswerShape, form: ToolForm, control: Container[str]) -> Iterator[str]:
    ways = []
    if shape.tools:
        ways.append("first" + (f" more{{0,{MAX_CALLS - 1}}}" if shape.parallel else ""))
        yield from _calls(shape, form, control)
    if shape.answer is not None:
        opening, closing = _written(form.opening, control), _written(form.closing, control)
        ways.append(f"{opening} {_named(shape.answer, 'answer')} {closing}")
        yield from _arguments(shape.answer, "answer", shape)
    elif shape.schema is not None:
        ways.append(json_rule(shape.schema, strict=shape.strict))
    elif not shape.must_call:
        ways.append("TEXT?")
    yield f"body: {' | '.join(ways)}"


def _named(tool: Mapping[str, Any], key: object) -> str:
    """Return the JSON of a call as an expression."""
    head = '{"name": ' + json.dumps(tool["function"]["name"])
    return f"{_text(head)} rest_{key}"


def _arguments(tool: Mapping[str, Any], key: object, shape: AnswerShape) -> Iterator[str]:
    """Yield the rules for the part of a call after its name."""
    function = tool["function"]
    strict, field = bool(function.get("strict", shape.strict)), f"parameters of {function['name']}"
    arguments = json_rule(function["parameters"], strict=strict, field=field)
    yield f'rest_{key}: ", \\"arguments\\": " arguments_{key} "}}"'
    yield f"arguments_{key}: {arguments}"


def _calls(shape: AnswerShape, form: ToolForm, control: Container[str]) -> Iterator[str]:
    """Yield the rules for the first call and those after it."""
    for i, tool in enumerate(shape.tools):
        yield from _arguments(tool, i, shape)
    yield f"named: {' | '.join(_named(tool, i) for i, tool in enumerate(shape.tools))}"
    yield f"call: {_written(form.opening, control)} named {_written(form.closing, control)}"
    yield 'more: "\\n" call'
    if not shape.is_free:
        yield "first: call"
        return
    names = [json.dumps(tool["function"]["name"]) for tool in shape.tools]
    tag = TAGGED.opening.strip()
    opens = form.native and tag not in control
    tagged = _written(TAGGED.closing, control) if form.native else _text(TAGGED.closing)
    first = []
    for i, name in enumerate(names):
        head = rf"{_SPACE}*\{{{_SPACE}*\"name\"{_SPACE}*:{_SPACE}*{_regex(name)}"
        yield rf"fenced_{i}[lazy]: /(?s:.*)```json{head}/"
        yield rf"bare_{i}[lazy]: /{head}/"
        first += [rf'fenced_{i} rest_{i} "\n```"', f"bare_{i} rest_{i}"]
        if not opens:
            yield rf"tagged_{i}[lazy]: /(?s:.*){tag}{head}/"
            first.append(f"tagged_{i} rest_{i} {tagged}")
    if opens:
        yield f"opened[lazy]: /(?s:.*){tag}/"
        first.append(f"opened SPACE? named {tagged}")
    elif form.native:
        yield f"opened: TEXT? {_written(form.opening, control)}"
        first.append(f"opened named {tagged}")
    yield f"first: {' | '.join(first)}"


def _written(mark: str, control: Container[str]) -> str:
    """Return a mark as an expression, with its tag as one token if the tokenizer has it."""
    tag = mark.strip()
    if tag not in control:
        return _text(mark)
    before, after = mark.split(tag)
    return " ".join([*([_text(before)] if before else []), tag, *([_text(after)] if after else [])])


def _text(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _regex(text: str) -> str:
    return re.escape(text).replace("/", r"\/").replace("\\\n", r"\n")
