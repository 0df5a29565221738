"""Calls told from text, whatever pieces an answer comes in."""

from __future__ import annotations

import json
import random
import time

import pytest

from langchain_card.text.call_reader import CallPart, CallReader

NAMES = ["add", "add_all", "now"]
CALL = '{"name": "add", "arguments": {"a": 1, "b": {"c": "}\\"{`"}}}'
NOW = '{"name": "now", "arguments": {}}'


def read(pieces: list[str]) -> tuple[str, list[tuple[str, dict[str, object]]]]:
    """The text, and the calls with their arguments."""
    reader, text, names, arguments = CallReader(NAMES), "", [], []
    for part in [part for piece in pieces for part in reader.push(piece)] + reader.finish():
        if isinstance(part, str):
            text += part
            continue
        if part.name:
            assert part.number == len(names)
            assert part.call_id.startswith("call_")
            names.append(part.name)
            arguments.append("")
        arguments[part.number] += part.arguments
    return text, [(name, json.loads(said)) for name, said in zip(names, arguments, strict=True)]


ADD = ("add", {"a": 1, "b": {"c": '}"{`'}})
ANSWERS = {
    "Hello.": ("Hello.", []),
    "": ("", []),
    f"```json\n{CALL}\n```": ("", [ADD]),
    f"<tool_call>\n{CALL}\n</tool_call>": ("", [ADD]),
    CALL: ("", [ADD]),
    f" \n{CALL}\n": ("", [ADD]),
    f"Let me see.\n\n```json\n{CALL}\n```\n": ("Let me see.", [ADD]),
    f"<tool_call>{CALL}</tool_call>\n<tool_call>\n{NOW}\n</tool_call>": ("", [ADD, ("now", {})]),
    f"```json\n{CALL}\n```\n```json\n{NOW}\n```": ("", [ADD, ("now", {})]),
    '```json\n{\n  "name":"add_all" ,\n  "arguments" : {"of": [1, 2]}\n}\n```': ("", [("add_all", {"of": [1, 2]})]),
    # Not calls: no tool's name, not at the start, no arguments, other keys.
    '```json\n{"name": "John", "age": 3}\n```': ('```json\n{"name": "John", "age": 3}\n```', []),
    f"It is {CALL}": (f"It is {CALL}", []),
    '{"name": "add", "arguments": 3}': ('{"name": "add", "arguments": 3}', []),
    '{"name": "add", "parameters": {}}': ('{"name": "add", "parameters": {}}', []),
    "a < b and `c` and ```json": ("a < b and `c` and ```json", []),
    "```json\n{\"name\": \"ad": ("```json\n{\"name\": \"ad", []),
    f"```json\n{CALL}\n``` and more": (" and more", [ADD]),
}  # fmt: skip


@pytest.mark.parametrize("answer", ANSWERS)
def test_an_answer_in_any_pieces(answer: str) -> None:
    assert read([answer]) == ANSWERS[answer]
    assert read([*answer]) == ANSWERS[answer]
    rng = random.Random(0)
    for _ in range(50):
        cuts = sorted(rng.choices(range(len(answer) + 1), k=4))
        pieces = [answer[start:end] for start, end in zip([0, *cuts], [*cuts, len(answer)], strict=True)]
        assert read(pieces) == ANSWERS[answer]


def test_text_and_arguments_come_as_soon_as_they_are_certain() -> None:
    reader = CallReader(NAMES)
    assert reader.push("Let me see. ") == ["Let me see."]
    assert reader.push("<") == []
    assert reader.push("b>bold") == [" <b>bold"]
    (head,) = reader.push('\n<tool_call>\n{"name": "add", "arguments": {')[:1]
    assert isinstance(head, CallPart)
    assert (head.number, head.name) == (0, "add")
    assert reader.push('"a": ') == [CallPart(0, '"a": ')]
    assert reader.push("12") == [CallPart(0, "12")]
    assert reader.push("}}\n</tool_") == [CallPart(0, "}")]
    assert reader.push("call>") + reader.finish() == []


def test_a_call_that_was_cut_off_keeps_what_came() -> None:
    reader = CallReader(NAMES)
    _, part = reader.push('{"name": "add", "arguments": {"a": "x')
    assert part == CallPart(0, '{"a": "x')
    assert reader.finish() == []


def test_blanks_without_end_cost_nothing() -> None:
    reader, began = CallReader(NAMES), time.perf_counter()
    assert not any(reader.push(" " * 64) for _ in range(1000))
    assert reader.push("x") == [" " * 64_000 + "x"]
    assert time.perf_counter() - began < 20, "they were looked at again and again"
