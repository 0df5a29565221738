"""`ProcessPool`: the engines of one machine, each in a process of its own."""

from __future__ import annotations

import hashlib
import itertools
import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from langchain_card.config import EngineConfig
from langchain_card.core.messages import Reading
from langchain_card.core.request import FinishReason, RequestStats, SamplingParams
from langchain_card.engine.isolated import messages as m
from langchain_card.engine.isolated.engine_process import EngineProcess
from langchain_card.engine.isolated.sites import split
from langchain_card.engine.relay.messages import (
    Began,
    Committed,
    Ended,
    EngineLost,
    NotServed,
    Reply,
    RequestFailed,
    Submit,
)
from langchain_card.models.files import Progress, Silent
from langchain_card.ports import Clock, Health

log = logging.getLogger(__name__)

NAME = "engine process"
"""Name of the process of an engine; of several, a number follows."""

PART = ": "
"""Separator between the name of one of several processes and the name of a worker in it."""


class ProcessPool:
    """An `EnginePool` of processes that share out this machine; each is started again when it dies.

    They start one after the other, so that the first compiles and converts for all; requests are taken once it is up.

    Args:
        config: of each engine, with the number of processes in `replicas`.
        clock: source of time.
        progress: receives the steps in which the first process loads its engine.
    """

    post: Callable[[Callable[[], None]], None]

    def __init__(self, config: EngineConfig, clock: Clock = time.monotonic, progress: Progress | None = None) -> None:
        sites, own = split(config), replace(config, replicas=1)
        names = [NAME] if len(sites) == 1 else [f"{NAME} {number}" for number in range(1, len(sites) + 1)]
        shown = [progress or Silent(), *(Silent() for _ in sites)]
        self.processes = [
            EngineProcess(name, own, site, self, clock, each)
            for name, site, each in zip(names, sites, shown, strict=False)
        ]
        self._ids = itertools.count()
        self._attempts: dict[int, _Attempt] = {}
        self._is_ready = threading.Event()  # also set when loading failed

    def start(self, post: Callable[[Callable[[], None]], None]) -> None:
        """Start the first process."""
        self.post = post
        self.processes[0].start()

    def wait_ready(self) -> EngineConfig:
        """Wait until an engine takes requests; return its configuration with what it filled in.

        Raises:
            CARDError: loading failed.
        """
        self._is_ready.wait()
        if (error := self.processes[0].error) is not None:
            raise error
        return self.processes[0].config

    @property
    def num_seats(self) -> int:
        """Number of requests that all engines together answer at once."""
        return sum(process.config.limits.num_seqs for process in self.processes if process.error is None)

    def submit(self, request: Submit, reply: Callable[[Reply], None]) -> _Attempt:
        """Send a request to the engine of its session with a free seat, or to the least busy one."""
        number = next(self._ids)
        sent = replace(request, request=replace(request.request, request_id=number))
        attempt = self._attempts[number] = _Attempt(self, number, sent, reply)
        try:
            self._send(attempt)
        except Exception:
            del self._attempts[number]
            raise
        return attempt

    def check(self) -> float | None:
        """Start, restart and kill processes where that is due."""
        later = [process for process in self.processes if not process.is_begun]
        if later and self._is_ready.is_set() and not any(process.is_loading for process in self.processes):
            later[0].start()
        due = [seconds for process in self.processes if (seconds := process.check()) is not None]
        return min(due, default=None)

    def announce(self, count: int) -> None:
        """Announce requests to an engine that is the only one; several share them out as they come."""
        if len(self.processes) == 1:
            self.processes[0].send(m.Announce(count))

    def health(self) -> dict[str, Health]:
        """Return the health of processes and workers; with several processes, a worker's name follows its process's."""
        if len(self.processes) == 1:
            return self.processes[0].health()
        return {
            name if name == process.name else f"{process.name}{PART}{name}": health
            for process in self.processes
            for name, health in process.health().items()
        }

    def close(self) -> None:
        """End all processes."""
        for process in self.processes:
            process.close()

    # What happens to processes, on the relay's thread.

    def on_up(self, process: EngineProcess) -> None:
        """Send the requests that wait for an engine."""
        for attempt in [*self._attempts.values()]:
            if attempt.process is None:
                self._send(attempt)
        self._is_ready.set()

    def on_message(self, process: EngineProcess, message: Any) -> None:
        """Hand a message to the attempt that it is about, unless that was left."""
        attempt = self._attempts.get(message.request_id)
        if attempt is None or attempt.process is not process:
            return
        match message:
            case Began() | Reading() | Committed():
                attempt.reply(message)
            case Ended():
                self.end(attempt, message)
            case NotServed(_, error):
                self.end(attempt, RequestFailed(error.error(process.name)))

    def on_lost(self, process: EngineProcess, error: BaseException) -> None:
        """End the attempts of a process; those that wait for an engine, too, once no process will start again."""
        lost = [attempt for attempt in self._attempts.values() if attempt.process is process]
        again = "started again" if process.error is None else "not started again"
        log.error("%s It is %s; requests that go on: %d", error, again, len(self._attempts))
        for attempt in lost:
            self.end(attempt, EngineLost(error))
        if self._given_up is not None:
            for attempt in [*self._attempts.values()]:
                self.end(attempt, RequestFailed(error))
            self._is_ready.set()

    # Requests.

    def _send(self, attempt: _Attempt) -> None:
        """Send a request to an engine, if one is up; fail it if none will be."""
        process = self._choose(attempt.submit.request.params)
        if process is not None:
            attempt.process = process
            process.send(attempt.submit)
        elif (error := self._given_up) is not None:
            self.post(lambda: self.end(attempt, RequestFailed(error)))

    @property
    def _given_up(self) -> BaseException | None:
        """The error of the first process, if none will start again."""
        errors = [process.error for process in self.processes if process.is_begun]
        return errors[0] if None not in errors else None

    def _choose(self, params: SamplingParams) -> EngineProcess | None:
        """Return the process for a request of a session; None if none is up.

        A session keeps to one process as long as that has a seat, because the beginning of its text was read there
        (highest random weight, Thaler and Ravishankar 1998). Others go where most seats are free.
        """
        up = [process for process in self.processes if process.is_up]
        if len(up) < 2:
            return up[0] if up else None
        taken = {id(process): 0 for process in up}
        for attempt in self._attempts.values():
            if id(attempt.process) in taken:
                taken[id(attempt.process)] += 1
        free = {process.name: process.config.limits.num_seqs - taken[id(process)] for process in up}
        if params.session:
            session = f"{params.tenant}\n{params.session}\n"
            ranked = sorted(up, key=lambda process: hashlib.sha256(f"{session}{process.name}".encode()).digest())
            return next((each for each in ranked if free[each.name] > 0), ranked[0])
        return max(up, key=lambda process: free[process.name])

    def end(self, attempt: _Attempt, reply: Reply | None = None) -> None:
        """End an attempt, unless it has ended, with a last reply if it was not left."""
        if self._attempts.pop(attempt.number, None) is not None and reply is not None:
            attempt.reply(reply)


@dataclass(slots=True, eq=False)
class _Attempt:
    """A request at an engine, or on its way to one.

    Attributes:
        pool: of the engines.
        number: the request's id there.
        submit: the message to the engine.
        reply: takes the engine's replies.
        process: where it runs; None while it waits for an engine.
    """

    pool: ProcessPool
    number: int
    submit: Submit
    reply: Callable[[Reply], None]
    process: EngineProcess | None = None

    def stop(self, num_tokens: int | None = None) -> None:
        """End the request after so many tokens, or discard it."""
        if self.process is not None:
            self.process.send(m.Stop(self.number, num_tokens))
            return
        reason = FinishReason.ABORT if num_tokens is None else FinishReason.STOP
        self.pool.post(lambda: self.pool.end(self, Ended(self.number, reason, RequestStats())))

    def leave(self) -> None:
        """Discard the request."""
        self.pool.end(self)
        if self.process is not None:
            self.process.send(m.Stop(self.number))
