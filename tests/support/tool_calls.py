"""Calls of two tools as text in every form, the calls that are read from it, and checks of messages that hold them."""

from __future__ import annotations

import json
from typing import Any

import jsonschema
from langchain_core.messages import AIMessage, AIMessageChunk

from langchain_card.chat.schemas import tool_dicts
from tests.support.scripted import JOKE, add, weather

TOOLS = [add, weather]
TOOL_DICTS = tuple(tool_dicts(TOOLS))
MARKS = ("<tool_call>", "</tool_call>", "<think>", "</think>")
ADD, RAIN = '{"name": "add", "arguments": {"a": 1, "b": -2}}', '{"name": "weather", "arguments": {"place": "Ō\\n"}}'
F, G = f"```json\n{ADD}\n```", f"```json\n{RAIN}\n```"
T, U = f"<tool_call>\n{ADD}\n</tool_call>", f"<tool_call>\n{RAIN}\n</tool_call>"
JSON = json.dumps(JOKE, ensure_ascii=False)
D = f'```json\n{{"name": "Joke", "arguments": {JSON}}}\n```'
ARGUMENTS = {tool["function"]["name"]: tool["function"]["parameters"] for tool in TOOL_DICTS}
CALLED = [("add", {"a": 1, "b": -2}), ("weather", {"place": "Ō\n"})]


def calls(message: AIMessage) -> list[tuple[str, dict[str, Any]]]:
    """Return the calls of a message after a check that its blocks and `tool_calls` agree."""
    blocks = [block for block in message.content_blocks if block["type"] == "tool_call"]
    assert [(b["name"], b["args"], b["id"]) for b in blocks] == [
        (call["name"], call["args"], call["id"]) for call in message.tool_calls
    ]
    assert not message.invalid_tool_calls
    assert len({call["id"] for call in message.tool_calls}) == len(message.tool_calls)
    for call in message.tool_calls:
        jsonschema.validate(call["args"], ARGUMENTS[call["name"]])
    return [(call["name"], call["args"]) for call in message.tool_calls]


def merged(chunks: list[Any]) -> AIMessageChunk:
    assert [chunk.chunk_position for chunk in chunks].index("last") == len(chunks) - 1
    whole: AIMessageChunk = sum(chunks[1:], start=chunks[0])
    return whole
