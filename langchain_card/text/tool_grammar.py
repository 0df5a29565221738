"""The grammar of an answer that may call tools, must be a document of a schema, or either.

Calls may follow some text, and a model may write one in other ways than its form has it: the first may be a fenced
block, stand between tags, or be bare JSON at the start, as far as the name of a tool. From there on it is a call, and
goes on as one: what `CallReader` takes for a call is one here, too.
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
"""In one answer; a model that repeats itself has to end somewhere."""

_SPACE = r"[ \t\r\n]"
"""One of `form.BLANKS`."""

Thinking = Literal["never", "first", "begun"]
"""Whether an answer may begin with a thought, or the prompt ended within one."""


@dataclass(frozen=True, slots=True)
class AnswerShape:
    """What an answer may be.

    Attributes:
        tools: that may be called, in OpenAI's form.
        must_call: nothing but calls will do.
        parallel: several calls may come in one answer.
        schema: of the document that it is; None for any text, and where there are tools.
        strict: refuse what of a schema cannot be enforced.
        answer: a tool whose arguments are the answer's document, beside those that may be called. A model that calls
            functions goes on to do so: told of a document it calls its last function again, told of a function for the
            answer it calls that (docs/LOG.md).
    """

    tools: tuple[Mapping[str, Any], ...] = ()
    must_call: bool = False
    parallel: bool = True
    schema: Mapping[str, Any] | None = None
    strict: bool = False
    answer: Mapping[str, Any] | None = None

    @property
    def names(self) -> list[str]:
        """Of the tools, the one for the answer last."""
        return [tool["function"]["name"] for tool in (*self.tools, *([self.answer] if self.answer else []))]

    @property
    def is_free(self) -> bool:
        """Whether any text will do."""
        return not self.must_call and self.schema is None and self.answer is None


def answer_grammar(shape: AnswerShape, form: ToolForm, control: Container[str], thinking: Thinking = "never") -> str:
    """For `SamplingParams.grammar`; "" where nothing is asked.

    Args:
        shape: of the answer.
        form: in which calls are written.
        control: the tokenizer's added tokens: a tag that is one of them is written as one token.
        thinking: what comes before.
    """
    if not shape.tools and shape.schema is None:
        return ""
    rules = ["%llguidance {}", f"start: {_THOUGHTS[thinking]} body"]
    if thinking != "never":
        rules.append(f"thought: (thought_end{' | TEXT? </think>' if '</think>' in control else ''}) SPACE?")
        rules.append(r"thought_end[lazy]: /(?s:.*)<\/think>/")
    if thinking == "first":  # lazy: nothing that goes on behind it can be text
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
    """The JSON of a call."""
    head = '{"name": ' + json.dumps(tool["function"]["name"])
    return f"{_text(head)} rest_{key}"


def _arguments(tool: Mapping[str, Any], key: object, shape: AnswerShape) -> Iterator[str]:
    """Rules of what follows its name."""
    function = tool["function"]
    strict, field = bool(function.get("strict", shape.strict)), f"parameters of {function['name']}"
    arguments = json_rule(function["parameters"], strict=strict, field=field)
    yield f'rest_{key}: ", \\"arguments\\": " arguments_{key} "}}"'
    yield f"arguments_{key}: {arguments}"


def _calls(shape: AnswerShape, form: ToolForm, control: Container[str]) -> Iterator[str]:
    """Rules of the first call and of those behind it."""
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
        begun = rf"{_SPACE}*\{{{_SPACE}*\"name\"{_SPACE}*:{_SPACE}*{_regex(name)}"
        yield rf"fenced_{i}[lazy]: /(?s:.*)```json{begun}/"
        yield rf"bare_{i}[lazy]: /{begun}/"
        first += [rf'fenced_{i} rest_{i} "\n```"', f"bare_{i} rest_{i}"]
        if not opens:
            yield rf"tagged_{i}[lazy]: /(?s:.*){tag}{begun}/"
            first.append(f"tagged_{i} rest_{i} {tagged}")
    if opens:
        yield f"opened[lazy]: /(?s:.*){tag}/"
        first.append(f"opened SPACE? named {tagged}")
    elif form.native:
        yield f"opened: TEXT? {_written(form.opening, control)}"
        first.append(f"opened named {tagged}")
    yield f"first: {' | '.join(first)}"


def _written(mark: str, control: Container[str]) -> str:
    """A mark, with its tag as one token where it is one."""
    tag = mark.strip()
    if tag not in control:
        return _text(mark)
    before, after = mark.split(tag)
    return " ".join([*([_text(before)] if before else []), tag, *([_text(after)] if after else [])])


def _text(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _regex(text: str) -> str:
    return re.escape(text).replace("/", r"\/").replace("\\\n", r"\n")
