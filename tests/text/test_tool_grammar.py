"""What the grammars of answers let through, and that calls are read out of it and of nothing else."""

from __future__ import annotations

import functools
import json
import random
from collections.abc import Sequence
from typing import Any

import jsonschema
import pytest

from langchain_card.chat.reasoning import Thoughts
from langchain_card.chat.schemas import tool_dict
from langchain_card.constraints.compiler import Grammars, Matcher
from langchain_card.errors import InvalidInputError
from langchain_card.limits import Limits
from langchain_card.text.call_reader import CallReader
from langchain_card.text.tool_form import FENCED, TAGGED
from langchain_card.text.tool_grammar import MAX_CALLS, AnswerShape, Thinking, answer_grammar
from tests.support import tiny
from tests.support.scripted import FUNCTION, JOKE, PARAMETERS
from tests.support.tool_calls import ADD, JSON, MARKS, TOOL_DICTS, D, F, G, T, U

KINDS = {"fenced": (FENCED, ()), "tagged": (TAGGED, ()), "tokens": (TAGGED, MARKS), "hidden": (FENCED, MARKS)}


@functools.cache
def grammars(marks: tuple[str, ...]) -> tuple[Grammars, Any]:
    tokenizer = tiny.byte_tokenizer()
    tokenizer.add_tokens([*marks])
    return Grammars(tokenizer, len(tokenizer), [256], Limits()), tokenizer


def start(shape: AnswerShape, kind: str = "fenced", thinking: Thinking = "never") -> Matcher:
    form, marks = KINDS[kind]
    made, tokenizer = grammars(marks)
    matcher: Any = made.start(answer_grammar(shape, form, tokenizer.get_added_vocab(), thinking))
    return matcher  # type: ignore[no-any-return]


def allows(matcher: Matcher, text: str, kind: str = "fenced") -> str:
    """`whole` where the text may end, `begun` where it must go on, `no` where it cannot come."""
    said = matcher.fork()
    if not all(said.accept(token) for token in grammars(KINDS[kind][1])[1].encode(text)):
        return "no"
    return "whole" if may_end(said) else "begun"


def may_end(matcher: Matcher) -> bool:
    return bool(matcher._matcher.is_accepting())


# Each shape: texts that are whole, that only begin one, and that cannot come.

AUTO = AnswerShape(TOOL_DICTS)
FORCED = AnswerShape(TOOL_DICTS, must_call=True)
NAMED = AnswerShape(TOOL_DICTS[1:], must_call=True, parallel=False)
DOCUMENT = AnswerShape(schema=PARAMETERS)
JOKE_TOOL = {"type": "function", "function": {"name": "Joke", "description": "", "parameters": PARAMETERS}}
UNION = AnswerShape(TOOL_DICTS, answer=JOKE_TOOL)
E = f'<tool_call>\n{{"name": "Joke", "arguments": {JSON}}}\n</tool_call>'
TEXTS = ["", "Hi.", "x" + ADD, "```json\n{}\n```", '{"name": "ad', "< ` {", '```json\n{"name": "John"}\n```']
EARLY = ['{"name": "add"', '```json{\t"name":"add"', 'Hm.\n```json\n{"name": "weather"', '<tool_call>{"name": "add"']
WRONG = [f"{F} ", f"{F}\n\n{F}", f"{ADD}x", '{"name": "add", "x', '```json\n{"name": "add"}']
WRONG += [F.replace("-2", "2.5"), F.replace('"b": -2', '"c": 3'), F.replace(", ", ",  "), F.replace("1,", '1, "a": 2,')]
WRONG += [text.replace("```json\n", "<tool_call>").replace("\n```", "</tool_call>") for text in WRONG[3:6]]
CASES: dict[str, tuple[AnswerShape, str, Thinking, list[str], list[str], list[str]]] = {
    "auto": (AUTO, "fenced", "never", [*TEXTS, F, ADD, f" \n{ADD}", T, f"So: {F}\n{G}", f"{ADD}\n{F}"], EARLY, WRONG),
    "auto, tags": (AUTO, "tagged", "never", [*TEXTS, T, F, ADD, f"So: {T}\n{U}", f"{F}\n{U}"],
                   [*EARLY, "<tool_call>", "a<tool_call>\r\n"],
                   [*WRONG, "<tool_call>x", f"{T}\n{F}", f"{T} {U}", '<tool_call>\n{"name": "adder'] ),
    "auto, tokens": (AUTO, "tokens", "never", [*TEXTS, T, F, ADD, f"So: {T}\n{U}", f"{F}\n{U}"],
                     [*EARLY[:-1], "<tool_call>", "a<tool_call>\n"],
                     [*WRONG[:9], "<tool_call>x", "</tool_call>", "<think>", f"{T}\n{F}", f"Hm {T}</tool_call>"]),
    "auto, hidden tags": (AUTO, "hidden", "never", [*TEXTS, F, ADD], EARLY[:-1], ["<tool_call>", T]),
    "one call": (AnswerShape(TOOL_DICTS, parallel=False), "fenced", "never", ["", "Hi.", F, T, ADD], [], [f"{F}\n{G}"]),
    "required": (FORCED, "fenced", "never", [F, G, f"{F}\n{G}"], ["", "```json\n"], [*TEXTS[1:], ADD, T, f" {F}"]),
    "required, tags": (FORCED, "tagged", "never", [T, f"{T}\n{U}"], ["", "<tool_call>"], [*TEXTS[1:], ADD, F, f" {T}"]),
    "required, tokens": (FORCED, "tokens", "never", [T, f"{T}\n{U}"], ["", "<tool_call>"], [*TEXTS[1:], ADD, F]),
    "named": (NAMED, "fenced", "never", [G], [""], [F, f"{G}\n{G}", "Hi."]),
    "document": (DOCUMENT, "fenced", "never", [JSON, '{"setup": ""}'], ["", "{"], ["Hi.", F, "{}", f"{JSON} ", "[1]"]),
    "either": (UNION, "fenced", "never", [D, F, f"{F}\n{G}"], ["", "```"], ["Hi.", ADD, T, JSON, f"{F}\n{D}", D + F]),
    "either, tokens": (UNION, "tokens", "never", [E, T, f"{T}\n{U}"], [""], ["Hi.", ADD, F, JSON]),
    "thought, auto": (AUTO, "fenced", "first", [*TEXTS, F, f"<think>{F}{ADD}</think>Hi.", f" <think></think>\n{ADD}"],
                      [*EARLY, "<think>", f"\n<think>{F}"], WRONG),
    "thought, tokens": (AUTO, "tokens", "first", [*TEXTS, T, f"<think>{F}</think>\n\nHi.", f"<think></think>{T}"],
                        ["<think>", f"\n<think>{F}"], ["</think>", "Hi.<think>", f"<think>{T}"]),
    "thought, required": (FORCED, "fenced", "first", [F, f"<think>a <b> {G}</think>\n\n{F}"], ["", f"<think>{F}"],
                          ["Hi.", "<think></think>Hi.", f"\n{F}"]),
    "thought, document": (DOCUMENT, "tokens", "first", [JSON, f"<think>{F}</think>\n\n{JSON}"], ["", "<think>"],
                          ["Hi.", "<think></think>Hi."]),
    "within a thought": (FORCED, "tagged", "begun", [f"hm {F} {T} {ADD}</think>\n{T}", f"</think>{T}\n{U}"],
                         ["", T, JSON], ["</think>Hi.", f"</think>{F}"]),
    "within a thought, either": (UNION, "tokens", "begun", [f"hm{F}</think>\n\n{E}", f"</think>{T}"],
                                 ["", "hm", JSON], ["</think>Hi.", T, f"</think></think>{T}"]),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_what_an_answer_may_be(name: str) -> None:
    shape, kind, thinking, whole, begun, wrong = CASES[name]
    matcher = start(shape, kind, thinking)
    found = {text: allows(matcher, text, kind) for text in (*whole, *begun, *wrong)}
    assert found == {**dict.fromkeys(whole, "whole"), **dict.fromkeys(begun, "begun"), **dict.fromkeys(wrong, "no")}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("thinking", ["never", "first", "begun"])
@pytest.mark.parametrize("shape", [AUTO, FORCED, NAMED, DOCUMENT, UNION], ids=["auto", "any", "named", "json", "or"])
def test_every_grammar_is_checked_and_can_be_ended_early(shape: AnswerShape, thinking: Thinking, kind: str) -> None:
    form, marks = KINDS[kind]
    made, tokenizer = grammars(marks)
    grammar = answer_grammar(shape, form, tokenizer.get_added_vocab(), thinking)
    if kind == "tokens":
        made.check(grammar, 100)
    matcher = start(shape, kind, thinking)
    ending = matcher.closing(10**6)
    assert ending is not None and len(ending) < 100
    said = matcher.fork()
    assert all(map(said.accept, ending)) and may_end(said)
    for text in ("<think>I call a ", "hm < a", '{"setup": "'):
        if allows(matcher, text, kind) == "begun":
            within = matcher.fork()
            assert all(map(within.accept, tokenizer.encode(text)))
            rest = within.closing(10**6)
            assert rest is not None and len(rest) < 100 and all(map(within.accept, rest)) and may_end(within)


def test_nothing_asked_is_no_grammar() -> None:
    assert answer_grammar(AnswerShape(), FENCED, (), "first") == ""


def test_at_most_so_many_calls() -> None:
    assert allows(start(AUTO), "\n".join([F] * MAX_CALLS)) == "whole"
    assert allows(start(AUTO), "\n".join([F] * (MAX_CALLS + 1))) == "no"


def test_names_with_dots_and_dashes_and_many_tools() -> None:
    names = ["a.b", "a-b", "a_b", "-", ".", "x" * 64, *(f"tool{i}" for i in range(94))]
    tools = tuple(tool_dict({**FUNCTION, "name": name}) for name in names)
    for kind in ("fenced", "tagged"):
        form = KINDS[kind][0]
        for shape in (AnswerShape(tools), AnswerShape(tools, must_call=True)):
            matcher = start(shape, kind)
            for name in (*names[:8], "tool93"):
                call = form.opening + json.dumps({"name": name, "arguments": JOKE}, ensure_ascii=False) + form.closing
                assert allows(matcher, call, kind) == "whole", name
                assert read(call, names) == ("", [(name, JOKE)])
                wrong = call.replace(f'"{name}"', '"axb"')
                assert allows(matcher, wrong, kind) == ("no" if shape.must_call or kind == "tagged" else "whole")
    form, marks = KINDS["tokens"]
    made, tokenizer = grammars(marks)
    made.check(answer_grammar(AnswerShape(tools), form, tokenizer.get_added_vocab()), 100)


def test_strict_refuses_what_cannot_be_enforced() -> None:
    odd = {"type": "object", "properties": {"a": {"type": "array", "uniqueItems": True}}, "required": ["a"]}
    loose = tool_dict({"name": "f", "parameters": odd})
    strict = {**loose, "function": {**loose["function"], "strict": True}}
    assert allows(start(AnswerShape((loose,))), '{"name": "f", "arguments": {"a": [1, 1]}}') == "whole"
    for shape in (AnswerShape((strict,)), AnswerShape(schema=odd, strict=True), AnswerShape((loose,), strict=True)):
        with pytest.raises(InvalidInputError, match="uniqueItems"):
            start(shape)


def test_arguments_are_objects_whatever_the_schema_leaves_open() -> None:
    for parameters in ({"description": "any"}, {"anyOf": [{"type": "integer"}, {"type": "object"}]}, {"title": "x"}):
        matcher = start(AnswerShape((tool_dict({"name": "f", "parameters": parameters}),), must_call=True))
        assert allows(matcher, '```json\n{"name": "f", "arguments": {}}\n```') == "whole"
        assert allows(matcher, '```json\n{"name": "f", "arguments": 3') == "no"


# What is read is what the grammar lets through.


def read(text: str, names: Sequence[str], *, bare: bool = True) -> tuple[str, list[tuple[str, Any]]]:
    reader, said, calls = CallReader(names, bare=bare), "", list[tuple[str, str]]()
    for part in [*(part for char in text for part in reader.push(char)), *reader.finish()]:
        if isinstance(part, str):
            said += part
        elif part.name:
            calls.append((part.name, part.arguments))
        else:
            calls[-1] = calls[-1][0], calls[-1][1] + part.arguments
    return said, [(name, json.loads(arguments)) for name, arguments in calls]


def random_tool(rng: random.Random, name: str) -> dict[str, Any]:
    kinds: list[Any] = [
        {"type": "string"}, {"type": "integer"}, {"type": "boolean"}, {"enum": ["a", '"', "é"]}, {"type": "null"},
        {"type": "array", "items": {"type": "string"}}, {"type": "object"}, PARAMETERS,
        {"type": "number", "minimum": 1},
    ]  # fmt: skip
    keys = rng.sample(["a", "b", "name", "arguments", "`", "é"], k=rng.randrange(4))
    properties = {key: rng.choice(kinds) for key in keys}
    closed = {"required": keys[: rng.randrange(3)], "additionalProperties": False}
    parameters = {"type": "object", "properties": properties, **closed}
    return tool_dict({"name": name, "description": "", "parameters": parameters})


PIECES = ["```json", "```", "\n", " ", "\x0b", "\xa0", "{", '"name"', ":", ": ", '"', "add", ", ", '"arguments"', "{}"]
PIECES += [
    "<tool_call>",
    "</tool_call>",
    "<think>",
    "</think>",
    "hm",
    "<",
    "`",
    "}",
    '{"name": "add',
    '", "arguments": ',
]


def piece(rng: random.Random) -> str:
    """What calls are made of, alone or in their order, with blanks that may stand between them and others."""
    if rng.random() < 0.8:
        return rng.choice(PIECES)
    words = [
        rng.choice(["```json", "<tool_call>", ""]),
        "{",
        '"name"',
        ":",
        '"add"',
        ",",
        '"arguments"',
        ":",
        '{"x": 1}',
    ]
    blank = rng.choice(["", " ", "\n", "\x0b", "\xa0", "\x1c"])
    return "".join(word + (blank if rng.random() < 0.2 else "") for word in words)


def walk(matcher: Matcher, rng: random.Random, tokenizer: Any) -> str:
    """A text of likely pieces and of bytes, as far as the grammar lets them through, and an end."""
    said: list[int] = []
    for _ in range(rng.randrange(60)):
        mask = matcher.allowed()
        free = [token for token in range(len(tokenizer)) if mask[token >> 3] >> (token & 7) & 1 and token != 256]
        if not free:
            break
        spelled = tokenizer.encode(piece(rng)) if rng.random() < 0.8 else [rng.choice(free)]
        if rng.random() < 0.1:
            spelled = [token for char in piece(rng) for token in tokenizer.encode(char)]  # control tokens as text
        if rng.random() < 0.3:
            spelled = matcher.forced() or spelled
        ahead = matcher.fork()
        if all(map(ahead.accept, spelled)):
            matcher, said = ahead, said + spelled
    ending = matcher.closing(10**6)
    assert ending is not None
    return str(tokenizer.decode([*said, *ending]))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("thinking", ["never", "first", "begun"])
@pytest.mark.slow
def test_every_call_that_is_read_can_be_made(kind: str, thinking: Thinking) -> None:
    rng, tokenizer, called = random.Random(f"{kind} {thinking}"), grammars(KINDS[kind][1])[1], 0
    for _ in range(25):
        tools = {name: random_tool(rng, name) for name in ("add", "add.all", "now")[: rng.randrange(1, 4)]}
        must_call, schema = rng.random() < 0.3, rng.choice([None, None, PARAMETERS, {"type": "object"}])
        final = {"type": "function", "function": {"name": "Joke", "parameters": schema}}
        answer = None if schema is None or must_call else final
        shape = AnswerShape((*tools.values(),), must_call, rng.random() < 0.7, answer=answer)
        matcher = start(shape, kind, thinking)
        for _ in range(6):
            said = walk(matcher.fork(), rng, tokenizer)
            thoughts = Thoughts(begun=thinking == "begun")
            if thinking != "never":
                said = "".join(part for _, part in [*map(thoughts.push, said), thoughts.finish()])
            text, calls = read(said, shape.names, bare=shape.is_free)
            called += len(calls)
            names = [name for name, _ in calls]
            assert (calls and not text.strip()) or shape.is_free, said
            assert len(calls) <= (MAX_CALLS if shape.parallel else 1), said
            assert names == ["Joke"] or "Joke" not in names, said
            for name, arguments in calls:
                jsonschema.validate(arguments, (tools | {"Joke": final})[name]["function"]["parameters"])
    assert called > 25
