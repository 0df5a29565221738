"""The draft side: applies commands, and steps as long as it has leave to."""

from __future__ import annotations

import threading
from collections.abc import Callable

from langchain_card.core.messages import Begin, Correct, End, Grow, Proposal
from langchain_card.ports import Budget, DraftCommand, Drafter


class DraftWorker:
    """Runs one drafter. Commands and steps may come from several threads and take turns.

    Args:
        drafter: the drafter.
        publish: takes each proposal.
        set_threads: called with the request's schedule before its steps, to fit the number of CPU threads to it.
    """

    def __init__(
        self, drafter: Drafter, publish: Callable[[Proposal], None], set_threads: Callable[[str], None]
    ) -> None:
        self.drafter = drafter
        self._publish = publish
        self._set_threads = set_threads
        self._turn = threading.Lock()
        self._leave: dict[int, int] = {}
        self._schedules: dict[int, str] = {}

    def handle(self, command: DraftCommand) -> None:
        """Applies one command; one for a request that is not open is ignored."""
        with self._turn:
            match command:
                case Begin(request, schedule):
                    self._leave[request.request_id] = 0
                    self._schedules[request.request_id] = schedule
                    self.drafter.begin(request)
                case Correct(_, request_id, start, token_ids) if request_id in self._leave:
                    self._leave[request_id] = 0
                    self.drafter.correct(request_id, start, token_ids)
                case Grow(_, request_id, steps) if request_id in self._leave:
                    self._leave[request_id] += steps
                case End(request_id) if request_id in self._leave:
                    del self._leave[request_id], self._schedules[request_id]
                    self.drafter.end(request_id)

    def step(self) -> bool:
        """One step for every request that has leave; False when none has."""
        with self._turn:
            budgets = [Budget(request_id) for request_id, steps in self._leave.items() if steps > 0]
            if not budgets:
                return False
            self._set_threads(self._schedules[budgets[0].request_id])
            for budget in budgets:
                self._leave[budget.request_id] -= 1
            for proposal in self.drafter.step(budgets):
                if not proposal.token_ids:
                    self._leave[proposal.request_id] = 0  # it cannot grow before the next correction
                self._publish(proposal)
            return True

    def close(self) -> None:
        """Frees the drafter."""
        self.drafter.close()
