"""`Relay`: keeps requests and their answers here, while engines write them that may die, hang or leave."""

from __future__ import annotations

import functools
import logging
import queue
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from langchain_card.core.messages import Emit, Reading
from langchain_card.core.request import FinishReason
from langchain_card.engine.relay import messages as m
from langchain_card.engine.relay.open_requests import OpenRequest
from langchain_card.engine.relay.pool import EnginePool
from langchain_card.errors import EngineClosedError, EngineError
from langchain_card.limits import Limits
from langchain_card.ports import Clock, Consumer, Health
from langchain_card.runtime.kind import Kind

log = logging.getLogger(__name__)

CHECK_SECONDS = 1.0
"""Seconds until a pool is checked again that raised an error."""


class Relay:
    """A `ports.Backend` over a pool of engines. Its thread does all the work; public methods only queue it.

    The relay holds each answer so far. When an engine is lost, another one gets the request with those tokens and goes
    on: noise depends on seed and position, and grammars and penalties are replayed, so the text is the one that the
    first engine would have written. A token is appended before the consumer gets it, and replies to an attempt that
    was left are ignored. So each token is handed out once.

    Args:
        pool: the engines.
        limits: bounds; `max_failures` engines in a row may die with a request before it fails, without a token
            of it, and `max_deaths` in all.
        clock: source of time.
    """

    def __init__(self, pool: EnginePool, limits: Limits, clock: Clock = time.perf_counter) -> None:
        self._pool, self._limits, self._clock = pool, limits, clock
        self._inbox: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._open: dict[int, OpenRequest] = {}
        self._closed = self._draining = False
        self._submit_lock = threading.Lock()  # no request is taken once `_closed` is set
        self._thread = threading.Thread(target=self._run, name="card-relay", daemon=True)

    def start(self) -> None:
        """Start the pool, then the thread.

        Raises:
            EngineError: no engine could be started.
        """
        self._pool.start(self._inbox.put)  # the only safe call during a garbage collection
        self._thread.start()

    @property
    def pool(self) -> EnginePool:
        """The engines."""
        return self._pool

    @property
    def num_open(self) -> int:
        """Number of requests that wait or run."""
        return len(self._open)

    @property
    def num_running(self) -> int:
        """Number of requests that hold KV on a target."""
        return sum(entry.begun for entry in [*self._open.values()])

    @property
    def num_seats(self) -> int:
        """Number of requests that run at once."""
        return self._pool.num_seats

    def submit(self, consumer: Consumer, output_ids: Sequence[int] = ()) -> None:
        """Take a request, perhaps with the beginning of its answer."""
        with self._submit_lock:
            if not self._closed:
                self._open[consumer.request.request_id] = OpenRequest(consumer, self._clock, [*output_ids])
                self._do(self._begin, consumer.request.request_id)
                return
        consumer.fail(_closed_error())

    def stop(self, request_id: int, num_tokens: int | None = None) -> None:
        """End a request after `num_tokens` tokens; None aborts it."""
        self._do(self._stop, request_id, num_tokens)

    def pause(self, request_id: int, paused: bool) -> None:
        """Take a request whose consumer does not read from its engine, or submit the rest of it."""
        self._do(self._pause, request_id, paused)

    def announce(self, count: int) -> None:
        """Announce `count` requests that are about to be submitted."""
        self._do(self._pool.announce, count)

    def drain(self) -> None:
        """Take no more requests, and write all answers to their end, read or not."""
        self._do(self._drain)

    def kind(self) -> Kind:
        """Return what the text of an answer depends on; raise `EngineError` if it is not known."""
        return self._pool.kind()

    def health(self) -> dict[str, Health]:
        """Return the health of engines and workers, by name."""
        return self._pool.health()

    def close(self) -> None:
        """Close the pool; open requests fail. May be called twice."""
        self._do(self._close)
        if self._thread.ident is not None:
            self._thread.join()

    def _do(self, act: Callable[..., None], *arguments: Any) -> None:
        self._inbox.put(functools.partial(act, *arguments))

    # On the relay's thread.

    def _run(self) -> None:
        while not self._closed:
            self._step()

    def _step(self) -> None:
        """Run one queued function, or wait until the pool must be checked; an error does not end the thread."""
        seconds: float | None = CHECK_SECONDS
        try:
            seconds = self._pool.check()
        except Exception:
            log.exception("the relay goes on after an error of its pool")
        try:
            self._inbox.get(timeout=seconds)()
        except queue.Empty:
            pass
        except Exception:
            log.exception("the relay goes on after an error")

    def _begin(self, request_id: int) -> None:
        """Submit a request, or the rest of it, unless an engine works on it or its consumer does not read."""
        entry = self._open.get(request_id)
        if entry is None or entry.attempt is not None or (entry.paused and not self._draining):
            return
        try:
            entry.attempt = self._pool.submit(entry.rest, functools.partial(self._receive, entry, entry.number))
        except Exception as error:
            log.exception("request %s could not be handed to an engine", request_id)
            self._fail(request_id, EngineError("request", request_id, f"no engine could take it ({error})"))

    def _stop(self, request_id: int, num_tokens: int | None) -> None:
        if (entry := self._open.get(request_id)) is None:
            return
        entry.aborted, entry.num_tokens = num_tokens is None, num_tokens
        if not entry.stop(num_tokens):
            self._finish(request_id, FinishReason.ABORT if num_tokens is None else FinishReason.STOP)

    def _pause(self, request_id: int, paused: bool) -> None:
        if (entry := self._open.get(request_id)) is None:
            return
        entry.paused = paused
        if not paused:
            self._begin(request_id)
        elif entry.attempt is not None and entry.end is None and not self._draining:
            entry.attempt.leave()
            entry.left()

    def _drain(self) -> None:
        self._draining = True
        for request_id in [*self._open]:
            self._begin(request_id)

    def _close(self) -> None:
        with self._submit_lock:
            self._closed = True
        self._pool.close()
        for request_id in [*self._open]:
            self._fail(request_id, _closed_error())

    # Replies.

    def _receive(self, entry: OpenRequest, number: int, reply: m.Reply) -> None:
        request_id = entry.consumer.request.request_id
        if self._open.get(request_id) is not entry or entry.number != number:
            return  # ended, or an engine that was left
        match reply:
            case m.Began():
                entry.begin()
            case Reading():
                if not entry.output_ids:  # else a text that was read before
                    entry.consumer.read(replace(reply, request_id=request_id))
            case m.Committed():
                self._push(entry, reply)
            case m.Ended(_, reason, stats):
                entry.update_stats(stats)
                self._finish(request_id, reason)
            case m.RequestFailed(error):
                self._fail(request_id, error)
            case m.EngineLost(error, died):
                self._go_on(entry, error, died)

    def _push(self, entry: OpenRequest, committed: m.Committed) -> None:
        if entry.num_tokens is not None:
            return
        request_id = entry.consumer.request.request_id
        try:
            emit = Emit(request_id, committed.token_ids, committed.sources, committed.logprobs, committed.hit)
            entry.push(emit, committed.stats)
        except Exception as error:
            log.exception("request %s could not be handed out", request_id)
            entry.stop()
            self._fail(request_id, entry.consumer_error(error))
            return
        if entry.num_tokens is not None:
            entry.stop(entry.num_tokens)

    def _go_on(self, entry: OpenRequest, error: BaseException, died: bool) -> None:
        """End an answer that is complete and a request that caused too many deaths; let another engine go on."""
        entry.left(died=died)
        request_id = entry.consumer.request.request_id
        if (reason := entry.end) is not None:
            self._finish(request_id, reason)
        elif entry.deaths >= self._limits.max_failures or entry.all_deaths > self._limits.max_deaths:
            self._fail(request_id, EngineError("request", request_id, f"the engine died of it, or with it ({error})"))
        else:
            self._begin(request_id)

    def _finish(self, request_id: int, reason: FinishReason) -> None:
        self._open.pop(request_id).finish(reason)

    def _fail(self, request_id: int, error: BaseException) -> None:
        self._open.pop(request_id).consumer.fail(error)


def _closed_error() -> EngineClosedError:
    return EngineClosedError("engine", "closed", "the engine was closed while the request ran")
