"""`ProcessPool`: the engines of one machine, each in a process of its own."""

from __future__ import annotations

import hashlib
import itertools
import logging
import math
import threading
import time
from collections.abc import Callable, Sequence
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
from langchain_card.engine.relay.pool import ENGINE_PROCESS, PART
from langchain_card.errors import EngineError
from langchain_card.models.files import Progress, Silent
from langchain_card.ports import Clock, Health
from langchain_card.runtime.kind import Kind

log = logging.getLogger(__name__)


class ProcessPool:
    """An `EnginePool` of processes that share out this machine; each is started again when it dies.

    They start one after the other, so that the first compiles and converts for all; requests are taken once it is up.
    Several processes get no more requests than they have seats: the others wait here, for a seat of any of them.

    Args:
        config: of each engine, with the number of processes in `replicas`.
        clock: source of time.
        progress: receives the steps in which the first process loads its engine.
    """

    post: Callable[[Callable[[], None]], None]

    def __init__(self, config: EngineConfig, clock: Clock = time.monotonic, progress: Progress | None = None) -> None:
        sites = split(config)
        numbered = [f"{ENGINE_PROCESS} {number}" for number in range(1, len(sites) + 1)]
        names = numbered if len(sites) > 1 else [ENGINE_PROCESS]
        shown = [progress or Silent(), *(Silent() for _ in sites)]
        self.processes = [
            EngineProcess(name, config, site, self, clock, each)
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
        return sum(process.num_seats for process in self.processes)

    def submit(self, request: Submit, reply: Callable[[Reply], None]) -> _Attempt:
        """Send a request to the engine of its session with a free seat, to another one, or later."""
        number = next(self._ids)
        sent = replace(request, request=replace(request.request, request_id=number))
        attempt = self._attempts[number] = _Attempt(self, request.request.request_id, sent, reply)
        self._dispatch()
        return attempt

    def check(self) -> float | None:
        """Start, restart and kill processes where that is due."""
        later = [process for process in self.processes if not process.is_begun]
        if later and self._is_ready.is_set() and not any(process.is_loading for process in self.processes):
            later[0].start_later()
        due = [seconds for process in self.processes if (seconds := process.check()) is not None]
        return min(due, default=None)

    def announce(self, count: int) -> None:
        """Announce requests to an engine that is the only one; several share them out as they come."""
        if len(self.processes) == 1:
            self.processes[0].send(m.Announce(count))

    def kind(self) -> Kind:
        """Return the kind of the first engine; raise `EngineError` if it has not measured it."""
        kind = self.processes[0].kind
        if kind is None or not kind.machine:
            limit = "is not known: a process that is the only one does not measure how it rounds"
            raise EngineError("kind", None, limit, "processes do with replicas=2 or more")
        return kind

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
        """End all processes, at the same time."""
        closing = [threading.Thread(target=process.close) for process in self.processes]
        for thread in closing:
            thread.start()
        for thread in closing:
            thread.join()

    # What happens to processes, on the relay's thread.

    def on_up(self, process: EngineProcess) -> None:
        """Send the requests that wait for an engine."""
        self._is_ready.set()
        self._dispatch()

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
                self._dispatch()
            case NotServed(_, error):
                self.end(attempt, RequestFailed(error.error(process.name)))
                self._dispatch()

    def on_lost(self, process: EngineProcess, error: BaseException) -> None:
        """End the attempts of a process; those that wait for an engine, too, once no process will start again."""
        lost = [attempt for attempt in self._attempts.values() if attempt.process is process]
        again = "started again" if process.error is None else "not started again"
        log.error("%s It is %s; requests that go on: %d", error, again, len(self._attempts))
        for attempt in lost:
            self.end(attempt, EngineLost(error))
        self._dispatch()
        if self._given_up is not None:
            self._is_ready.set()

    # Requests.

    def _dispatch(self) -> None:
        """Send waiting requests to engines with free seats, those that were begun first; fail those without hope."""
        waiting = [attempt for attempt in self._attempts.values() if attempt.process is None]
        for attempt in sorted(waiting, key=lambda attempt: not attempt.submit.output_ids):
            engines = [process for process in self.processes if _continues(process.kind, attempt.submit.kind)]
            up = [process for process in engines if process.is_up and self._free(process) > 0]
            if up:
                self._send(attempt, self._choose(up, attempt.submit.request.params))
            elif self._given_up is not None:
                self.end_later(attempt, RequestFailed(self._given_up))
            elif not engines:
                limit = "is another one now than the one that began this answer"
                error = EngineError("model", self.processes[0].config.model, limit, "send the request again")
                self.end_later(attempt, RequestFailed(error))

    def _send(self, attempt: _Attempt, process: EngineProcess) -> None:
        try:
            process.send(attempt.submit)
            attempt.process = process
        except Exception as error:
            failure = EngineError("request", attempt.request_id, f"it cannot be sent to an engine ({error})")
            failure.__cause__ = error
            self.end_later(attempt, RequestFailed(failure))

    @property
    def _given_up(self) -> BaseException | None:
        """The error of the first process, if none will start again."""
        errors = [process.error for process in self.processes if process.is_begun or self._is_ready.is_set()]
        return errors[0] if None not in errors else None

    def _free(self, process: EngineProcess) -> float:
        """Return the free seats of a process; one alone takes all requests, and lets them wait."""
        if len(self.processes) == 1:
            return math.inf
        return process.num_seats - sum(attempt.process is process for attempt in self._attempts.values())

    def _choose(self, up: Sequence[EngineProcess], params: SamplingParams) -> EngineProcess:
        """Return the process for a request.

        A session keeps to one process as long as that has a seat, because the beginning of its text was read there
        (highest random weight, Thaler and Ravishankar 1998). Others go where most seats are free.
        """
        if params.session:
            session = f"{params.tenant}\n{params.session}\n"
            return min(up, key=lambda process: hashlib.sha256(f"{session}{process.name}".encode()).digest())
        return max(up, key=self._free)

    def end(self, attempt: _Attempt, reply: Reply | None = None) -> bool:
        """End an attempt, with a last reply if it was not left; return False if it has ended."""
        if self._attempts.pop(attempt.number, None) is None:
            return False
        if reply is not None:
            attempt.reply(reply)
        return True

    def leave(self, attempt: _Attempt) -> None:
        """Discard an attempt without a reply; its seat is free."""
        if self.end(attempt) and attempt.process is not None:
            attempt.process.send(m.Stop(attempt.number))
            self._dispatch()

    def end_later(self, attempt: _Attempt, reply: Reply) -> None:
        """End an attempt; its last reply is made after the caller has returned."""
        if self.end(attempt):
            self.post(lambda: attempt.reply(reply))


def _continues(kind: Kind | None, begun: Kind | None) -> bool:
    """Return whether an engine may go on with an answer that one of the other kind began."""
    return kind is None or begun is None or kind.continues(begun)


@dataclass(slots=True, eq=False)
class _Attempt:
    """A request at an engine, or on its way to one.

    Attributes:
        pool: of the engines.
        request_id: the request's id outside the pool.
        submit: the message to the engine, with an id of the attempt's own.
        reply: takes the engine's replies.
        process: where it runs; None while it waits for an engine.
    """

    pool: ProcessPool
    request_id: int
    submit: Submit
    reply: Callable[[Reply], None]
    process: EngineProcess | None = None

    @property
    def number(self) -> int:
        """The request's id at the engine."""
        return self.submit.request.request_id

    @property
    def kind(self) -> Kind | None:
        """The kind of the engine; None if it is not known."""
        return None if self.process is None else self.process.kind

    def stop(self, num_tokens: int | None = None) -> None:
        """End the request after so many tokens, or discard it."""
        if self.process is not None:
            self.process.send(m.Stop(self.number, num_tokens))
        else:
            reason = FinishReason.ABORT if num_tokens is None else FinishReason.STOP
            self.pool.end_later(self, Ended(self.number, reason, RequestStats()))

    def leave(self) -> None:
        """Discard the request."""
        self.pool.leave(self)
