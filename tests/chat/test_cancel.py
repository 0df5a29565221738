"""Leaving a `CARDChatModel`'s answer early: breaks, cancelled tasks, event streams, time-outs."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
from langchain_core.callbacks import AsyncCallbackHandler

from langchain_card import CARDChatModel
from langchain_card.core.request import FinishReason
from langchain_card.engine.engine import Engine
from langchain_card.engine.generation import Generation
from langchain_card.errors import GenerationTimeoutError

LONG = 900
"""Tokens that take seconds; no test waits for them."""


@pytest.fixture
def model(toy: dict[str, Any]) -> Iterator[CARDChatModel]:
    with CARDChatModel(**toy) as model:
        yield model


@pytest.fixture
def no_gc() -> Iterator[None]:
    """A collection would hide a generator that nobody closes."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.fixture
def submitted(monkeypatch: pytest.MonkeyPatch) -> list[Generation]:
    """Every request that an engine gets during the test."""
    submit, generations = Engine.submit, list[Generation]()

    def recorded(self: Engine, *args: Any) -> Generation:
        generations.append(submit(self, *args))
        return generations[-1]

    monkeypatch.setattr(Engine, "submit", recorded)
    monkeypatch.setattr(Engine, "warm_up", lambda *_: None)  # it submits where kernels were compiled
    return generations


async def check_aborted(model: CARDChatModel, submitted: list[Generation], count: int = 1) -> None:
    end = time.monotonic() + 10
    while not all(generation.finished for generation in submitted):
        assert time.monotonic() < end
        await asyncio.sleep(0.01)
    assert model._engine().num_running == 0
    assert [generation._reason for generation in submitted] == [FinishReason.ABORT] * count


async def test_leaving_a_stream_aborts_the_request(model: CARDChatModel, submitted: list[Generation]) -> None:
    for _ in model.stream("hi", max_tokens=LONG):
        break
    await check_aborted(model, submitted)
    assert model.invoke("hi").content


async def test_leaving_an_async_stream_aborts_the_request(model: CARDChatModel, submitted: list[Generation]) -> None:
    async for _ in model.astream("hi", max_tokens=LONG):
        break
    await check_aborted(model, submitted)


async def test_cancelling_a_call_aborts_the_request(model: CARDChatModel, submitted: list[Generation]) -> None:
    task = asyncio.create_task(model.ainvoke("hi", max_tokens=LONG))
    while not submitted or submitted[0].stats is None:
        await asyncio.sleep(0.01)
    with pytest.raises(asyncio.TimeoutError):
        await asyncio.wait_for(task, 0.05)
    await check_aborted(model, submitted)


async def test_a_call_cancelled_while_it_is_prepared_is_never_submitted(
    model: CARDChatModel, submitted: list[Generation], monkeypatch: pytest.MonkeyPatch
) -> None:
    prepare, begun, may_go_on = CARDChatModel._prepare, threading.Event(), threading.Event()

    def slow(self: CARDChatModel, *args: Any) -> Any:
        begun.set()
        may_go_on.wait(10)
        return prepare(self, *args)

    monkeypatch.setattr(CARDChatModel, "_prepare", slow)
    task = asyncio.create_task(model.ainvoke("hi", max_tokens=LONG))
    await asyncio.to_thread(begun.wait)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    may_go_on.set()
    await asyncio.sleep(0.2)
    assert submitted == []


async def test_cancelling_within_a_callback_aborts_the_request(
    model: CARDChatModel, submitted: list[Generation], no_gc: None
) -> None:
    inside = asyncio.Event()

    class Slow(AsyncCallbackHandler):
        async def on_llm_new_token(self, *args: Any, **kwargs: Any) -> None:
            inside.set()
            await asyncio.sleep(60)

    async def consume() -> None:
        async for _ in model.astream("hi", max_tokens=LONG, config={"callbacks": [Slow()]}):
            pass

    task = asyncio.create_task(consume())
    await inside.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await check_aborted(model, submitted)


@pytest.mark.filterwarnings("ignore:.*is in beta")
async def test_closing_an_event_stream_aborts_the_request(
    model: CARDChatModel, submitted: list[Generation], no_gc: None
) -> None:
    class Slow(AsyncCallbackHandler):
        async def on_llm_new_token(self, *args: Any, **kwargs: Any) -> None:
            await asyncio.sleep(0.01)

    for _ in range(3):
        events = await model.astream_events("hi", version="v3", max_tokens=LONG, config={"callbacks": [Slow()]})
        async for _ in events:
            break
        await events.aclose()
    await check_aborted(model, submitted, 3)


async def test_each_step_of_a_stream_may_run_in_its_own_task(model: CARDChatModel) -> None:
    stream = model.astream("hi")
    chunks = []
    with contextlib.suppress(StopAsyncIteration):
        while True:
            chunks.append(await asyncio.create_task(stream.__anext__()))
    assert len(chunks) == 9


async def test_timeouts(toy: dict[str, Any], submitted: list[Generation]) -> None:
    with CARDChatModel(**toy, timeout=0.2).load() as model:
        with pytest.raises(GenerationTimeoutError, match=r"timeout = 0\.2"):
            model.invoke("hi", max_tokens=LONG)
        with pytest.raises(GenerationTimeoutError):
            list(model.stream("hi", max_tokens=LONG))
        with pytest.raises(GenerationTimeoutError):
            await model.ainvoke("hi", max_tokens=LONG)
        with pytest.raises(GenerationTimeoutError):
            _ = [chunk async for chunk in model.astream("hi", max_tokens=LONG)]
        await check_aborted(model, submitted, 4)
        assert model.invoke("hi", max_tokens=1).usage_metadata["output_tokens"] == 1
