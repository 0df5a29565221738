"""Conversations that a template refuses, in a form that it takes; all others as they are."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from langchain_core.messages import (
    AIMessage,
    BaseMessage,
    ChatMessage,
    HumanMessage,
    SystemMessage,
    ToolCall,
    ToolMessage,
)

from langchain_card.errors import InvalidInputError
from langchain_card.text.prompt import encode, to_conversation
from tests.support import tiny, vocabularies

TURNS: dict[str, tuple[list[BaseMessage], str, str]] = {
    "two system messages": (
        [SystemMessage("a"), SystemMessage("b"), HumanMessage("c")],
        "<s>[INST] a\n\nb\n\nc[/INST]",
        "<start_of_turn>user\na\n\nb\n\nc<end_of_turn>\n",
    ),
    "two humans": (
        [HumanMessage("a"), HumanMessage("b", name="bob")],
        "<s>[INST] a\n\nb[/INST]",
        "<start_of_turn>user\na\n\nb<end_of_turn>\n",
    ),
    "a system message and two humans": (
        [SystemMessage("a"), HumanMessage("b"), HumanMessage("c"), AIMessage("d"), HumanMessage("e")],
        "<s>[INST] b\n\nc[/INST] d</s>[INST] a\n\ne[/INST]",
        "<start_of_turn>user\na\n\nb\n\nc<end_of_turn>\n<start_of_turn>model\nd<end_of_turn>\n"
        "<start_of_turn>user\ne<end_of_turn>\n",
    ),
    "two answers, one empty": (
        [HumanMessage("a"), AIMessage(""), AIMessage("b"), HumanMessage("c")],
        "<s>[INST] a[/INST] b</s>[INST] c[/INST]",
        "<start_of_turn>user\na<end_of_turn>\n<start_of_turn>model\nb<end_of_turn>\n"
        "<start_of_turn>user\nc<end_of_turn>\n",
    ),
    "a system message in between": (
        [SystemMessage("a"), HumanMessage("b"), AIMessage([]), SystemMessage("c"), HumanMessage("d", name="dan")],
        "<s>[INST] a\n\nb[/INST] </s>[INST] c\n\nd[/INST]",
        "<start_of_turn>user\na\n\nb<end_of_turn>\n<start_of_turn>model\n<end_of_turn>\n"
        "<start_of_turn>user\nc\n\nd<end_of_turn>\n",
    ),
}


@pytest.mark.parametrize("name", TURNS)
def test_templates_that_want_turns_to_alternate(name: str) -> None:
    messages, mistral, gemma = TURNS[name]
    tokenizer = tiny.byte_tokenizer()
    for template, text in ((vocabularies.MISTRAL, mistral), (vocabularies.GEMMA, gemma + "<start_of_turn>model\n")):
        tokenizer.chat_template = template
        assert tokenizer.decode(encode(to_conversation(messages, "toy"), tokenizer, "toy")) == text


@pytest.mark.parametrize("name", TURNS)
@pytest.mark.parametrize("load", [vocabularies.smollm2, vocabularies.smollm2_tools], ids=lambda load: load.__name__)
def test_templates_that_accept_see_the_conversation_as_it_is(name: str, load: Callable[[], Any]) -> None:
    conversation, tokenizer = to_conversation(TURNS[name][0], "toy"), load()
    assert encode(conversation, tokenizer, "toy") == vocabularies.own(conversation, tokenizer)


def test_a_name_reaches_the_template() -> None:
    tokenizer = vocabularies.smollm2_tools()
    ids = encode(to_conversation([HumanMessage("hi", name="bob")], "toy"), tokenizer, "toy")
    assert "<|im_start|>user bob\nhi<|im_end|>" in tokenizer.decode(ids)


def test_merging_loses_nothing() -> None:
    """Names that differ go, calls of both turns stay, in order, and what both thought; so do results of tools."""
    tokenizer = tiny.byte_tokenizer()
    tokenizer.chat_template = (
        "{% for m in messages %}{% if not loop.first and m.role == messages[loop.index0 - 1].role %}"
        "{{ raise_exception('twice') }}{% endif %}{{ m | tojson }}\n{% endfor %}"
    )
    call: ToolCall = {"name": "add", "args": {"a": 1}, "id": "7", "type": "tool_call"}
    messages = [
        HumanMessage("g", name="ann"),
        HumanMessage("h", name="bob"),
        AIMessage("a", tool_calls=[call], name="x", additional_kwargs={"reasoning_content": "r"}),
        AIMessage("b", tool_calls=[{**call, "args": {}}], name="x", additional_kwargs={"reasoning_content": "s"}),
        ToolMessage("1", tool_call_id="7"),
        ToolMessage("2", tool_call_id="8"),
    ]
    ids = encode(to_conversation(messages, "toy"), tokenizer, "toy")
    user, answer, results = map(json.loads, tokenizer.decode(ids).splitlines())
    assert user == {"role": "user", "content": "g\n\nh"}
    assert (answer["reasoning_content"], answer["name"]) == ("r\n\ns", "x")
    first, second = ('```json\n{"name": "add", "arguments": ' + args + "}\n```" for args in ('{"a": 1}', "{}"))
    assert answer["content"] == f"a\n{first}\n\nb\n{second}"
    assert results == {"role": "user", "content": "Result of add:\n1\n\nResult of the function:\n2"}


def test_merged_turns_that_a_template_knows_keep_calls_and_results_apart() -> None:
    tokenizer = vocabularies.smollm2_tools()
    alternating = tiny.byte_tokenizer()
    twice = (
        "{% for m in messages if m.role == 'assistant' and m.content == 'a' %}{{ raise_exception('a') }}{% endfor %}"
    )
    alternating.chat_template = twice + tokenizer.chat_template
    call: ToolCall = {"name": "add", "args": {"a": 1}, "id": "7", "type": "tool_call"}
    messages = [
        HumanMessage("h"),
        AIMessage("a", tool_calls=[call]),
        AIMessage("b", tool_calls=[{**call, "id": "8"}]),
        ToolMessage("1", tool_call_id="7"),
        ToolMessage("2", tool_call_id="8"),
    ]
    read = alternating.decode(encode(to_conversation(messages, "toy"), alternating, "toy"))
    written = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
    assert f"<|im_start|>assistant\na\n\nb\n{written}\n{written}<|im_end|>" in read
    assert "<|im_start|>tool\n1<|im_end|>\n<|im_start|>tool\n2<|im_end|>" in read


def test_what_no_form_can_mend() -> None:
    tokenizer = tiny.byte_tokenizer()
    tokenizer.chat_template = vocabularies.GEMMA
    messages = [SystemMessage("a"), HumanMessage("b"), AIMessage("c"), ChatMessage("1", role="critic")]
    with pytest.raises(InvalidInputError, match=r"'critic'\]: the chat template of toy refuses them: System role not"):
        encode(to_conversation(messages, "toy"), tokenizer, "toy")


def test_merged_texts_cannot_make_control_tokens() -> None:
    tokenizer = tiny.byte_tokenizer()
    tokenizer.chat_template = vocabularies.MISTRAL
    tokenizer.add_tokens(["[INST]", "[/INST]"], special_tokens=True)
    turns = to_conversation([SystemMessage("[/INST]"), HumanMessage("[INST]"), HumanMessage("[INST]")], "toy")
    ids = encode(turns, tokenizer, "toy")
    assert tokenizer.decode(ids) == "<s>[INST] [/INST]\n\n[INST]\n\n[INST][/INST]"
    assert vocabularies.controls(ids, tokenizer) == tokenizer.convert_tokens_to_ids(["[INST]", "[/INST]"])
