"""`Supervisor`: an engine in a process of its own that may die. Requests, and what was written of them, live here."""

from __future__ import annotations

import functools
import logging
import queue
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from langchain_card.config import EngineConfig, Limits
from langchain_card.core.messages import TARGET, Emit
from langchain_card.core.request import FinishReason
from langchain_card.core.workers import Workers
from langchain_card.engine.isolated import messages as f
from langchain_card.engine.isolated.open_requests import OpenRequest
from langchain_card.engine.isolated.process import NAME, service_error, start_engine
from langchain_card.engine.isolated.pulse import Pulse
from langchain_card.engine.transports.child_process import ChildProcess
from langchain_card.errors import EngineClosedError, EngineError
from langchain_card.ports import Clock, Consumer, Health

log = logging.getLogger(__name__)


class Supervisor:
    """A `ports.Backend`. One thread, its own, does everything; the public methods queue what it is to do.

    Args:
        config: of the engine.
        clock: source of time.
    """

    def __init__(self, config: EngineConfig, clock: Clock = time.monotonic) -> None:
        self._config, self._limits, self._clock = config, config.limits, clock
        self._inbox: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._open: dict[int, OpenRequest] = {}
        self._workers = Workers((NAME,), config.limits)
        self._restart_at: float | None = None
        self._pulse, self._down_since = Pulse(clock), clock()
        self._loaded = threading.Event()  # or it never will be
        self._error: BaseException | None = None
        self._closed = self._draining = self._is_up = False
        self._ending = threading.Lock()  # nothing is queued once it is closed
        self._process = self._start()  # the latest
        self._told: dict[str, Health] = {}
        self._thread = threading.Thread(target=self._run, name="card-supervisor", daemon=True)
        self._thread.start()

    def wait_ready(self) -> Limits:
        """Returns when the engine takes requests: the limits that it filled in.

        Raises:
            CARDError: why it never will: whatever loading raised.
        """
        self._loaded.wait()
        if self._error is not None:
            raise self._error
        return self._limits

    @property
    def pid(self) -> int | None:
        """Of the engine's process; None while there is none."""
        return self._process.pid if self._restart_at is None and self._error is None else None

    @property
    def num_open(self) -> int:
        """Requests that wait or run."""
        return len(self._open)

    @property
    def num_running(self) -> int:
        """Requests that hold KV on the target."""
        return sum(asked.begun for asked in [*self._open.values()])

    def submit(self, consumer: Consumer, output_ids: Sequence[int] = ()) -> None:
        """Takes a request, perhaps with the beginning of its answer."""
        with self._ending:
            if not self._closed:
                self._open[consumer.request.request_id] = OpenRequest(consumer, [*output_ids])
                self._do(self._ask, consumer.request.request_id)
                return
        consumer.fail(_closed())

    def stop(self, request_id: int, num_tokens: int | None = None) -> None:
        """Ends a request after so many tokens; None where nobody wants it any more."""
        self._do(self._stop, request_id, num_tokens)

    def pause(self, request_id: int, paused: bool) -> None:
        """Holds a request that nobody reads, or lets it go on."""
        self._do(self._pause, request_id, paused)

    def announce(self, count: int) -> None:
        """So many requests are about to come."""
        self._do(self._send, f.Announce(count))

    def drain(self) -> None:
        """Takes no more requests, and writes all answers to their end, read or not."""
        self._do(self._drain)

    def health(self) -> dict[str, Health]:
        """Of the process and of the workers in it."""
        state = "up" if self._is_up else "given up" if self._error is not None else "loading"
        return {
            NAME: Health(state, self._pulse.silence, self._limits.silence_seconds),
            **(self._told if self._is_up else {}),
        }

    def close(self) -> None:
        """Ends the process; requests that are open fail. May be called twice."""
        self._do(self._close)
        self._thread.join()

    def _do(self, act: Callable[..., None], *arguments: Any) -> None:
        self._inbox.put(functools.partial(act, *arguments))  # all that is safe in a garbage collection

    # On the supervisor's thread.

    def _run(self) -> None:
        while not self._closed:
            self._step()

    def _step(self) -> None:
        try:
            act = self._inbox.get(timeout=self._seconds_left())
        except queue.Empty:
            act = self._look_after
        try:
            act()
        except Exception:
            log.exception("the supervisor goes on after an error")

    def _seconds_left(self) -> float | None:
        """Until something is due though nothing happens; None where nothing is."""
        if self._error is not None:
            return None
        if self._restart_at is None:
            return self._pulse.seconds_left(self._limits.silence_seconds)
        return max(0.0, self._restart_at - self._clock())

    def _look_after(self) -> None:
        if self._restart_at is not None:
            if self._clock() >= self._restart_at:
                self._pulse = Pulse(self._clock)
                try:
                    self._process, self._restart_at = self._start(), None
                except Exception as error:
                    self._plan_restart(error)
        elif self._pulse.is_lost(self._limits.silence_seconds):
            log.error("the engine's process has said nothing for %g seconds and is ended", self._limits.silence_seconds)
            self._process.kill()

    def _start(self) -> ChildProcess:
        hear, lose = functools.partial(self._do, self._hear), functools.partial(self._do, self._lose)
        return start_engine(self._config, hear, lose)

    def _send(self, message: Any) -> None:
        if self._is_up:
            self._process.send(message)

    def _ask(self, request_id: int) -> None:
        """Hands a request to the engine, if it is there."""
        asked = self._open.get(request_id)
        if asked is None or asked.asked:
            return
        if self._error is not None:
            self._fail(request_id, self._error)
        elif self._is_up:
            try:
                self._send(f.Ask(asked.consumer.request, tuple(asked.output_ids)))
            except Exception as error:
                failure = EngineError("request", request_id, f"it cannot be sent to the engine ({error})")
                failure.__cause__ = error
                self._fail(request_id, failure)
                return
            asked.asked = True
            if asked.paused:
                self._send(f.Pause(request_id, paused=True))

    def _stop(self, request_id: int, num_tokens: int | None) -> None:
        if (asked := self._open.get(request_id)) is None:
            return
        asked.left, asked.num_tokens = num_tokens is None, num_tokens
        if asked.asked:
            self._send(f.Stop(request_id, num_tokens))
        else:
            self._finish(request_id, FinishReason.ABORT if num_tokens is None else FinishReason.STOP)

    def _pause(self, request_id: int, paused: bool) -> None:
        if (asked := self._open.get(request_id)) is not None:
            asked.paused = paused
            self._send(f.Pause(request_id, paused))

    def _drain(self) -> None:
        self._draining = True
        self._send(f.Drain())

    def _close(self) -> None:
        with self._ending:
            self._closed = True
        self._process.close()
        for request_id in [*self._open]:
            self._fail(request_id, _closed())

    # What the engine says.

    def _hear(self, message: Any) -> None:
        self._pulse.hear()
        match message:
            case f.Loaded(limits):
                self._welcome(limits)
            case f.Alive(workers):
                self._judge(workers)
            case f.Began(request_id) if (asked := self._open.get(request_id)) is not None:
                asked.begun = True
                asked.consumer.watch(asked.stats)
            case f.Wrote():
                self._write(message)
            case f.Ended(request_id, reason, stats) if (asked := self._open.get(request_id)) is not None:
                asked.count(stats)
                self._finish(request_id, reason)
            case f.Refused(request_id, error) if request_id in self._open:
                self._fail(request_id, error.error(NAME))

    def _welcome(self, limits: Limits) -> None:
        self._limits, self._is_up = limits, True
        self._config = replace(self._config, limits=limits)
        if self._workers.started(NAME):
            log.warning("the engine is up again after %.1f seconds", self._clock() - self._down_since)
        for request_id in [*self._open]:
            self._ask(request_id)
        if self._draining:
            self._send(f.Drain())
        self._loaded.set()

    def _judge(self, workers: dict[str, Health]) -> None:
        self._told = workers
        target = workers.get(TARGET, Health())
        if self._pulse.hangs(target):
            log.error("the target hangs or is gone (%s); the engine's process is ended", target)
            self._process.kill()

    def _write(self, wrote: f.Wrote) -> None:
        asked = self._open.get(wrote.request_id)
        if asked is None or asked.num_tokens is not None:
            return
        try:
            emit = Emit(wrote.request_id, wrote.token_ids, wrote.sources, wrote.logprobs, wrote.hit)
            asked.write(emit, wrote.stats)
        except Exception as error:
            log.exception("request %s could not be handed out", wrote.request_id)
            self._send(f.Stop(wrote.request_id))
            self._fail(wrote.request_id, asked.unwritten(error))
            return
        if asked.num_tokens is not None:
            self._send(f.Stop(wrote.request_id, asked.num_tokens))

    # What becomes of it, and of requests.

    def _lose(self, error: BaseException) -> None:
        """It died: whole answers end, the others wait for its next life."""
        self._process.close()
        self._down_since = self._clock() if self._is_up else self._down_since
        self._is_up, self._told = False, {}
        for request_id, asked in [*self._open.items()]:
            asked.outlive()
            if (reason := asked.end) is not None:
                self._finish(request_id, reason)
            elif asked.deaths >= self._limits.max_failures:
                limit = f"the engine died of it, or with it ({error})"
                self._fail(request_id, EngineError("request", request_id, limit))
        self._plan_restart(error)

    def _plan_restart(self, error: BaseException) -> None:
        """It died, or could not be started; one that never was up, or died too often, is given up."""
        if self._loaded.is_set():
            self._restart_at, error = self._workers.died(NAME, self._clock()), service_error(error)
        if self._restart_at is not None:
            log.error("%s It is started again; requests that go on: %d", error, len(self._open))
            return
        log.error("%s It is not started again", error)
        self._error = error
        self._loaded.set()
        for request_id in [*self._open]:
            self._fail(request_id, error)

    def _finish(self, request_id: int, reason: FinishReason) -> None:
        self._open.pop(request_id).finish(reason)

    def _fail(self, request_id: int, error: BaseException) -> None:
        self._open.pop(request_id).consumer.fail(error)


def _closed() -> EngineClosedError:
    return EngineClosedError("engine", "closed", "the engine was closed while the request ran")
