"""The loop around the core: events in, effects out. It runs on the target's thread."""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Sequence

from langchain_card.core import messages as m
from langchain_card.core.coordinator import Coordinator
from langchain_card.core.request import FinishReason
from langchain_card.engine.generation import Generation
from langchain_card.engine.target_worker import TargetWorker
from langchain_card.errors import EngineClosedError, EngineError
from langchain_card.ports import Clock, Transport

log = logging.getLogger(__name__)


class Driver:
    """Drives one coordinator with one target and any number of drafters.

    Args:
        coordinator: the protocol.
        target: the target worker; used on this driver's thread only.
        clock: source of time.
    """

    def __init__(self, coordinator: Coordinator, target: TargetWorker, clock: Clock = time.perf_counter) -> None:
        self.coordinator = coordinator
        self.transports: dict[str, Transport] = {}
        self._target = target
        self._clock = clock
        self._inbox: queue.SimpleQueue[Callable[[float], m.Event] | None] = queue.SimpleQueue()
        self._generations: dict[int, Generation] = {}
        self._wait_until: float | None = None
        self._closed = False
        self._ended = threading.Lock()
        self._error: BaseException | None = None

    # From any thread.

    def post(self, event: Callable[[float], m.Event]) -> None:
        """Queues an event; `event` is called with the time at which it is handled."""
        self._inbox.put(event)

    def publish(self, proposal: m.Proposal) -> None:
        """Takes a drafter's proposal."""
        self.post(lambda now: m.Proposed(proposal, now))

    def submit(self, generation: Generation) -> None:
        """Takes a request; it fails when the loop has ended."""
        with self._ended:
            if self._error is None:
                self._generations[generation.request.request_id] = generation
                self.post(lambda now: m.Submitted(generation.request, now))
                return
        generation.fail(self._error)

    @property
    def num_open(self) -> int:
        """Requests that wait or run."""
        return len(self._generations)

    def close(self) -> None:
        """Ends the loop after the current step; requests that still run fail."""
        self._inbox.put(None)

    # On the target's thread.

    def run(self) -> None:
        """Until closed."""
        error: BaseException = EngineClosedError("engine", "closed", "the engine was closed while the request ran")
        try:
            while not self._closed:
                self.step()
        except Exception as failure:
            log.exception("the target failed; the engine ends")
            error = EngineError("target", failure, "a target step failed", "the log has the whole trace")
            error.__cause__ = failure
        finally:
            self._fail_all(error)

    def step(self) -> None:
        """Take in what happened; then, if the target has work, query, verify and commit."""
        for event in self._arrived():
            self._perform(self.coordinator.handle(event))
        self._wait_until = None
        if not self.coordinator.idle and not self._closed:
            self._perform(self.coordinator.handle(m.TargetReady(self._clock())))

    def _arrived(self) -> list[m.Event]:
        """Everything in the inbox; sleeps while there is nothing to do."""
        events: list[m.Event] = []
        timeout: float | None = 0.0
        if self.coordinator.idle:
            timeout = None
        elif self._wait_until is not None:
            timeout = max(0.0, self._wait_until - self._clock())
        while True:
            try:
                event = self._inbox.get(timeout != 0.0, timeout)
            except queue.Empty:
                return events
            timeout = 0.0
            if event is None:
                self._closed = True
                return events
            events.append(event(self._clock()))

    def _perform(self, effects: Sequence[m.Effect]) -> None:
        for effect in effects:
            match effect:
                case m.Verify(windows):
                    for verdict in self._target.verify(windows):
                        self._perform(self.coordinator.handle(m.Verified(verdict, self._clock())))
                case m.Emit():
                    if self._emit(effect):
                        return
                case m.Correct(source) | m.Grow(source):
                    if source in self.transports:
                        self.transports[source].send(effect)
                case m.Begin(request):
                    if (generation := self._generations.get(request.request_id)) is not None:
                        generation.watch(self.coordinator.scheduler.running[request.request_id].stats)
                    self._target.begin(effect)
                    self._broadcast(effect)
                case m.End(request_id):
                    self._target.end(request_id)
                    self._broadcast(effect)
                case m.Finish(request_id, reason, stats):
                    generation = self._generations.pop(request_id, None)
                    if generation is not None:
                        generation.finish(reason, stats)
                case m.Wait(until):
                    self._wait_until = until

    def _emit(self, emit: m.Emit) -> bool:
        """Hands tokens to the consumer; True when a stop string ended the request with them."""
        generation = self._generations.get(emit.request_id)
        counted = generation.push(emit) if generation is not None else None
        if counted is None:
            return False
        stopped = m.Stopped(emit.request_id, FinishReason.STOP, self._clock(), counted)
        effects = self.coordinator.handle(stopped)
        self._perform(effects)
        return bool(effects)  # none when the same round had ended the request anyway

    def _broadcast(self, command: m.Begin | m.End) -> None:
        for transport in self.transports.values():
            transport.send(command)

    def _fail_all(self, error: BaseException) -> None:
        with self._ended:  # from here on nothing is queued
            self._closed, self._error = True, error
        for generation in self._generations.values():
            generation.fail(error)
        for request_id in self._generations:
            self._target.end(request_id)
        self._generations.clear()
