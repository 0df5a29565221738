"""`Supervisor`: runs an engine in a process that may die, and keeps the requests and their answers here."""

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
from langchain_card.core.messages import TARGET, Emit, Reading
from langchain_card.core.request import FinishReason
from langchain_card.core.workers import Workers
from langchain_card.engine.isolated import messages as m
from langchain_card.engine.isolated.open_requests import OpenRequest
from langchain_card.engine.liveness import ProcessWatch
from langchain_card.engine.transports.child_process import ChildProcess
from langchain_card.engine.transports.thread import MessageQueue
from langchain_card.errors import DeviceError, EngineClosedError, EngineError
from langchain_card.models.files import Progress, Silent
from langchain_card.ports import Clock, Consumer, Health
from langchain_card.runtime.kind import Kind

log = logging.getLogger(__name__)

NAME = "engine process"
END_SECONDS = 5.0
"""Time for the engine to end: for the pass in hand, and for texts that it writes (`prefix_folder.CLOSE_SECONDS`)."""

ROOM_SECONDS = 30.0
"""Time after a process was lost in which "no room on the device" is tried again: drivers free its memory late."""


class Supervisor:
    """A `ports.Backend` in another process. The supervisor's thread does all the work; public methods only queue it.

    Args:
        config: of the engine.
        clock: source of time.
        progress: receives the steps in which the first process loads the engine.
        measure_kind: whether each process measures its kind while it loads.
    """

    def __init__(
        self,
        config: EngineConfig,
        clock: Clock = time.monotonic,
        progress: Progress | None = None,
        *,
        measure_kind: bool = False,
    ) -> None:
        self._measure_kind = measure_kind
        self._kind: Kind | None = None
        self._config, self._limits, self._clock = config, config.limits, clock
        self._progress = progress or Silent()
        self._inbox: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._open: dict[int, OpenRequest] = {}
        self._workers = Workers((NAME,), config.limits)
        self._restart_at: float | None = None
        self._watch, self._down_since = ProcessWatch(clock), clock()
        self._loaded = threading.Event()  # also set when loading failed
        self._error: BaseException | None = None
        self._closed = self._draining = self._is_up = False
        self._submit_lock = threading.Lock()  # no request is taken once `_closed` is set
        self._process = self._start()  # the latest
        self._reported: dict[str, Health] = {}
        self._thread = threading.Thread(target=self._run, name="card-supervisor", daemon=True)
        self._thread.start()

    def wait_ready(self) -> EngineConfig:
        """Wait until the engine takes requests; return the configuration with what it filled in.

        Raises:
            CARDError: loading failed.
        """
        self._loaded.wait()
        if self._error is not None:
            raise self._error
        return self._config

    @property
    def pid(self) -> int | None:
        """Id of the engine's process; None while there is none."""
        return self._process.pid if self._restart_at is None and self._error is None else None

    @property
    def num_open(self) -> int:
        """Number of requests that wait or run."""
        return len(self._open)

    @property
    def num_running(self) -> int:
        """Number of requests that hold KV on the target."""
        return sum(entry.begun for entry in [*self._open.values()])

    def submit(self, consumer: Consumer, output_ids: Sequence[int] = ()) -> None:
        """Take a request, perhaps with the beginning of its answer."""
        with self._submit_lock:
            if not self._closed:
                self._open[consumer.request.request_id] = OpenRequest(consumer, [*output_ids])
                self._do(self._send_request, consumer.request.request_id)
                return
        consumer.fail(_closed_error())

    def stop(self, request_id: int, num_tokens: int | None = None) -> None:
        """End a request after `num_tokens` tokens; None aborts it."""
        self._do(self._stop, request_id, num_tokens)

    def pause(self, request_id: int, paused: bool) -> None:
        """Hold a request whose consumer does not read, or resume it."""
        self._do(self._pause, request_id, paused)

    def announce(self, count: int) -> None:
        """Announce `count` requests that are about to be submitted."""
        self._do(self._send, m.Announce(count))

    def drain(self) -> None:
        """Take no more requests, and write all answers to their end, read or not."""
        self._do(self._drain)

    def health(self) -> dict[str, Health]:
        """Return the health of the process and of the workers in it, by name."""
        state = "up" if self._is_up else "given up" if self._error is not None else "loading"
        return {
            NAME: Health(state, self._watch.silence, self._limits.silence_seconds),
            **(self._reported if self._is_up else {}),
        }

    def kind(self) -> Kind:
        """Return the kind of the latest process that has loaded; raise `EngineError` if none has measured it."""
        if self._kind is None:
            limit = "is not known: the engine's process did not measure it"
            raise EngineError("kind", None, limit, "make the engine with measure_kind=True")
        return self._kind

    def close(self) -> None:
        """End the process; open requests fail. May be called twice."""
        self._do(self._close)
        self._thread.join()

    def _do(self, act: Callable[..., None], *arguments: Any) -> None:
        self._inbox.put(functools.partial(act, *arguments))  # the only safe call during a garbage collection

    # On the supervisor's thread.

    def _run(self) -> None:
        while not self._closed:
            self._step()

    def _step(self) -> None:
        try:
            act = self._inbox.get(timeout=self._seconds_left())
        except queue.Empty:
            act = self._check_process
        try:
            act()
        except Exception:
            log.exception("the supervisor goes on after an error")

    def _seconds_left(self) -> float | None:
        """Return the seconds until the process must be checked or restarted; None if it was given up."""
        if self._error is not None:
            return None
        if self._restart_at is None:
            return self._watch.seconds_left(self._limits.silence_seconds)
        return max(0.0, self._restart_at - self._clock())

    def _check_process(self) -> None:
        if self._restart_at is not None:
            if self._clock() >= self._restart_at:
                self._watch = ProcessWatch(self._clock)
                try:
                    self._process, self._restart_at = self._start(), None
                except Exception as error:
                    self._plan_restart(error)
        elif self._watch.is_lost(self._limits.silence_seconds):
            log.error("the engine's process has sent nothing for %g seconds: killing it", self._limits.silence_seconds)
            self._process.kill()

    def _start(self) -> ChildProcess:
        on_message, on_death = (functools.partial(self._do, act) for act in (self._receive, self._handle_death))
        return start_engine(self._config, on_message, on_death, measure_kind=self._measure_kind)

    def _send(self, message: Any) -> None:
        if self._is_up:
            self._process.send(message)

    def _send_request(self, request_id: int) -> None:
        entry = self._open.get(request_id)
        if entry is None or entry.sent:
            return
        if self._error is not None:
            self._fail(request_id, self._error)
        elif self._is_up:
            try:
                self._send(m.Submit(entry.consumer.request, tuple(entry.output_ids)))
            except Exception as error:
                failure = EngineError("request", request_id, f"it cannot be sent to the engine ({error})")
                failure.__cause__ = error
                self._fail(request_id, failure)
                return
            entry.sent = True
            if entry.paused:
                self._send(m.Pause(request_id, paused=True))

    def _stop(self, request_id: int, num_tokens: int | None) -> None:
        if (entry := self._open.get(request_id)) is None:
            return
        entry.aborted, entry.num_tokens = num_tokens is None, num_tokens
        if entry.sent:
            self._send(m.Stop(request_id, num_tokens))
        else:
            self._finish(request_id, FinishReason.ABORT if num_tokens is None else FinishReason.STOP)

    def _pause(self, request_id: int, paused: bool) -> None:
        if (entry := self._open.get(request_id)) is not None:
            entry.paused = paused
            self._send(m.Pause(request_id, paused))

    def _drain(self) -> None:
        self._draining = True
        self._send(m.Drain())

    def _close(self) -> None:
        with self._submit_lock:
            self._closed = True
        self._process.close()
        for request_id in [*self._open]:
            self._fail(request_id, _closed_error())

    # Messages from the engine.

    def _receive(self, message: Any) -> None:
        self._watch.saw_message()
        match message:
            case m.LoadStep(stage) if not self._loaded.is_set():
                self._progress.update(stage, 0, 0)
            case m.Loaded(limits, draft_device, kind):
                self._kind = kind
                self._set_up(limits, draft_device)
            case m.EngineHeartbeat(workers):
                self._check_workers(workers)
            case m.Began(request_id) if (entry := self._open.get(request_id)) is not None:
                entry.begun = True
                entry.consumer.watch(entry.stats)
            case Reading(request_id) if (entry := self._open.get(request_id)) is not None:
                entry.consumer.read(message)
            case m.Committed():
                self._push(message)
            case m.Ended(request_id, reason, stats) if (entry := self._open.get(request_id)) is not None:
                entry.update_stats(stats)
                self._finish(request_id, reason)
            case m.RequestFailed(request_id, error) if request_id in self._open:
                self._fail(request_id, error.error(NAME))

    def _set_up(self, limits: Limits, draft_device: str) -> None:
        self._limits, self._is_up = limits, True
        self._config = replace(self._config, limits=limits, draft_device=draft_device)
        if self._workers.started(NAME):
            log.warning("the engine is up again after %.1f seconds", self._clock() - self._down_since)
        for request_id in [*self._open]:
            self._send_request(request_id)
        if self._draining:
            self._send(m.Drain())
        self._loaded.set()

    def _check_workers(self, workers: dict[str, Health]) -> None:
        self._reported = workers
        target = workers.get(TARGET, Health())
        if self._watch.hangs(target):
            log.error("the target hangs or is gone (%s): killing the engine's process", target)
            self._process.kill()

    def _push(self, committed: m.Committed) -> None:
        request_id = committed.request_id
        entry = self._open.get(request_id)
        if entry is None or entry.num_tokens is not None:
            return
        try:
            emit = Emit(request_id, committed.token_ids, committed.sources, committed.logprobs, committed.hit)
            entry.push(emit, committed.stats)
        except Exception as error:
            log.exception("request %s could not be handed out", request_id)
            self._send(m.Stop(request_id))
            self._fail(request_id, entry.consumer_error(error))
            return
        if entry.num_tokens is not None:
            self._send(m.Stop(request_id, entry.num_tokens))

    # The end of the process, and of requests.

    def _handle_death(self, error: BaseException) -> None:
        """End complete answers and requests that caused too many deaths; the others wait for the next process."""
        self._process.close()
        self._down_since = self._clock() if self._is_up else self._down_since
        self._is_up, self._reported = False, {}
        for request_id, entry in [*self._open.items()]:
            entry.outlive()
            if (reason := entry.end) is not None:
                self._finish(request_id, reason)
            elif entry.deaths >= self._limits.max_failures:
                limit = f"the engine died of it, or with it ({error})"
                self._fail(request_id, EngineError("request", request_id, limit))
        self._plan_restart(error)

    def _plan_restart(self, error: BaseException) -> None:
        """Schedule the next process; give up if none was ever up, or if too many died."""
        if self._loaded.is_set() and isinstance(error, DeviceError) and self._clock() < self._down_since + ROOM_SECONDS:
            self._restart_at = self._clock() + self._limits.restart_seconds
        elif self._loaded.is_set():
            self._restart_at, error = self._workers.died(NAME, self._clock()), _request_error(error)
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


def start_engine(
    config: EngineConfig,
    on_message: Callable[[Any], None],
    on_death: Callable[[BaseException], None],
    *,
    measure_kind: bool = False,
) -> ChildProcess:
    """Start an engine's process, which serves until it is closed or dies.

    Args:
        config: of the engine.
        on_message: takes its messages, in order.
        on_death: called once, after the last message, unless the process was ended by `close`.
        measure_kind: whether it measures its kind while it loads.

    Raises:
        EngineError: no process could be started.
    """
    return ChildProcess(
        "langchain_card.engine.isolated.main",
        NAME,
        thread_name="card-engine",
        sends=m.TO_ENGINE,
        takes=m.FROM_ENGINE,
        first=m.LoadEngine(config, measure_kind),
        outbox=_FrameQueue(),
        on_message=on_message,
        on_death=on_death,
        end_seconds=END_SECONDS,
    )


class _FrameQueue(MessageQueue[Any]):
    """A queue that encodes messages when they are put: a bad message raises to its sender, and the process survives."""

    def put(self, message: Any) -> None:
        """Append the message's frame; raises what `Direction.encode` raises."""
        super().put(m.TO_ENGINE.encode(message))


def _request_error(error: BaseException) -> EngineError:
    """Return the error for requests: a loading error is meant for the user who chose the models."""
    if type(error) is EngineError:
        return error
    wrapped = EngineError(NAME, type(error).__name__, f"it could not go on ({error})", "the log may say more")
    wrapped.__cause__ = error
    return wrapped


def _closed_error() -> EngineClosedError:
    return EngineClosedError("engine", "closed", "the engine was closed while the request ran")
