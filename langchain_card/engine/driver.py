"""`Driver`: the loop around the core, events in and effects out."""

from __future__ import annotations

import contextlib
import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from typing import TYPE_CHECKING

from langchain_card.core import messages as m
from langchain_card.core.coordinator import Coordinator
from langchain_card.core.request import FinishReason
from langchain_card.engine.inbox import Inbox
from langchain_card.engine.liveness import StepWatch
from langchain_card.errors import DeviceLostError, EngineClosedError, EngineError, is_device_failure, is_out_of_memory
from langchain_card.ports import Clock, Consumer, Health, Observer, Target, Transport

if TYPE_CHECKING:
    from langchain_card.engine.kinds import KindFinder
    from langchain_card.runtime.kind import Kind

log = logging.getLogger(__name__)


class Driver:
    """A loop that connects a coordinator with its target and any number of drafters.

    Args:
        coordinator: the protocol.
        make_target: makes the target's worker, now and after each death; only the driver's thread uses the worker.
        make_transports: by drafter, makes its transport with a new worker behind it.
        clock: source of time.
        observe: called with every event and its effects.
        finder: finds the engine's kind.
    """

    def __init__(
        self,
        coordinator: Coordinator,
        make_target: Callable[[], Target],
        make_transports: Mapping[str, Callable[[Driver], Transport]],
        clock: Clock = time.perf_counter,
        observe: Observer | None = None,
        finder: KindFinder | None = None,
    ) -> None:
        self.coordinator = coordinator
        self._clock, self._observe, self._finder = clock, observe, finder
        self._inbox = Inbox(clock)
        self._consumers: dict[int, Consumer] = {}
        self._calls: deque[tuple[Callable[[], str], int, Future[str]]] = deque()
        self._sleep_until = -math.inf
        self._restarts: list[tuple[float, str]] = []
        self._ended = threading.Lock()
        self._error: BaseException | None = None
        self._make_target, self._make_transports = make_target, make_transports
        self._watch = StepWatch(clock)
        self._unread: dict[int, int] = {}  # tokens of texts that the target has not read yet
        self._target = make_target()
        self.transports: dict[str, Transport] = {}
        with contextlib.ExitStack() as made:  # if a transport cannot be made, those before it are closed
            for name, make in make_transports.items():
                self.transports[name] = make(self)
                made.callback(self.transports[name].close)
            made.pop_all()

    # From any thread.

    def post(self, event: Callable[[float], m.Event]) -> None:
        """Queue an event; `event` is called with the time at which it is handled."""
        self._inbox.post(event)

    def publish(self, proposal: m.Proposal) -> None:
        """Take a drafter's proposal."""
        published = self._clock()
        self.post(lambda _: m.Proposed(proposal, published))

    def report_start(self, worker: str) -> None:
        """Report that a drafter has started."""
        self.post(lambda now: m.WorkerStarted(worker, now))

    def report_death(self, worker: str, error: BaseException) -> None:
        """Report that a drafter died of `error`."""
        self.post(lambda now: m.WorkerDied(worker, now, repr(error)[:200]))

    def report_out_of_memory(self, worker: str, request_ids: tuple[int, ...]) -> None:
        """Report that a drafter had no memory for these requests."""
        self.post(lambda now: m.OutOfMemory(worker, request_ids, now))

    def announce(self, count: int) -> None:
        """Announce `count` requests. An idle engine starts when all have arrived, or when no more arrive."""
        self._inbox.announce(count)

    def submit(self, consumer: Consumer, output_ids: Sequence[int] = ()) -> None:
        """Take a request, perhaps with the beginning of its answer; it fails when the loop has ended."""
        request, begun = consumer.request, tuple(output_ids)
        with self._ended:
            if self._error is None:
                if not self._is_due():
                    self._watch.expect()
                self._consumers[request.request_id] = consumer
                self.post(lambda now: m.Submitted(request, now, begun))
                self._inbox.count_request()
                return
        consumer.fail(self._error)

    def stop(self, request_id: int, num_tokens: int | None = None) -> None:
        """End a request after `num_tokens` tokens; None aborts it."""
        reason = FinishReason.ABORT if num_tokens is None else FinishReason.STOP
        self.post(lambda now: m.Stopped(request_id, reason, now, num_tokens))

    def pause(self, request_id: int, paused: bool) -> None:
        """Hold a request whose consumer does not read, or resume it."""
        if not paused and not self._is_due():
            self._watch.expect()
        self.post(lambda now: m.Paused(request_id, paused, now))

    def drain(self) -> None:
        """Take no more requests, and write all answers to their end, read or not."""
        self.post(m.Draining)

    def call(self, act: Callable[[], str], rows: int) -> str:
        """Call `act`, which computes so many rows, on the target's thread between two steps; return its result.

        Raises:
            Exception: what `act` raises, or the error with which the loop has ended.
        """
        done = Future[str]()
        with self._ended:
            if self._error is not None:
                raise self._error
            self._calls.append((act, rows, done))
            self.post(m.Interrupted)
        return done.result()

    def kind(self, *, measured: bool = True) -> Kind:
        """Return the engine's kind; the first call finds it, and the first `measured` one measures (`KindFinder`)."""
        assert self._finder is not None, "a driver without models has no kind"
        return self._finder.find(self.call if measured else None)

    @property
    def num_open(self) -> int:
        """Number of requests that wait or run."""
        return len(self._consumers)

    @property
    def num_running(self) -> int:
        """Number of requests that hold KV on the target."""
        return len(self.coordinator.scheduler.running)

    @property
    def num_seats(self) -> int:
        """Number of requests that run at once."""
        return self.coordinator.limits.num_seqs

    def health(self) -> dict[str, Health]:
        """Return the health of the target and of the drafters, by name."""
        healths = {name: transport.health() for name, transport in self.transports.items()}
        drafts = any(health.busy and health.ok for health in healths.values())  # perhaps on the target's thread
        healths[m.TARGET] = self._watch.health(due=self._is_due() and not drafts)
        workers = self.coordinator.workers
        states = {name: "given up" if self._error is not None else workers.life(name).value for name in healths}
        return {name: replace(health, state=states[name]) for name, health in healths.items()}

    def _is_due(self) -> bool:
        """Return whether a request could begin or go on; posted requests are not in the scheduler yet."""
        scheduler = self.coordinator.scheduler
        states = [*scheduler.running.values(), *scheduler.waiting.copy()]
        return len(self._consumers) > len(states) or any(not state.paused for state in states)

    def close(self) -> None:
        """End the loop after the current step; requests that still run fail."""
        self._inbox.close()

    # On the target's thread.

    def run(self) -> None:
        """Run the loop until the driver is closed."""
        error: BaseException = EngineClosedError("engine", "closed", "the engine was closed while the request ran")
        try:
            while not self._inbox.closed:
                self.step()
        except DeviceLostError as failure:
            log.exception("the target's device is lost; the engine ends")
            error = failure
        except Exception as failure:
            log.exception("the loop around the core failed; the engine ends")
            error = EngineError("engine", failure, "an internal error", "the log has the whole trace; please report it")
            error.__cause__ = failure
        finally:
            self._fail_all(error)

    def step(self) -> None:
        """Handle events, calls and due restarts; then query, verify and commit."""
        for event in self._arrived():
            self._handle(event)
        self._answer_calls()
        self._restart_due()
        if not self._inbox.closed:
            self._handle(m.TargetReady(self._clock()))
        self._draft()

    def _answer_calls(self) -> None:
        while self._calls and not self._inbox.closed:
            act, rows, done = self._calls.popleft()
            try:
                with self._watch.step(rows):
                    result = act()
            except Exception as error:
                done.set_exception(error)
            else:
                done.set_result(result)
            self._handle(m.Interrupted(self._clock()))  # their time is not that of a pass

    def _arrived(self) -> list[m.Event]:
        """Return all events in the inbox; sleeps while there is nothing to do."""
        until = min([self._sleep_until, *(at for at, _ in self._restarts)])
        self._sleep_until = -math.inf
        return self._inbox.take(until, self._is_idle)

    def _is_idle(self) -> bool:
        """Return whether nothing runs, and there is room for more requests than those that wait."""
        scheduler = self.coordinator.scheduler
        return not scheduler.running and len(scheduler.waiting) < scheduler.capacity

    def _handle(self, event: m.Event) -> bool:
        """Handle an event; return whether it had effects."""
        effects = self.coordinator.handle(event)
        if self._observe is not None:
            self._observe(event, effects)
        self._perform(effects)
        return bool(effects)

    def _perform(self, effects: Sequence[m.Effect]) -> None:
        for effect in effects:
            match effect:
                case m.Verify(windows):
                    self._draft()
                    verified = [*self._verify(windows)]
                    for event in (*self._arrived(), *verified):  # proposals that came meanwhile may be hits
                        self._handle(event)
                case m.Emit():
                    if self._emit(effect):
                        return
                case m.Begin(m.TARGET, request):
                    if (consumer := self._consumers.get(request.request_id)) is not None:
                        consumer.watch(self.coordinator.scheduler.running[request.request_id].stats)
                    self._unread[request.request_id] = len(request.prompt_ids) + len(effect.output_ids)
                    self._target.begin(effect)
                case m.End(m.TARGET, request_id):
                    self._unread.pop(request_id, None)
                    self._target.end(request_id)
                case m.Begin() | m.Correct() | m.Grow() | m.End():
                    self.transports[effect.worker].send(effect)
                case m.Restart(worker, at):
                    self._restarts.append((at, worker))
                case m.Finish(request_id):
                    self._finish(effect)
                case m.Wait(until):
                    self._sleep_until = until

    def _draft(self) -> None:
        """Take draft steps that do not overlap with the target; kill drafters that hang."""
        for name, transport in self.transports.items():
            transport.work()
            if name in self.coordinator.workers and not transport.health().ok:
                transport.kill()

    def _verify(self, windows: Sequence[m.Window]) -> Iterator[m.Event]:
        try:
            rows = sum(len(window.token_ids) for window in windows) + sum(self._unread.values())
            with self._watch.step(min(rows, self.coordinator.limits.max_step_rows)):
                reports = self._target.verify(windows)
        except Exception as error:
            request_ids = tuple(window.request_id for window in windows)
            if is_out_of_memory(error):
                yield m.OutOfMemory(m.TARGET, request_ids, self._clock())
                return
            if is_device_failure(error):
                limit = "the device failed, and this process cannot use it any longer"
                hint = "with isolate=True, a new process goes on with the answers"
                raise DeviceLostError("target", str(error), limit, hint) from error
            log.exception("a target step failed for requests %s", request_ids)
            for request_id in self._consumers:
                self._target.end(request_id)  # the next worker needs the memory
            self._unread.clear()
            yield m.WorkerDied(m.TARGET, self._clock(), repr(error)[:200])
        else:
            for report in reports:
                if isinstance(report, m.Reading):
                    yield from self._note(report)
                    continue
                self._unread.pop(report.request_id, None)
                yield m.Verified(report, self._clock())

    def _note(self, reading: m.Reading) -> Iterator[m.Event]:
        self._unread[reading.request_id] = reading.total - reading.read
        if (consumer := self._consumers.get(reading.request_id)) is None:
            return
        try:
            consumer.read(reading)
        except Exception as error:
            self._fail(consumer, error)
            yield m.Stopped(reading.request_id, FinishReason.ABORT, self._clock())

    def _restart_due(self) -> None:
        due = [(at, worker) for at, worker in self._restarts if at <= self._clock()]
        for entry in due:
            self._restarts.remove(entry)
            if (event := self._restart(entry[1])) is not None:
                self._handle(event)

    def _restart(self, worker: str) -> m.Event | None:
        """Restart a worker; return the event to handle, or None while the worker is still starting."""
        try:
            if worker == m.TARGET:
                self._target = self._make_target()
            else:
                self.transports[worker].close()
                self.transports[worker] = self._make_transports[worker](self)
                if not self.transports[worker].ready:
                    return None
        except Exception as error:
            log.exception("%s could not be started again", worker)
            return m.WorkerDied(worker, self._clock(), repr(error)[:200])
        return m.WorkerStarted(worker, self._clock())

    def _finish(self, finish: m.Finish) -> None:
        consumer = self._consumers.pop(finish.request_id, None)
        if consumer is not None and finish.error is not None:
            consumer.fail(finish.error)
        elif consumer is not None:
            try:
                consumer.finish(finish.reason, finish.stats)
            except Exception as error:
                self._fail(consumer, error)

    def _emit(self, emit: m.Emit) -> bool:
        """Hand tokens to the consumer; return whether that ended the request."""
        consumer = self._consumers.get(emit.request_id)
        if consumer is None:
            return False
        try:
            counted = consumer.push(emit)
        except Exception as error:
            self._fail(consumer, error)
            stopped = m.Stopped(emit.request_id, FinishReason.ABORT, self._clock())
        else:
            if counted is None:
                return False
            stopped = m.Stopped(emit.request_id, FinishReason.STOP, self._clock(), counted)
        return self._handle(stopped)  # no effects if the request ended in the same round anyway

    def _fail(self, consumer: Consumer, error: Exception) -> None:
        """Fail a request whose consumer raised."""
        log.error("request %s could not be handed out", consumer.request.request_id, exc_info=error)
        self._consumers.pop(consumer.request.request_id, None)
        consumer.fail(EngineError("request", consumer.request.request_id, f"its text could not be made ({error})"))

    def _fail_all(self, error: BaseException) -> None:
        with self._ended:  # nothing is queued after this
            self._error = error
        for *_, done in self._calls:
            done.set_exception(error)
        for consumer in self._consumers.values():
            with contextlib.suppress(Exception):  # a consumer that fails does not harm others
                consumer.fail(error)
        for request_id in self._consumers:
            self._target.end(request_id)
        self._consumers.clear()
