"""An isolated engine's process, and a consumer of its answers."""

from __future__ import annotations

from typing import Any

import psutil

from langchain_card.core.request import FinishReason, Request, RequestStats, SamplingParams
from langchain_card.engine.engine import Engine
from langchain_card.engine.isolated.process_pool import ProcessPool
from langchain_card.engine.relay.relay import Relay
from tests.support.processes import wait_until


class Waiting:
    """A consumer that records how its request ended."""

    def __init__(self, request_id: int = 0) -> None:
        self.request = Request(request_id, (1, 2), SamplingParams(max_tokens=9), (0,))
        self.ends: list[Any] = []
        self.readings: list[Any] = []
        self.stats = RequestStats()

    def watch(self, stats: RequestStats) -> None:
        """Ignore the start."""

    def read(self, reading: Any) -> None:
        self.readings.append(reading)

    def push(self, emit: Any) -> None:
        """Ignore the tokens."""

    def finish(self, reason: FinishReason, stats: RequestStats) -> None:
        self.stats = stats
        self.ends.append(reason)

    def fail(self, error: BaseException) -> None:
        self.ends.append(error)


def pool_of(engine: Engine) -> ProcessPool:
    """The processes of an isolated engine."""
    assert isinstance(engine.backend, Relay) and isinstance(engine.backend.pool, ProcessPool)
    return engine.backend.pool


def process_of(engine: Engine, number: int = 0) -> psutil.Process:
    """A process of an isolated engine."""
    process = pool_of(engine).processes[number]
    wait_until(lambda: process.pid is not None)
    return psutil.Process(process.pid)
