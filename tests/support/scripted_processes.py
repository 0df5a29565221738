"""Processes of engines that send what a test lets them send, around a relay."""

from __future__ import annotations

import threading
import time
from typing import Any

from langchain_card.config import EngineConfig
from langchain_card.core.request import RequestStats
from langchain_card.engine.isolated import messages as f
from langchain_card.engine.relay.messages import Committed, Submit
from langchain_card.engine.relay.relay import Relay
from langchain_card.errors import EngineError
from langchain_card.limits import Limits
from langchain_card.runtime.kind import Kind
from tests.support.processes import wait_until


class Scripted:
    """In place of a process: sends what a test lets it send."""

    def __init__(self, name: str, config: EngineConfig, site: Any, on_message: Any, die: Any) -> None:
        self.name, self.pid, self.sent = name, len(LIVES), list[Any]()
        self.say: Any = on_message
        self.killed = 0
        self.die: Any = lambda error=None: die(error or EngineError("engine process", self.pid, "killed by the test"))
        if FAILING:
            raise FAILING.pop()
        LIVES.append(self)

    def send(self, message: Any) -> None:
        self.sent.append(message)

    def kill(self) -> None:
        self.killed += 1

    def close(self) -> None:
        """It is gone."""

    @property
    def requests(self) -> list[tuple[int, tuple[int, ...]]]:
        """Numbers of the requests that it got, each with the answer so far."""
        got = [message for message in self.sent if isinstance(message, Submit)]
        return [(message.request.request_id, message.output_ids) for message in got]


KIND = Kind("model", "")
"""Of an engine that is the only one."""

LIVES: list[Scripted] = []
FAILING: list[Exception] = []


class Time:
    """A clock that runs, and that a test sets forward."""

    ahead = 0.0

    def __call__(self) -> float:
        return time.monotonic() + self.ahead


def settle(relay: Relay) -> None:
    done = threading.Event()
    relay._do(done.set)
    assert done.wait(10)


def check(relay: Relay) -> None:
    """Wait until the relay has checked its processes."""
    settle(relay)
    settle(relay)


def die(life: int) -> Scripted:
    """Ends a life, and gives the next one."""
    LIVES[life].die()
    wait_until(lambda: len(LIVES) == life + 2)
    LIVES[-1].say(f.Loaded(Limits(), "auto", KIND))
    return LIVES[-1]


def wrote(request_id: int, *token_ids: int) -> Committed:
    return Committed(request_id, token_ids, ("",) * len(token_ids), (), RequestStats(rounds=1))
