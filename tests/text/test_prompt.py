"""Messages to prompt ids, by the tokenizer's own chat template."""

from __future__ import annotations

import re
from typing import Any

import pytest
from langchain_core.messages import (
    AIMessage,
    AIMessageChunk,
    BaseMessage,
    ChatMessage,
    HumanMessage,
    RemoveMessage,
    SystemMessage,
    ToolCall,
    ToolMessage,
)

from langchain_card.errors import InvalidInputError, UnsupportedContentError
from langchain_card.text.prompt import encode, to_conversation
from tests.support import tiny


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
    turns = "<system>Be brief.\n<user>Hé 🙂\n<assistant>Yes?\n<user>Result of the function:\n42\n<critic>hm\n"
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


def test_calls_that_only_blocks_tell_of_reach_the_template() -> None:
    blocks: list[Any] = [
        {"type": "tool_use", "id": "1", "name": "add", "input": {"a": 1}},
        {"type": "tool_call", "id": "2", "name": "now", "args": {}},
    ]
    (turn,) = to_conversation([AIMessage(blocks)], "toy")
    assert [(call["id"], call["function"]["arguments"]) for call in turn["tool_calls"]] == [("1", {"a": 1}), ("2", {})]
    known = {"name": "add", "args": {"a": 1}, "id": "1", "type": "tool_call"}
    (turn,) = to_conversation([AIMessage(blocks, tool_calls=[known])], "toy")
    assert [call["id"] for call in turn["tool_calls"]] == ["1", "2"]


@pytest.mark.parametrize("text", ["\ud83d", "a\udc00b"])
def test_half_characters_are_refused(text: str) -> None:
    call = {"name": "add", "args": {"a": text}, "id": "7", "type": "tool_call"}
    for message in (HumanMessage(text), AIMessage("", tool_calls=[call]), ToolMessage(text, tool_call_id="7")):
        with pytest.raises(InvalidInputError, match=r"messages = .*surrogates not allowed"):
            encode(to_conversation([message], "toy"), tiny.byte_tokenizer(), "toy")


def test_calls_that_could_not_be_read_are_text() -> None:
    bad = {"type": "invalid_tool_call", "name": "add", "args": '{"a": ', "id": "7", "error": "cut"}
    whole = {"name": "now", "args": {}, "id": "8", "type": "tool_call"}
    turns = to_conversation([AIMessage("Hm.", tool_calls=[whole], invalid_tool_calls=[bad])], "toy")  # type: ignore[list-item]
    assert turns[0]["content"] == 'Hm.\n{"name": "add", "arguments": {"a": '
    assert [call["id"] for call in turns[0]["tool_calls"]] == ["8"]


@pytest.mark.parametrize(
    "block",
    [
        {"type": "image", "url": "https://example.com/cat.png"},
        {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": ""}},
        {"type": "image_url", "image_url": {"url": "data:image/png;base64,"}},
        {"type": "input_image", "image_url": ""},
        {"type": "audio", "base64": "", "mime_type": "audio/wav"},
        {"type": "input_audio", "input_audio": {"data": "", "format": "wav"}},
        {"type": "video", "url": "https://example.com/cat.mp4"},
        {"type": "file", "file_id": "1"},
        {"type": "text-plain", "text": "a file's words"},
        {"type": "document", "source": {"type": "text", "data": ""}},
        {"type": "thinking", "thinking": "hm"},
        {"type": "tool_use", "id": "1", "name": "add", "input": {}},
        {"type": "text", "text": None},
        {"type": "hologram"},
        {"image": "cat.png"},
    ],
    ids=str,
)
@pytest.mark.parametrize("kind", [SystemMessage, HumanMessage])
def test_other_blocks_are_refused_by_name(block: dict[str, Any], kind: type[BaseMessage]) -> None:
    message = kind([{"type": "text", "text": "what is this?"}, block])
    name = re.escape(repr(block.get("type")))
    with pytest.raises(UnsupportedContentError, match=f"content block = {name}: toy reads text only. Hint: pass text"):
        prompt_of(message)


def test_images_of_assistants_and_tools_are_refused() -> None:
    image = {"type": "image", "url": "https://example.com/cat.png"}
    for message in (AIMessage([image]), ToolMessage([image], tool_call_id="1")):
        with pytest.raises(InvalidInputError, match="'image': toy reads text only"):
            prompt_of(message)


CALL: ToolCall = {"name": "add", "args": {"a": 1}, "id": "7", "type": "tool_call"}
FUNCTION = {"type": "function", "id": "7", "function": {"name": "add", "arguments": {"a": 1}}}


@pytest.mark.parametrize(
    "blocks",
    [
        [{"type": "reasoning", "reasoning": "One and"}, {"type": "text", "text": "It is "}, dict(CALL), "2."],
        [{"type": "thinking", "thinking": "One ", "signature": "x"}, {"type": "thinking", "thinking": "and"},
         {"type": "redacted_thinking", "data": "x"}, {"type": "text", "text": "It is 2."},
         {"type": "tool_use", "id": "7", "name": "add", "input": {"a": 1}}],
        [{"type": "reasoning", "reasoning": "One and", "summary": []}, {"type": "function_call", "name": "add"},
         {"type": "server_tool_call", "name": "web_search", "id": "8", "args": {}},
         {"type": "server_tool_result", "tool_call_id": "8"}, {"type": "text", "text": "It is 2."}],
    ],
    ids=["v1", "Anthropic", "OpenAI"],
)  # fmt: skip
def test_typed_blocks_of_an_answer(blocks: list[Any]) -> None:
    (turn,) = to_conversation([AIMessage(blocks, tool_calls=[CALL])], "toy")
    assert turn == {
        "role": "assistant", "content": "It is 2.", "reasoning_content": "One and", "tool_calls": [FUNCTION],
    }  # fmt: skip


def test_an_answer_stored_as_v1_goes_back() -> None:
    stored = AIMessage(content_blocks=[{"type": "reasoning", "reasoning": "hm"}, {"type": "text", "text": "2"}, CALL])
    (turn,) = to_conversation([stored], "toy")
    assert (turn["content"], turn["reasoning_content"], turn["tool_calls"]) == ("2", "hm", [FUNCTION])


def test_reasoning_beside_the_content() -> None:
    message = AIMessage("2", additional_kwargs={"reasoning_content": "hm"})
    expected = [{"role": "assistant", "content": "2", "reasoning_content": "hm"}]
    assert to_conversation([message], "toy") == expected


@pytest.mark.parametrize(
    ("content", "text"),
    [("42", "42"), (42, "42"), (None, "None"), (["4", {"type": "text", "text": "2"}], "42"), ([], "")],
)
def test_results_of_tools(content: Any, text: str) -> None:
    message = ToolMessage(content=content, tool_call_id="7", name="add")
    turn = {"role": "tool", "content": text, "name": "add", "tool_call_id": "7"}
    assert to_conversation([message], "toy") == [turn]
    failed = {**turn, "content": f"Error: {text}" if text else "Error"}
    assert to_conversation([message.model_copy(update={"status": "error"})], "toy") == [failed]


def test_results_of_tools_in_a_human_message() -> None:
    results = [
        {"type": "tool_result", "tool_use_id": "7", "content": "42"},
        {"type": "tool_result", "tool_use_id": "8", "content": [{"type": "text", "text": "no"}], "is_error": True},
    ]
    tools = [
        {"role": "tool", "content": "42", "tool_call_id": "7"},
        {"role": "tool", "content": "Error: no", "tool_call_id": "8"},
    ]
    assert to_conversation([HumanMessage(results)], "toy") == tools
    named = HumanMessage([*results, {"type": "text", "text": "And?"}], name="bob")
    assert to_conversation([named], "toy") == [*tools, {"role": "user", "content": "And?", "name": "bob"}]


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
