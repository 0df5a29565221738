"""How much of a long text was read: a report after each chunk but the last, known tokens left out, in any engine."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from langchain_card.config import EngineConfig
from langchain_card.core.messages import Reading
from langchain_card.core.request import FinishReason, Request, RequestStats, SamplingParams
from langchain_card.engine.engine import Engine
from langchain_card.limits import Limits
from tests.support.held import held

pytestmark = pytest.mark.usefixtures("one_thread")
CHUNK = 32
PROMPT = [3 + i * 7 % 200 for i in range(100)]


class Recorder:
    """A consumer that keeps every reading, and how many tokens it had by then."""

    def __init__(self, request_id: int, prompt: list[int]) -> None:
        self.request = Request(request_id, tuple(prompt), SamplingParams(max_tokens=4, schedule="plain"))
        self.readings: list[tuple[int, int]] = []
        self.tokens: list[int] = []
        self.ended = threading.Event()
        self.error: BaseException | None = None

    def watch(self, stats: RequestStats) -> None:
        """Ignore the start."""

    def read(self, reading: Reading) -> None:
        assert reading.request_id == self.request.request_id and not self.tokens
        self.readings.append((reading.read, reading.total))

    def push(self, emit: Any) -> None:
        self.tokens += emit.token_ids

    def finish(self, reason: FinishReason, stats: RequestStats) -> None:
        self.ended.set()

    def fail(self, error: BaseException) -> None:
        self.error = error
        self.ended.set()


@pytest.fixture(scope="module", params=[False, pytest.param(True, marks=pytest.mark.slow)], ids=["here", "isolated"])
def engine(request: pytest.FixtureRequest, tiny_pairs: dict[str, tuple[str, str]]) -> Iterator[Engine]:
    limits = Limits(max_step_rows=CHUNK, max_num_seqs=2)
    with Engine(EngineConfig(tiny_pairs["llama"][0], None, limits=limits, isolate=request.param)) as engine:
        yield engine


def readings(engine: Engine, request_id: int, prompt: list[int]) -> list[tuple[int, int]]:
    recorder = Recorder(request_id, prompt)
    engine.backend.submit(recorder)
    assert recorder.ended.wait(60) and recorder.error is None and len(recorder.tokens) == 4
    return recorder.readings


def test_a_report_after_each_chunk_but_the_last(engine: Engine) -> None:
    assert readings(engine, 1000, PROMPT) == [(32, 100), (64, 100), (96, 100)]
    assert readings(engine, 1001, [9, *PROMPT[: CHUNK - 1]]) == [], "one pass reads it"


def test_known_tokens_do_not_count(engine: Engine) -> None:
    longer = [5, *PROMPT, *PROMPT[:50]]
    readings(engine, 1002, longer[:60])
    first, *_, last = readings(engine, 1003, longer)
    assert first[1] == last[1] <= 151 - 50 and first[0] == CHUNK, (first, last)


@pytest.fixture
def permits(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> threading.Semaphore:
    if engine.config.isolate:
        pytest.skip("the target is in another process")
    return held(engine, monkeypatch)


def test_a_reader_sees_the_newest_and_the_answer_after_it(engine: Engine, permits: threading.Semaphore) -> None:
    generation = engine.submit([11, *PROMPT], SamplingParams(max_tokens=4))
    seen = []
    permits.release()
    for reading in generation.readings():
        seen.append((reading.read, reading.total))
        assert generation.reading == reading
        permits.release(1 if len(seen) < 3 else 99)
    assert seen == [(32, 101), (64, 101), (96, 101)]
    assert len(generation.result().token_ids) == 4 and [*generation.readings()] == []


def test_on_an_event_loop(engine: Engine, permits: threading.Semaphore) -> None:
    async def read() -> list[int]:
        generation = engine.submit([12, *PROMPT], SamplingParams(max_tokens=4))
        permits.release()
        seen = []
        async for reading in generation.areadings():
            seen.append(reading.read)
            permits.release(1 if len(seen) < 3 else 99)
        assert len((await generation.aresult()).token_ids) == 4
        return seen

    assert asyncio.run(read()) == [32, 64, 96]


def test_readings_end_with_the_request(engine: Engine, permits: threading.Semaphore) -> None:
    generation = engine.submit([13, *PROMPT], SamplingParams(max_tokens=4))
    permits.release()
    for _ in generation.readings():
        generation.abort()
        permits.release(99)
    assert generation.result().finish_reason is FinishReason.ABORT


class Failing(Recorder):
    """A consumer that fails at the first reading."""

    def read(self, reading: Reading) -> None:
        raise ValueError("planted")


def test_a_consumer_that_fails_ends_its_request_alone(engine: Engine) -> None:
    if engine.config.isolate:
        pytest.skip("the driver is in another process")
    engine.backend.submit(failing := Failing(1004, [15, *PROMPT]))
    assert failing.ended.wait(60) and "planted" in str(failing.error)
    assert readings(engine, 1005, [16, *PROMPT])
