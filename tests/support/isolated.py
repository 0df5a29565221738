"""An isolated engine's process, and a consumer of its answers."""

from __future__ import annotations

from typing import Any

import psutil

from langchain_card.core.request import FinishReason, Request, RequestStats, SamplingParams
from langchain_card.engine.engine import Engine
from langchain_card.engine.isolated.supervisor import Supervisor
from tests.support.processes import wait_until


class Waiting:
    """A consumer that records how its request ended."""

    def __init__(self, request_id: int = 0) -> None:
        self.request = Request(request_id, (1, 2), SamplingParams(max_tokens=9), (0,))
        self.ends: list[Any] = []

    def watch(self, stats: RequestStats) -> None:
        """Ignore the start."""

    def read(self, reading: Any) -> None:
        """Ignore how much was read."""

    def push(self, emit: Any) -> None:
        """Ignore the tokens."""

    def finish(self, reason: FinishReason, stats: RequestStats) -> None:
        self.ends.append(reason)

    def fail(self, error: BaseException) -> None:
        self.ends.append(error)


def process_of(engine: Engine) -> psutil.Process:
    supervisor = engine.backend
    assert isinstance(supervisor, Supervisor)
    wait_until(lambda: supervisor.pid is not None)
    return psutil.Process(supervisor.pid)
