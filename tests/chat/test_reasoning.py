"""Thoughts, told from what is said."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from langchain_core.messages import AIMessage, AIMessageChunk, BaseMessage, HumanMessage

from langchain_card import CARDChatModel
from langchain_card.chat.reasoning import Thoughts
from tests.support import SMALL

WHOLE = "<think>\nLet me see.\n</think>\n\nIt is 4."


def split(text: str, size: int, *, begun: bool = False) -> tuple[str, str]:
    thoughts = Thoughts(begun=begun)
    parts = [thoughts.push(text[i : i + size]) for i in range(0, len(text), size)]
    parts.append(thoughts.finish())
    return "".join(thought for thought, _ in parts), "".join(said for _, said in parts)


@pytest.mark.parametrize("size", [1, 2, 3, 7, 100])
@pytest.mark.parametrize(
    ("text", "thought", "said"),
    [
        (WHOLE, "Let me see.\n", "It is 4."),
        (" \n" + WHOLE, "Let me see.\n", "It is 4."),
        ("  \n" + WHOLE, "", "  \n" + WHOLE),  # where a grammar lets no thought begin either
        ("It is 4.", "", "It is 4."),
        ("  It is 4. ", "", "  It is 4. "),
        ("<th", "", "<th"),
        ("<thing> is </think> text", "", "<thing> is </think> text"),
        ("<think>never closed </thin", "never closed </thin", ""),
        ("<think>a < b </ c</think>done", "a < b </ c", "done"),
        ("<think></think>", "", ""),
        ("<think>a</think><think>b", "a", "<think>b"),
        ("", "", ""),
    ],
)
def test_the_split_is_the_same_for_all_pieces(text: str, thought: str, said: str, size: int) -> None:
    assert split(text, size) == (thought, said)


@pytest.mark.parametrize("size", [1, 4, 100])
def test_a_thought_that_the_prompt_has_begun(size: int) -> None:
    assert split("\nLet me see.</think>\n\n4", size, begun=True) == ("Let me see.", "4")
    assert split("no end", size, begun=True) == ("no end", "")


def test_nothing_is_kept_back_without_need() -> None:
    thoughts = Thoughts()
    assert thoughts.push("Hello") == ("", "Hello")
    thoughts = Thoughts()
    assert [thoughts.push(piece) for piece in ("<think>", "a", "b")] == [("", ""), ("a", ""), ("b", "")]


# A real model that does as it was shown, with a template that knows thoughts.

ASK: list[BaseMessage] = [HumanMessage("2 + 2?")]
for a, b in ((3, 2), (2, 1), (1, 1)):
    shown = AIMessage(f"<think>I add {a} and {b}.</think> It is {a + b}.")
    ASK[:0] = [HumanMessage(f"{a} + {b}?"), shown]
THOUGHT, SAID = "I add 2 and 2.", "It is 4."


@pytest.fixture(scope="module")
def model() -> Iterator[CARDChatModel]:
    with CARDChatModel(model=SMALL, draft_model="ngram", max_tokens=32).load() as model:
        tokenizer = model._engine().tokenizer
        before, tokenizer.chat_template = tokenizer.chat_template, tokenizer.chat_template + "{# <think> #}"
        yield model
        tokenizer.chat_template = before


async def test_reasoning_content(model: CARDChatModel) -> None:
    answer = model.invoke(ASK)
    assert answer.content == SAID
    assert answer.additional_kwargs == {"reasoning_content": THOUGHT}
    assert answer.content_blocks == [
        {"type": "reasoning", "reasoning": THOUGHT},
        {"type": "text", "text": SAID},
    ]
    usage = answer.usage_metadata
    assert usage is not None and 0 < usage["output_token_details"]["reasoning"] < usage["output_tokens"]
    whole: Any = sum(model.stream(ASK), start=AIMessageChunk(""))
    assert (whole.content, whole.additional_kwargs) == (answer.content, answer.additional_kwargs)
    assert whole.usage_metadata["output_token_details"] == usage["output_token_details"]
    assert (await model.ainvoke(ASK)).additional_kwargs == answer.additional_kwargs


@pytest.mark.filterwarnings("ignore:.*is in beta")
def test_reasoning_blocks(model: CARDChatModel) -> None:
    v1 = model.model_copy(update={"output_version": "v1"})
    blocks = [("reasoning", THOUGHT), ("text", SAID)]
    for message in (v1.invoke(ASK), sum(v1.stream(ASK), start=AIMessageChunk([]))):
        found: Any = [(block["type"], block[block["type"]]) for block in message.content]  # type: ignore[index]
        assert found == blocks
    stream = model.stream_events(ASK, version="v3")
    assert (str(stream.reasoning), str(stream.text)) == (THOUGHT, SAID)
    v1.close()


def test_thoughts_are_not_part_of_what_is_said_next(model: CARDChatModel) -> None:
    """An answer goes back into the conversation without its thoughts, unless the template wants them."""
    answer = model.invoke(ASK)
    again = model.get_num_tokens_from_messages([answer])
    assert again == model.get_num_tokens_from_messages([answer.model_copy(update={"additional_kwargs": {}})])
