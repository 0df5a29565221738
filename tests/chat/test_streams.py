"""Streams, in all the ways in which LangChain takes them: token by token, through chains, events and agents."""

from __future__ import annotations

import asyncio
import gc
import random
import statistics
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import pytest
from langchain.agents import create_agent
from langchain_core.callbacks import AsyncCallbackHandler, BaseCallbackHandler
from langchain_core.messages import AIMessageChunk
from langchain_core.output_parsers import StrOutputParser
from langchain_core.prompts import ChatPromptTemplate
from langchain_core.rate_limiters import InMemoryRateLimiter
from langchain_core.runnables import RunnableParallel
from langchain_core.tracers.base import BaseTracer

from langchain_card import CARDChatModel
from tests.support import SMALL

pytestmark = pytest.mark.filterwarnings("ignore:.*(is|are) in beta", "ignore:.*version='v1' is deprecated")

ASK = "Tell me about the sea."
PROMPT = ChatPromptTemplate.from_messages([("human", "{text}")])


@pytest.fixture(scope="module")
def model() -> Iterator[CARDChatModel]:
    with CARDChatModel(model=SMALL, draft_model="ngram", max_tokens=60) as model:
        yield model.load()


# Every way gives the same words, early and in pieces.

Way = Callable[[CARDChatModel, str], AsyncIterator[str]]


async def stream(model: CARDChatModel, text: str) -> AsyncIterator[str]:
    for chunk in model.stream(text):
        yield chunk.text


async def astream(model: CARDChatModel, text: str) -> AsyncIterator[str]:
    async for chunk in model.astream(text):
        yield chunk.text


async def chain(model: CARDChatModel, text: str) -> AsyncIterator[str]:
    for piece in (PROMPT | model | StrOutputParser()).stream({"text": text}):
        yield piece


async def achain(model: CARDChatModel, text: str) -> AsyncIterator[str]:
    async for piece in (PROMPT | model | StrOutputParser()).astream({"text": text}):
        yield piece


async def parallel(model: CARDChatModel, text: str) -> AsyncIterator[str]:
    both = RunnableParallel(one=PROMPT | model, other=PROMPT | model.bind(max_tokens=3))
    async for chunk in both.astream({"text": text}):
        if "one" in chunk:
            yield chunk["one"].text


async def _events(model: CARDChatModel, text: str, version: Any) -> AsyncIterator[str]:
    async for event in (PROMPT | model | StrOutputParser()).astream_events({"text": text}, version=version):
        if event["event"] == "on_chat_model_stream":
            yield event["data"]["chunk"].text


async def events_v1(model: CARDChatModel, text: str) -> AsyncIterator[str]:
    async for piece in _events(model, text, "v1"):
        yield piece


async def events_v2(model: CARDChatModel, text: str) -> AsyncIterator[str]:
    async for piece in _events(model, text, "v2"):
        yield piece


async def events_v3(model: CARDChatModel, text: str) -> AsyncIterator[str]:
    async for piece in (await model.astream_events(text, version="v3")).text:
        yield piece


async def agent(model: CARDChatModel, text: str) -> AsyncIterator[str]:
    messages: Any = {"messages": [("human", text)]}
    async for chunk, _ in create_agent(model, []).astream(messages, stream_mode="messages"):
        yield chunk.text


async def callbacks(model: CARDChatModel, text: str) -> AsyncIterator[str]:
    heard: asyncio.Queue[str | None] = asyncio.Queue()

    class Handler(AsyncCallbackHandler):
        async def on_llm_new_token(self, token: Any, **kwargs: Any) -> None:
            heard.put_nowait(token)

        async def on_llm_end(self, *args: Any, **kwargs: Any) -> None:
            heard.put_nowait(None)

    call = asyncio.create_task(model.ainvoke(text, {"callbacks": [Handler()]}, stream=True))
    while (token := await heard.get()) is not None:
        yield token
    await call


WAYS: list[Way] = [stream, astream, chain, achain, parallel, events_v1, events_v2, events_v3, agent, callbacks]


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
@pytest.mark.slow
async def test_tokens_come_early_whatever_the_way(model: CARDChatModel, way: Way) -> None:
    firsts = []
    for text in (ASK, "What is a hash table?", "Name three rivers."):
        answer = model.invoke(text)
        started, times, pieces = time.perf_counter(), list[float](), list[str]()
        async for piece in way(model, text):
            times.append(time.perf_counter())
            pieces.append(piece)
        assert "".join(pieces) == answer.text
        assert len([piece for piece in pieces if piece]) > 0.8 * answer.usage_metadata["output_tokens"]  # type: ignore[index]
        first = next(at for at, piece in zip(times, pieces, strict=True) if piece)
        firsts.append((first - started) / (times[-1] - started))
    assert statistics.median(firsts) < 0.5  # 1 for an answer that comes at once, at its end


# Chunks, for both forms of content.


def test_v1_content(toy: dict[str, Any]) -> None:
    with CARDChatModel(**toy) as v0, CARDChatModel(**toy, output_version="v1") as v1:
        text = v0.invoke("hi").content
        assert v1.invoke("hi").content == [{"type": "text", "text": text}]
        chunks = list(v1.stream("hi"))
        assert all(isinstance(chunk.content, list) for chunk in chunks)
        whole: Any = sum(chunks[1:], start=chunks[0])
        assert [(block["type"], block["text"], block["index"]) for block in whole.content] == [("text", text, 0)]
        assert whole.chunk_position == "last" and chunks[-1].usage_metadata is not None


def test_streaming_may_be_switched_off(toy: dict[str, Any]) -> None:
    with CARDChatModel(**toy, disable_streaming=True) as model:
        (chunk,) = model.stream("hi")
        assert chunk.content == model.invoke("hi").content
    with CARDChatModel(**toy, disable_streaming="tool_calling") as model:
        assert len(list(model.stream("hi"))) > 1


def test_a_rate_limiter_is_asked_before_each_stream(toy: dict[str, Any]) -> None:
    limiter = InMemoryRateLimiter(requests_per_second=20, check_every_n_seconds=0.005, max_bucket_size=1)
    with CARDChatModel(**toy, rate_limiter=limiter).load() as model:
        started = time.monotonic()
        for _ in range(4):
            list(model.stream("hi"))
        assert time.monotonic() - started > 0.14


# Traces.


class Trace(BaseTracer):
    def __init__(self) -> None:
        super().__init__()
        self.runs: list[Any] = []

    def _persist_run(self, run: Any) -> None:
        self.runs.append(run)


def test_a_trace_says_what_ran(toy: dict[str, Any], socket_disabled: None) -> None:
    with CARDChatModel(**toy, temperature=0.5, seed=3, stop="zz") as model:
        for call in (model.invoke, lambda *args, **kwargs: list(model.stream(*args, **kwargs))):
            trace = Trace()
            call("hi", {"callbacks": [trace], "tags": ["mine"]}, max_tokens=4)
            (run,) = trace.runs
            metadata, params = run.extra["metadata"], run.extra["invocation_params"]
            assert metadata["ls_provider"] == "card" and metadata["ls_model_name"] == toy["model"]
            assert (metadata["ls_temperature"], metadata["ls_max_tokens"], metadata["ls_stop"]) == (0.5, 4, ["zz"])
            assert params["_type"] == "card-chat" and params["seed"] == 3 and params["max_tokens"] == 4
            assert "mine" in run.tags and run.error is None
            message = run.outputs["generations"][0][0]["message"]["kwargs"]
            assert message["usage_metadata"]["output_tokens"] == 4
            assert len([event for event in run.events if event["name"] == "new_token"]) in (0, 5)


# Consumers that leave.


@pytest.mark.usefixtures("one_thread")
@pytest.mark.slow
async def test_a_thousand_streams_that_are_broken_off_leave_nothing(toy: dict[str, Any]) -> None:
    rng = random.Random(0)
    with CARDChatModel(**toy, max_model_len=512).load() as model:
        engine = model._engine()
        await asyncio.gather(*(leave(model, 2, 1, 0.0) for _ in range(40)))
        await asyncio.gather(*(leave(model, 0, 1, 0.0) for _ in range(40)))
        gc.collect()
        threads = threading.active_count()
        for _ in range(50):
            leaving = [
                leave(model, rng.randrange(5), rng.randrange(1, 30), rng.choice((0.0, 0.01, 0.05))) for _ in range(20)
            ]
            await asyncio.gather(*leaving)
        end = time.monotonic() + 10
        while engine.num_running or engine.num_open or len(asyncio.all_tasks()) > 1:
            assert time.monotonic() < end, "a request or a task is left"
            await asyncio.sleep(0.01)
        assert threading.active_count() <= threads
        free = engine.backend._target._runner.pool.num_free  # type: ignore[attr-defined]
        assert free == engine.config.limits.num_seqs, "a slot is left"
        assert (await model.ainvoke("hi")).content


async def leave(model: CARDChatModel, kind: int, pieces: int, delay: float) -> None:
    """Reads some pieces of a long answer and goes: out of a loop, by cancellation, or without a word."""
    options: Any = {"max_tokens": 400}
    if kind == 0:
        async for _ in model.astream("hi", **options):
            if (pieces := pieces - 1) <= 0:
                break
    elif kind == 1:
        task = asyncio.create_task(model.ainvoke("hi", **options))
        await asyncio.sleep(delay)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
    elif kind == 2:
        await asyncio.to_thread(leave_here, model, pieces)
    elif kind == 3:
        async with await model.astream_events("hi", version="v3", **options) as stream:
            async for _ in stream.text:
                if (pieces := pieces - 1) <= 0:
                    break
    else:
        async for _ in (model | StrOutputParser()).astream_events("hi", version="v2", **options):
            if (pieces := pieces - 1) <= 0:
                break


def leave_here(model: CARDChatModel, pieces: int) -> None:
    for _ in model.stream("hi", max_tokens=400):
        if (pieces := pieces - 1) <= 0:
            break


def test_a_handler_that_raises_does_not_stop_the_answer(toy: dict[str, Any], caplog: pytest.LogCaptureFixture) -> None:
    class Broken(BaseCallbackHandler):
        def on_llm_new_token(self, *args: Any, **kwargs: Any) -> None:
            raise RuntimeError("planted")

    with CARDChatModel(**toy) as model:
        whole: Any = sum(model.stream("hi", {"callbacks": [Broken()]}), start=AIMessageChunk(""))
        assert whole.content == model.invoke("hi").content
        assert "planted" in caplog.text
