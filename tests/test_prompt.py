"""Messages to prompt ids, by the tokenizer's own chat template."""

from __future__ import annotations

from typing import Any

import pytest
import tiny
from langchain_core.messages import (
    AIMessage,
    AIMessageChunk,
    BaseMessage,
    ChatMessage,
    HumanMessage,
    RemoveMessage,
    SystemMessage,
    ToolMessage,
)

from langchain_card.errors import InvalidInputError
from langchain_card.prompt import encode, to_conversation


def prompt_of(*messages: BaseMessage) -> str:
    tokenizer = tiny.byte_tokenizer()
    return tokenizer.decode(encode(to_conversation(messages, "toy"), tokenizer, "toy"))


def test_roles() -> None:
    messages = [
        SystemMessage("Be brief."),
        HumanMessage("Hé 🙂"),
        AIMessage("Yes?"),
        ToolMessage("42", tool_call_id="1"),
        ChatMessage("hm", role="critic"),
    ]
    turns = "<system>Be brief.\n<user>Hé 🙂\n<assistant>Yes?\n<tool>42\n<critic>hm\n"
    assert prompt_of(*messages) == turns + "<ai>"


def test_ids_are_those_of_the_tokenizer() -> None:
    tokenizer = tiny.byte_tokenizer()
    conversation = to_conversation([HumanMessage("hi")], "toy")
    expected = tokenizer.apply_chat_template(
        [{"role": "user", "content": "hi"}], add_generation_prompt=True, return_dict=False
    )
    ids = encode(conversation, tokenizer, "toy")
    assert ids == expected
    assert all(type(token) is int for token in ids)


@pytest.mark.parametrize(
    ("content", "text"),
    [
        ([{"type": "text", "text": "a"}, {"type": "text", "text": "b"}], "ab"),
        (["a", {"type": "text", "text": "b"}], "ab"),
        ([], ""),
        ("", ""),
    ],
)
def test_text_blocks_are_joined(content: Any, text: str) -> None:
    assert prompt_of(HumanMessage(content)) == f"<user>{text}\n<ai>"


def test_a_chunk_is_a_message() -> None:
    assert to_conversation([AIMessageChunk(content="x")], "toy") == [{"role": "assistant", "content": "x"}]


def test_tool_calls_reach_the_template() -> None:
    call = {"name": "add", "args": {"a": 1}, "id": "7", "type": "tool_call"}
    turns = to_conversation([AIMessage("", tool_calls=[call]), ToolMessage("1", tool_call_id="7")], "toy")
    assert turns[0]["tool_calls"] == [
        {"type": "function", "id": "7", "function": {"name": "add", "arguments": {"a": 1}}}
    ]
    assert turns[1]["tool_call_id"] == "7"


@pytest.mark.parametrize("kind", ["image", "image_url", "audio", "thinking"])
def test_other_blocks_are_refused_by_name(kind: str) -> None:
    message = HumanMessage([{"type": "text", "text": "what is this?"}, {"type": kind, kind: "data"}])
    with pytest.raises(InvalidInputError, match=f"content block = '{kind}': toy reads text only"):
        prompt_of(message)


def test_no_messages() -> None:
    with pytest.raises(InvalidInputError, match="at least one message"):
        prompt_of()


def test_an_unknown_kind_of_message() -> None:
    with pytest.raises(InvalidInputError, match="messages = 'remove'"):
        prompt_of(RemoveMessage(id="1"))


def test_a_tokenizer_without_chat_template() -> None:
    tokenizer = tiny.byte_tokenizer()
    tokenizer.chat_template = None
    with pytest.raises(InvalidInputError, match=r"toy.*no chat template.*instruct model"):
        encode([{"role": "user", "content": "hi"}], tokenizer, "toy")


def test_a_template_that_refuses() -> None:
    tokenizer = tiny.byte_tokenizer()
    tokenizer.chat_template = "{{ raise_exception('roles must alternate') }}"
    with pytest.raises(InvalidInputError, match="refuses them: roles must alternate"):
        encode([{"role": "user", "content": "hi"}], tokenizer, "toy")
