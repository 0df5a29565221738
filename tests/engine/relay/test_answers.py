"""An engine's answers as streams: what a relay on another machine reads."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from typing import Any

import pytest

from langchain_card.config import EngineConfig
from langchain_card.core.messages import Emit
from langchain_card.core.request import FinishReason, Request, RequestStats, SamplingParams
from langchain_card.engine.engine import Engine
from langchain_card.engine.relay import answers as module
from langchain_card.engine.relay.answers import Alive, Answers
from langchain_card.engine.relay.messages import Began, Committed, Ended, NotServed, Submit
from langchain_card.limits import Limits
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


def submit(output_ids: tuple[int, ...] = (), **options: Any) -> Submit:
    return Submit(Request(7, PROMPT, SamplingParams(max_tokens=40, **options)), output_ids)


async def read(engine: Engine, request: Submit) -> list[Any]:
    return [message async for message in Answers(engine.backend, engine.grammars.start).answer(request)]


def tokens(messages: list[Any]) -> list[int]:
    return [token for message in messages if isinstance(message, Committed) for token in message.token_ids]


@pytest.mark.parametrize("options", [{}, {"temperature": 0.9, "seed": 3, "logprobs": 2, "presence_penalty": 0.5}])
async def test_a_stream_is_the_answer_and_its_rest_is_the_rest(engine: Engine, options: dict[str, Any]) -> None:
    wanted = engine.submit(PROMPT, SamplingParams(max_tokens=40, **options)).result()
    whole = await read(engine, submit(**options))
    assert isinstance(whole[0], Began) and isinstance(whole[-1], Ended) and whole[-1].reason is FinishReason.LENGTH
    assert tokens(whole) == [*wanted.token_ids]
    logprobs = [each.logprob for message in whole if isinstance(message, Committed) for each in message.logprobs]
    assert logprobs == pytest.approx([each.logprob for each in wanted.logprobs], abs=1e-9)
    rest = await read(engine, submit(wanted.token_ids[:17], **options))
    assert tokens(rest) == [*wanted.token_ids[17:]]


async def test_tokens_are_joined(engine: Engine) -> None:
    """At most one message with tokens each 20 ms: 40 tokens of a tiny model come in far fewer."""
    began = time.monotonic()
    messages = await read(engine, submit())
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


async def test_a_request_that_waits_gives_signs_of_life(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "ALIVE_SECONDS", 0.02)
    permits = held(engine, monkeypatch)
    stream = Answers(engine.backend, engine.grammars.start).answer(submit())
    first = [await anext(stream) for _ in range(3)]
    assert any(isinstance(message, Alive) for message in first)
    permits.release(100)
    assert isinstance([message async for message in stream][-1], Ended)


async def test_a_reader_that_leaves_frees_its_seat(engine: Engine) -> None:
    stream = Answers(engine.backend, engine.grammars.start).answer(submit())
    assert isinstance(await anext(stream), Began)
    await stream.aclose()
    while engine.num_open:
        await asyncio.sleep(0.005)


async def test_a_bad_request_ends_alone(engine: Engine) -> None:
    (refused,) = await read(engine, submit(grammar="start: ("))
    assert isinstance(refused, NotServed) and refused.error.kind == "InvalidInputError"
