"""Admission of requests: those that have begun, then the oldest, as many at once as memory holds."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from langchain_card.core.policy import Load
from langchain_card.core.state import RequestState
from langchain_card.limits import Limits


class Scheduler:
    """The only owner of the waiting and the running requests.

    Attributes:
        waiting: those that were put back, then others that have begun, then the rest; the last two oldest first.
        running: states by request id, in order of admission.
        capacity: requests that may run at once; lowered when the target runs out of memory, and raised again later.
        ended: number of requests that have ended.
        working: number of running requests whose consumers read.
        longest: length of the longest running text, its answer included.
    """

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self.waiting: deque[RequestState] = deque()
        self.running: dict[int, RequestState] = {}
        self.capacity = limits.num_seqs
        self.ended = self.working = self.longest = 0

    def copy(self) -> Scheduler:
        """Return an independent copy."""
        copied = Scheduler(self.limits)
        copied.waiting = deque(state.copy() for state in self.waiting)
        copied.running = {request_id: state.copy() for request_id, state in self.running.items()}
        copied.capacity, copied.ended = self.capacity, self.ended
        copied.working, copied.longest = self.working, self.longest
        return copied

    def enqueue(self, state: RequestState) -> None:
        """Let a request wait behind those before it; one that has begun overtakes all that have not."""
        overtaken = 0 if not state.has_begun else sum(not other.has_begun for other in self.waiting)
        self.waiting.insert(len(self.waiting) - overtaken, state)

    def admit(self) -> RequestState | None:
        """Let the next waiting request run whose consumer reads; None when there is none, or no room."""
        state = self._next()
        if state is None or len(self.running) >= self.capacity:
            return None
        self.waiting.remove(state)
        self.running[state.request.request_id] = state
        self._count()
        self.note_length(state)
        return state

    def note_length(self, state: RequestState) -> None:
        """Note that a running text has grown."""
        self.longest = max(self.longest, state.length)

    def in_the_way(self) -> RequestState | None:
        """Return a running request whose consumer does not read while another request waits for its place, or None."""
        if self._next() is None or len(self.running) < self.capacity:
            return None
        return next((state for state in self.running.values() if state.paused and state.window is None), None)

    def _next(self) -> RequestState | None:
        return next((state for state in self.waiting if not state.paused), None)

    @property
    def is_full(self) -> bool:
        """True when one more request would have to wait behind `max_queue` others."""
        return len(self.waiting) >= self.limits.max_queue + max(0, self.capacity - len(self.running))

    def put_back(self, state: RequestState) -> None:
        """Move a running request to the head of the queue; it is admitted next, once its consumer reads."""
        self._remove(state)
        self.waiting.appendleft(state)

    def _remove(self, state: RequestState) -> bool:
        """Remove a request from the running ones; return whether it was one of them."""
        was_running = self.running.pop(state.request.request_id, None) is not None
        self.longest = max((other.length for other in self.running.values()), default=0)
        self._count()
        return was_running

    def _count(self) -> None:
        self.working = sum(not state.paused for state in self.running.values())

    def verifiable(self) -> list[RequestState]:
        """Return the requests that may be verified; a request with which the target has failed is tried alone."""
        states = [state for state in self.running.values() if state.window is None and not state.paused]
        return next(([state] for state in states if state.failures), states)

    @property
    def is_reading(self) -> bool:
        """True while the target has windows whose prompt it has not read to the end."""
        return any(state.window is not None for state in self.running.values())

    def load(self, state: RequestState, *, drafting: bool = True) -> Load:
        """Return the load under which decisions for this request are made."""
        return Load(state.schedule, max(1, self.working), self.longest, drafting)

    def pause(self, states: Iterable[RequestState], *, paused: bool) -> None:
        """Let requests pause whose consumers do not read, or go on."""
        for state in states:
            state.paused = paused
        self._count()

    def all(self) -> list[RequestState]:
        """Return the running and the waiting requests."""
        return [*self.running.values(), *self.waiting]

    def find(self, request_id: int) -> RequestState | None:
        """Return the request, waiting or running; None when it has ended or is unknown."""
        return self.running.get(request_id) or next(
            (state for state in self.waiting if state.request.request_id == request_id), None
        )

    def end(self, state: RequestState) -> bool:
        """Remove a request for good; return whether it was running."""
        was_running = self._remove(state)
        if was_running:
            self.capacity = min(self.capacity + 1, self.limits.num_seqs)
        else:
            self.waiting.remove(state)
        self.ended += 1
        return was_running
