"""The draft side: applies commands, and steps as long as it has leave to."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from dataclasses import replace

from langchain_card.core.messages import Begin, Correct, End, Grow, Proposal
from langchain_card.errors import is_out_of_memory
from langchain_card.ports import Budget, DraftCommand, Drafter


class DraftWorker:
    """Runs one drafter. Commands and steps may come from several threads and take turns.

    Args:
        drafter: the drafter.
        publish: takes each proposal.
        report_out_of_memory: told the requests that it had no memory for.
        set_threads: called with the request's schedule before its steps, to fit the number of CPU threads to it.
    """

    def __init__(
        self,
        drafter: Drafter,
        publish: Callable[[Proposal], None],
        report_out_of_memory: Callable[[tuple[int, ...]], None],
        set_threads: Callable[[str], None] = lambda _: None,
    ) -> None:
        self.drafter = drafter
        self._publish = publish
        self._report_out_of_memory = report_out_of_memory
        self._set_threads = set_threads
        self._turn = threading.Lock()
        self._begun: dict[int, Begin] = {}
        self._leave: dict[int, deque[int]] = {}

    def handle(self, command: DraftCommand) -> None:
        """Applies one command; one for a request that is not open is ignored."""
        with self._turn:
            match command:
                case Begin(_, request):
                    self._begun[request.request_id] = command
                    self._leave[request.request_id] = deque()
                    self.drafter.begin(request, command.output_ids)
                case Correct(_, request_id, start, token_ids) if request_id in self._begun:
                    self._leave[request_id].clear()
                    self.drafter.correct(request_id, start, token_ids)
                case Grow(_, request_id, widths) if request_id in self._begun:
                    self._leave[request_id].extend(widths)
                case End(_, request_id) if request_id in self._begun:
                    del self._leave[request_id], self._begun[request_id]
                    self.drafter.end(request_id)

    def step(self) -> bool:
        """One step for every request that has leave; False when none has."""
        with self._turn:
            budgets = [Budget(request_id, widths.popleft()) for request_id, widths in self._leave.items() if widths]
            if not budgets:
                return False
            self._set_threads(self._begun[budgets[0].request_id].schedule)
            for proposal in self._proposals(budgets):
                request_id = proposal.request_id
                if not proposal.token_ids:
                    self._leave[request_id].clear()  # it cannot grow before the next correction
                self._publish(replace(proposal, incarnation=self._begun[request_id].incarnation))
            return True

    def _proposals(self, budgets: list[Budget]) -> list[Proposal]:
        try:
            return self.drafter.step(budgets)
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            for budget in budgets:
                self._leave[budget.request_id].clear()
            self._report_out_of_memory(tuple(budget.request_id for budget in budgets))
            return []

    def close(self) -> None:
        """Frees the drafter."""
        with self._turn:
            self._begun.clear()
            self._leave.clear()
            self.drafter.close()
