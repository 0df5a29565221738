"""An engine's answers as streams: what a relay on another machine reads."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from langchain_card.config import EngineConfig
from langchain_card.core.messages import TARGET, Emit
from langchain_card.core.request import FinishReason, Request, RequestStats, SamplingParams
from langchain_card.engine.engine import Engine
from langchain_card.engine.relay import answers as module
from langchain_card.engine.relay.answers import Accepted, Alive, AnswerStreams, Lost, OtherModel
from langchain_card.engine.relay.messages import Began, Committed, Ended, NotServed, Submit
from langchain_card.errors import DeviceLostError, EngineError
from langchain_card.limits import Limits
from langchain_card.ports import Health
from tests.support import tiny
from tests.support.held import held

pytestmark = pytest.mark.usefixtures("one_thread")

PROMPT = tuple(range(40, 60))


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    target = tiny.make_target("llama", tmp_path_factory.mktemp("target"))
    config = EngineConfig(target, "ngram", dtype="float64", max_model_len=512, limits=Limits(max_num_seqs=2))
    with Engine(config) as engine:
        yield engine


@pytest.fixture
def streams(engine: Engine) -> AnswerStreams:
    return AnswerStreams(engine.backend, engine.kind, engine.request_ids, engine.grammars.start)


def submit(output_ids: tuple[int, ...] = (), **options: Any) -> Submit:
    return Submit(Request(7, PROMPT, SamplingParams(max_tokens=40, **options)), output_ids)


async def read(streams: AnswerStreams, request: Submit) -> list[Any]:
    return [message async for message in streams.answer(request)]


def tokens(messages: list[Any]) -> list[int]:
    return [token for message in messages if isinstance(message, Committed) for token in message.token_ids]


@pytest.mark.parametrize("options", [{}, {"temperature": 0.9, "seed": 3, "logprobs": 2, "presence_penalty": 0.5}])
async def test_a_stream_is_the_answer_and_its_rest_is_the_rest(
    engine: Engine, streams: AnswerStreams, options: dict[str, Any]
) -> None:
    wanted = engine.submit(PROMPT, SamplingParams(max_tokens=40, **options)).result()
    first, *whole = await read(streams, submit(**options))
    assert first == Accepted(engine.kind) and isinstance(whole[0], Began)
    assert isinstance(whole[-1], Ended) and whole[-1].reason is FinishReason.LENGTH
    assert tokens(whole) == [*wanted.token_ids]
    logprobs = [each.logprob for message in whole if isinstance(message, Committed) for each in message.logprobs]
    assert logprobs == pytest.approx([each.logprob for each in wanted.logprobs], abs=1e-9)
    rest = await read(streams, replace(submit(wanted.token_ids[:17], **options), kind=engine.kind))
    assert tokens(rest) == [*wanted.token_ids[17:]]


async def test_an_answer_of_another_model_is_not_continued(engine: Engine, streams: AnswerStreams) -> None:
    other = replace(engine.kind, answer="another model")
    assert await read(streams, replace(submit((5, 6)), kind=other)) == [OtherModel()]
    assert engine.num_open == 0
    same_weights = replace(engine.kind, machine="another machine")
    assert isinstance((await read(streams, replace(submit((5, 6)), kind=same_weights)))[-1], Ended)


async def test_tokens_are_joined(streams: AnswerStreams) -> None:
    began = time.monotonic()
    messages = await read(streams, submit())
    seconds = time.monotonic() - began
    assert sum(isinstance(message, Committed) for message in messages) <= 2 + seconds / module.JOIN_SECONDS
    stream = module._Stream(submit().request, asyncio.get_running_loop())
    for token in (5, 6, 7):
        stream.push(Emit(0, (token,), ("model",)))
    stream.finish(FinishReason.STOP, RequestStats())
    await asyncio.sleep(0)
    joined, end = await stream.take()
    assert isinstance(joined, Committed) and joined.token_ids == (5, 6, 7) and joined.sources == ("model",) * 3
    assert isinstance(end, Ended) and stream.is_over


async def test_a_request_that_waits_gives_signs_of_life(
    engine: Engine, streams: AnswerStreams, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "ALIVE_SECONDS", 0.02)
    permits = held(engine, monkeypatch)
    stream = streams.answer(submit())
    first = [await anext(stream) for _ in range(4)]
    assert any(isinstance(message, Alive) for message in first)
    permits.release(100)
    assert isinstance([message async for message in stream][-1], Ended)


async def test_a_grammar_that_compiles_gives_signs_of_life(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "ALIVE_SECONDS", 0.02)
    streams = AnswerStreams(engine.backend, engine.kind, engine.request_ids, lambda _: time.sleep(0.2))
    stream = streams.answer(submit(grammar='root ::= "a"'))
    first = [await anext(stream) for _ in range(4)]
    assert [type(message) for message in first] == [Accepted, Alive, Alive, Alive]
    await stream.aclose()


async def test_a_target_that_hangs_gives_none(
    engine: Engine, streams: AnswerStreams, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "ALIVE_SECONDS", 0.02)
    permits = held(engine, monkeypatch)
    monkeypatch.setattr(engine.backend, "health", lambda: {TARGET: Health("up", busy=9.0, budget=1.0)})
    messages = await read(streams, submit())
    assert isinstance(messages[-1], Lost) and not any(isinstance(message, Alive) for message in messages)
    permits.release(100)
    while engine.num_open:
        await asyncio.sleep(0.005)


async def test_a_reader_that_leaves_frees_its_seat(engine: Engine, streams: AnswerStreams) -> None:
    stream = streams.answer(submit())
    assert isinstance(await anext(stream), Accepted) and isinstance(await anext(stream), Began)
    await stream.aclose()
    while engine.num_open:
        await asyncio.sleep(0.005)


async def test_a_bad_request_ends_alone(streams: AnswerStreams) -> None:
    _, refused = await read(streams, submit(grammar="start: ("))
    assert isinstance(refused, NotServed) and refused.error.kind == "InvalidInputError"


@pytest.mark.parametrize(
    ("error", "last"),
    [(DeviceLostError("target", "cuda:0", "is lost"), Lost), (EngineError("request", 7, "is bad"), NotServed)],
)
async def test_another_engine_goes_on_where_the_device_is_lost(error: Exception, last: type[Any]) -> None:
    stream = module._Stream(submit().request, asyncio.get_running_loop())
    stream.fail(error)
    (message,) = await stream.take()
    assert isinstance(message, last) and stream.is_over


def test_what_comes_after_the_event_loop_is_dropped() -> None:
    loop = asyncio.new_event_loop()
    stream = module._Stream(submit().request, loop)
    loop.close()
    stream.push(Emit(0, (5,), ("model",)))
