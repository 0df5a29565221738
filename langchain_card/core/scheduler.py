"""Which requests run: first come, first served, as many at once as the target's memory holds."""

from __future__ import annotations

from collections import deque

from langchain_card.config import Limits
from langchain_card.core.policy import Load
from langchain_card.core.state import RequestState


class Scheduler:
    """Owns the waiting and the running requests; nobody else moves one between them.

    Attributes:
        waiting: oldest first; what was put back comes first.
        running: states by request id, in order of admission.
        capacity: requests that may run at once; falls when the target's memory does not suffice, and recovers.
        ended: requests that ended, in all.
    """

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self.waiting: deque[RequestState] = deque()
        self.running: dict[int, RequestState] = {}
        self.capacity = limits.num_seqs
        self.ended = 0

    def copy(self) -> Scheduler:
        """An independent copy."""
        copied = Scheduler(self.limits)
        copied.waiting = deque(state.copy() for state in self.waiting)
        copied.running = {request_id: state.copy() for request_id, state in self.running.items()}
        copied.capacity, copied.ended = self.capacity, self.ended
        return copied

    def admit(self) -> RequestState | None:
        """Lets the next waiting request run whose consumer reads, if there is one and room for it."""
        state = self._next()
        if state is None or len(self.running) >= self.capacity:
            return None
        self.waiting.remove(state)
        self.running[state.request.request_id] = state
        return state

    def in_the_way(self) -> RequestState | None:
        """A running request whose consumer does not read, while another one waits for its place."""
        if self._next() is None or len(self.running) < self.capacity:
            return None
        return next((state for state in self.running.values() if state.paused and state.window is None), None)

    def _next(self) -> RequestState | None:
        return next((state for state in self.waiting if not state.paused), None)

    @property
    def is_full(self) -> bool:
        """Whether one more request would have to wait behind `max_queue` others."""
        return len(self.waiting) >= self.limits.max_queue + max(0, self.capacity - len(self.running))

    def put_back(self, state: RequestState) -> None:
        """Takes a running request's place away; it is the next to be admitted once its consumer reads."""
        del self.running[state.request.request_id]
        self.waiting.appendleft(state)

    def verifiable(self) -> list[RequestState]:
        """Requests that may be verified; one with which the target failed is tried alone."""
        states = [state for state in self.running.values() if state.window is None and not state.paused]
        return next(([state] for state in states if state.failures), states)

    @property
    def is_reading(self) -> bool:
        """Whether the target has windows whose text it has not read to the end."""
        return any(state.window is not None for state in self.running.values())

    def load(self, state: RequestState) -> Load:
        """What the policy is asked about where it decides for this request."""
        return Load(state.schedule, len(self.running))

    def unpause(self) -> None:
        """Lets every request go on, whether its consumer reads or not."""
        for state in (*self.running.values(), *self.waiting):
            state.paused = False

    def find(self, request_id: int) -> RequestState | None:
        """The request, waiting or running; None when it ended or never was."""
        return self.running.get(request_id) or next(
            (state for state in self.waiting if state.request.request_id == request_id), None
        )

    def end(self, state: RequestState) -> bool:
        """Takes a request out for good; whether it was running."""
        was_running = self.running.pop(state.request.request_id, None) is not None
        if was_running:
            self.capacity = min(self.capacity + 1, self.limits.num_seqs)
        else:
            self.waiting.remove(state)
        self.ended += 1
        return was_running
