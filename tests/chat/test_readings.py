"""Callbacks learn how much of a long prompt was read, as custom events of LangChain, in every kind of call."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from itertools import count
from typing import Any

import pytest
from langchain_core.callbacks import AsyncCallbackHandler, BaseCallbackHandler
from langchain_core.messages import HumanMessage
from langchain_core.prompts import ChatPromptTemplate

from langchain_card import CARDChatModel, Limits
from langchain_card.chat.readings import EVENT
from langchain_card.errors import InvalidInputError
from tests.support import tiny

pytestmark = pytest.mark.usefixtures("one_thread")
NUMBERS = count()


class Seen(BaseCallbackHandler):
    """A handler that keeps the events, and the runs that they belong to."""

    def __init__(self) -> None:
        self.data: list[dict[str, int]] = []
        self.of: set[Any] = set()
        self.runs: set[Any] = set()

    def on_chat_model_start(self, serialized: Any, messages: Any, *, run_id: Any, **_: Any) -> None:
        self.runs.add(run_id)

    def on_custom_event(self, name: str, data: Any, *, run_id: Any, **_: Any) -> None:
        assert name == EVENT
        self.data.append(data)
        self.of.add(run_id)


class SeenOnLoop(Seen, AsyncCallbackHandler):  # type: ignore[misc]
    """The same for asynchronous calls."""

    async def on_chat_model_start(self, *args: Any, **more: Any) -> None:  # type: ignore[override]
        Seen.on_chat_model_start(self, *args, **more)

    async def on_custom_event(self, *args: Any, **more: Any) -> None:  # type: ignore[override]
        Seen.on_custom_event(self, *args, **more)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[CARDChatModel]:
    target = tiny.make_target("llama", tmp_path_factory.mktemp("pair") / "target")
    with CARDChatModel(model=target, draft_model=None, max_tokens=3, limits=Limits(max_step_rows=64)) as model:
        yield model.load()


@pytest.fixture(autouse=True)
def _slow_passes(model: CARDChatModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """The tiny model would have read all before a call looks."""
    target: Any = model.engine.backend._target  # type: ignore[attr-defined]
    verify = target.verify
    monkeypatch.setattr(target, "verify", lambda windows: (time.sleep(0.02), verify(windows))[1])


def long() -> str:
    """A text that no call has seen."""
    return f"{next(NUMBERS)} begins a long text. " + "words and words " * 40


def check(seen: Seen) -> None:
    assert seen.data and seen.of == seen.runs and len(seen.of) == 1
    assert all(0 < event["read"] < event["total"] and event["total"] > 600 for event in seen.data)
    reads = [event["read"] for event in seen.data]
    assert reads == sorted({*reads}) and all(read % 64 == 0 for read in reads), "once a chunk"


@pytest.mark.parametrize("call", ["invoke", "stream"])
def test_a_call_reports(model: CARDChatModel, call: str) -> None:
    seen, answer = Seen(), getattr(model, call)
    [*answer(long(), config={"callbacks": [seen]})]
    check(seen)


@pytest.mark.parametrize("handler", [Seen, SeenOnLoop])
def test_a_call_on_an_event_loop_reports(model: CARDChatModel, handler: type[Seen]) -> None:
    async def calls(seen: list[Seen]) -> None:
        await model.ainvoke(long(), config={"callbacks": [seen[0]]})
        async for _ in model.astream(long(), config={"callbacks": [seen[1]]}):
            pass

    seen = [handler(), handler()]
    asyncio.run(calls(seen))
    for each in seen:
        check(each)


def test_a_stream_outside_a_call_does_not_report_as_an_earlier_one(model: CARDChatModel) -> None:
    """LangChain has other ways to run `_stream`, which note nothing."""
    seen = Seen()
    [*model.stream("Q", config={"callbacks": [seen]})]
    [*model._stream([HumanMessage(long())])]
    assert seen.data == []


@pytest.mark.parametrize("call", ["invoke", "stream"])
def test_a_call_that_was_refused_gets_no_events_of_a_later_one(model: CARDChatModel, call: str) -> None:
    seen, answer = Seen(), getattr(model, call)
    with pytest.raises(InvalidInputError):
        [*answer("Q", config={"callbacks": [seen]}, top_p=7.0)]
    [*model._stream([HumanMessage(long())])]
    assert seen.data == []


@pytest.mark.parametrize("call", ["ainvoke", "astream"])
def test_nor_does_one_on_an_event_loop(model: CARDChatModel, call: str) -> None:
    seen = SeenOnLoop()
    wrong: dict[str, Any] = {"config": {"callbacks": [seen]}, "top_p": 7.0}

    async def calls() -> None:
        with pytest.raises(InvalidInputError):
            if call == "ainvoke":
                await model.ainvoke("Q", **wrong)
            async for _ in model.astream("Q", **wrong):
                pass
        async for _ in model._astream([HumanMessage(long())]):
            pass

    asyncio.run(calls())
    assert seen.data == []


def test_a_chain_reports_in_its_event_stream(model: CARDChatModel) -> None:
    async def events() -> list[Any]:
        chain = ChatPromptTemplate.from_messages([("human", "{text}")]) | model
        return [event async for event in chain.astream_events({"text": long()}, version="v2")]

    found = asyncio.run(events())
    kinds = [event["event"] for event in found]
    own = [event for event in found if event["event"] == "on_custom_event"]
    assert own and all(event["name"] == EVENT and event["data"]["read"] < event["data"]["total"] for event in own)
    assert kinds.index("on_chat_model_start") < kinds.index("on_custom_event") < kinds.index("on_chat_model_stream")


def test_a_text_of_one_chunk_and_a_known_text_report_nothing(model: CARDChatModel) -> None:
    seen, text = Seen(), long()
    model.invoke("Q", config={"callbacks": [seen]})
    model.invoke(text)
    model.invoke(text, config={"callbacks": [seen]})
    assert seen.data == []
