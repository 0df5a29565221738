"""Workers that tests put into a process of their own, and a process that owns one. No torch: they start fast."""

from __future__ import annotations

import logging
import os
import signal
import struct
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import msgspec

from langchain_card.core import messages as m
from langchain_card.engine.draft_worker import DraftWorker
from langchain_card.engine.driver import Driver
from langchain_card.engine.transports.frames import DOWN, UP
from langchain_card.engine.transports.process import ProcessTransport
from langchain_card.errors import DeviceError
from langchain_card.ports import Budget
from tests.simulation import ToyDrafter, ToyModel

PROMPT = (1, 2)
SAID = 300


class Sleeping(ToyDrafter):
    """A step takes `seconds`; what it took is reported."""

    def __init__(self, top: float, seconds: float) -> None:
        super().__init__(ToyModel(200, top=top))
        self._seconds = seconds

    def step(self, budgets: Sequence[Budget]) -> list[m.Proposal]:
        begun = time.perf_counter()
        proposals = super().step(budgets)
        time.sleep(max(0.0, begun + self._seconds - time.perf_counter()))
        elapsed = (time.perf_counter() - begun) / max(1, len(proposals))
        return [replace(proposal, elapsed=elapsed) for proposal in proposals]


def sleeping(
    publish: Any, report_out_of_memory: Any, top: float = 0.8, seconds: float = 0.0, start: float = 0.0
) -> DraftWorker:
    """A drafter that is there after `start` seconds."""
    time.sleep(start)
    return DraftWorker(Sleeping(top, seconds), publish, report_out_of_memory)


def talking(publish: Any, report_out_of_memory: Any, text: str) -> DraftWorker:
    logging.getLogger("langchain_card.test").debug("not wanted")
    logging.getLogger("langchain_card.test").info("%s 100%%", text)
    print("what a library prints", flush=True)
    return sleeping(publish, report_out_of_memory)


def counting_threads(publish: Any, report_out_of_memory: Any, **arguments: Any) -> DraftWorker:
    """The engine's own draft, which logs at each step how many CPU threads torch may use there."""
    import torch

    from langchain_card.engine.drafter_hosts import build_worker

    def count(proposal: m.Proposal) -> None:
        logging.getLogger("langchain_card.test").warning("%s threads", torch.get_num_threads())
        publish(proposal)

    return build_worker(count, report_out_of_memory, **arguments)


def frame(body: bytes) -> bytes:
    return struct.pack(">I", len(body)) + body


SENT = {
    "too long a frame": b"\xff" * 64,
    "no msgpack": frame(b"\xc1" * 9),
    "an unknown kind": frame(msgspec.msgpack.encode(("Proposals", {}))),
    "a command": DOWN.encode(m.End("toy", 0)),
    "a malformed proposal": UP.encode(m.Proposal("toy", 0, 0, 5, 0, 1, (0,), (7,), (-0.1,))),
    "a wrong type": frame(msgspec.msgpack.encode(("Exhausted", {"request_ids": ["0"]}))),
}


class Failing(ToyDrafter):
    """Does at its first step what `how` says."""

    def __init__(self, how: str, send: Callable[[bytes], None]) -> None:
        super().__init__(ToyModel(200))
        self._how, self._send = how, send

    def step(self, budgets: Sequence[Budget]) -> list[m.Proposal]:
        if self._how == "raises":
            raise KeyError("planted")
        if self._how == "memory":
            raise MemoryError
        if self._how == "exits":
            os._exit(3)
        if self._how == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        self._send(SENT[self._how])
        time.sleep(60)
        return []


def failing(publish: Any, report_out_of_memory: Any, how: str) -> DraftWorker:
    return DraftWorker(Failing(how, publish.__self__._socket.sendall), publish, report_out_of_memory)


def no_start(publish: Any, report_out_of_memory: Any, how: str) -> DraftWorker:
    if how == "device":
        raise DeviceError("draft_device", "cuda:7", "has no room for it", "use a smaller draft")
    if how == "exits":
        os._exit(4)
    raise KeyError("planted")


def saying(publish: Any, report_out_of_memory: Any, how: str) -> DraftWorker:
    """Says much, then dies."""
    for i in range(SAID):
        report_out_of_memory((i,))
    return no_start(publish, report_out_of_memory, how)


def in_process(**arguments: float) -> Callable[[Driver], ProcessTransport]:
    """Makes the transport of a sleeping drafter."""

    def make(driver: Driver) -> ProcessTransport:
        return ProcessTransport(
            "tests.support.children:sleeping",
            arguments,
            name="toy",
            publish=driver.publish,
            report_out_of_memory=lambda request_ids: driver.report_out_of_memory("toy", request_ids),
            on_ready=lambda: driver.report_start("toy"),
            on_death=lambda error: driver.report_death("toy", error),
        )

    return make


def own_an_engine() -> None:
    """Decodes with a drafter in a process; prints its id, and that of a fork that holds all that this process does."""
    from tests.simulation.sleeping import SleepingEngine

    make = in_process(seconds=0.001)
    engine = SleepingEngine(ToyModel(200), lambda rows: 0.002, lambda rows: 0.0, transport=make)
    engine.submit(PROMPT, max_tokens=30_000, schedule="parallel")
    transport: Any = engine.driver.transports["toy"]
    fork = os.fork()
    if fork:
        print(transport.pid, fork, flush=True)
    time.sleep(120)
    os._exit(0)


if __name__ == "__main__":
    sys.exit(own_an_engine())
