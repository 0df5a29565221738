"""The order in which an engine's waiting requests get its only seat. Three seconds."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

import pytest

from langchain_card.config import EngineConfig
from langchain_card.core.messages import Emit, Reading
from langchain_card.core.request import FinishReason, Request, RequestStats, SamplingParams
from langchain_card.engine.engine import Engine
from langchain_card.limits import Limits

pytestmark = pytest.mark.usefixtures("one_thread")
PROMPT = [3 + i * 7 % 200 for i in range(20)]
PARAMS = SamplingParams(max_tokens=12)


class Reader:
    """A consumer that notes in a common list when its request gets the seat."""

    def __init__(self, request_id: int, seated: list[int], on_first: Callable[[], None] = lambda: None) -> None:
        self.request = Request(request_id, (*PROMPT,), PARAMS)
        self.tokens, self.ended = list[int](), threading.Event()
        self._seated, self._on_first = seated, on_first

    def watch(self, stats: RequestStats) -> None:
        self._seated.append(self.request.request_id)

    def read(self, reading: Reading) -> None:
        """Ignore how much was read."""

    def push(self, emit: Emit) -> None:
        if not self.tokens:
            self._on_first()
        self.tokens += emit.token_ids

    def finish(self, reason: FinishReason, stats: RequestStats) -> None:
        self.ended.set()

    def fail(self, error: BaseException) -> None:
        """It has not ended."""


@pytest.fixture
def engine(tiny_pairs: dict[str, tuple[str, str]]) -> Iterator[Engine]:
    with Engine(EngineConfig(tiny_pairs["llama"][0], None, dtype="float64", limits=Limits(max_num_seqs=1))) as engine:
        yield engine


def test_an_answer_that_goes_on_gets_the_next_seat(engine: Engine) -> None:
    seated = list[int]()
    waiting, begun = [Reader(number, seated) for number in range(3)], Reader(3, seated)

    def crowd() -> None:
        """Submit the others while the first request holds the seat; the one that has begun comes third."""
        engine.backend.submit(waiting[0])
        engine.backend.submit(waiting[1])
        engine.backend.submit(begun, wanted[:5])
        engine.backend.submit(waiting[2])

    wanted = engine.submit(PROMPT, PARAMS).result().token_ids
    first = Reader(4, seated, crowd)
    engine.backend.submit(first)
    for reader in (first, begun, *waiting):
        assert reader.ended.wait(60)
    assert seated == [4, 3, 0, 1, 2]
    assert begun.tokens == [*wanted[5:]] and all(reader.tokens == [*wanted] for reader in waiting)
