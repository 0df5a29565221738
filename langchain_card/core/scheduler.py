"""Which requests run: first come, first served, at most `max_num_seqs` at once."""

from __future__ import annotations

from collections import deque

from langchain_card.config import Limits
from langchain_card.core.request import Request, RequestState


class Scheduler:
    """Owns the waiting and the running requests; nobody else moves one between them.

    Attributes:
        waiting: submitted requests with their time of submission, oldest first.
        running: states by request id, in order of admission.
        ended: requests that ended, in all.
    """

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self.waiting: deque[tuple[Request, float]] = deque()
        self.running: dict[int, RequestState] = {}
        self.ended = 0

    def can_admit(self) -> bool:
        """Whether a waiting request may start."""
        return bool(self.waiting) and len(self.running) < self.limits.max_num_seqs

    def forget(self, request_id: int) -> RequestState | tuple[Request, float] | None:
        """Takes a request out of wherever it is: its state when it ran, its entry when it waited, None when unknown."""
        found = self.running.pop(request_id, None) or next(
            (e for e in self.waiting if e[0].request_id == request_id), None
        )
        if isinstance(found, tuple):
            self.waiting.remove(found)
        self.ended += found is not None
        return found
