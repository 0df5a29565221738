"""The draft side: applies commands, and steps as long as it has leave to."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace

from langchain_card.core.drafter_state import is_valid
from langchain_card.core.messages import Begin, Correct, End, Grow, Proposal
from langchain_card.engine.liveness import StepWatch
from langchain_card.errors import is_out_of_memory
from langchain_card.ports import Budget, DraftCommand, Drafter, Health

log = logging.getLogger(__name__)

NO_EPOCH = -2
"""Before any that a drafter may be in."""


class DraftWorker:
    """Runs one drafter. Commands and steps may come from several threads and take turns.

    Args:
        drafter: the drafter.
        publish: takes each proposal.
        report_out_of_memory: told the requests that it had no memory for.
        set_threads: called with the request's schedule before its steps, to fit the number of CPU threads to it.

    Attributes:
        begun: the `Begin` in force of every open request, by id.
        leave: widths of the steps that may still be taken, by request id.
        min_chance: what the nodes that they expand must have, by request id.
        applied: output tokens that the drafter was told, by request id.
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
        self.begun: dict[int, Begin] = {}
        self.leave: dict[int, tuple[int, ...]] = {}
        self.min_chance: dict[int, float] = {}
        self._unread: dict[int, int] = {}  # tokens that the request's first step reads
        self.applied: dict[int, int] = {}
        self._watch = StepWatch(time.monotonic)
        self._warned = False

    def handle(self, command: DraftCommand) -> None:
        """Applies one command; one for a request that is not open is ignored."""
        with self._turn:
            self._apply(command)

    def work(self, request_ids: Collection[int]) -> None:
        """Takes all steps that these requests have leave for, those of one step together."""
        with self._turn:
            while self._step(request_ids):
                pass

    def step(self, but: Collection[int] = ()) -> bool:
        """One step for every request that has leave, but these; False when none has."""
        with self._turn:
            return self._step(self.leave.keys() - but)

    def _apply(self, command: DraftCommand) -> None:
        match command:
            case Begin(_, request):
                self.begun[request.request_id], self.leave[request.request_id] = command, ()
                self._unread[request.request_id] = len(request.prompt_ids) + len(command.output_ids)
                self.applied[request.request_id] = len(command.output_ids)
                self.drafter.begin(request, command.output_ids)
            case Correct(_, request_id, start, token_ids) if request_id in self.begun:
                self.leave[request_id] = ()
                if start <= (applied := self.applied[request_id]):  # else one before it was lost
                    self.applied[request_id] = max(applied, start + len(token_ids))
                self.drafter.correct(request_id, start, token_ids)
            case Grow(_, request_id, widths) if request_id in self.begun:
                self.leave[request_id] += widths
                self.min_chance[request_id] = command.min_chance
            case End(_, request_id) if request_id in self.begun:
                del self.leave[request_id], self.begun[request_id], self.applied[request_id]
                self._unread.pop(request_id, None)
                self.min_chance.pop(request_id, None)
                self.drafter.end(request_id)

    def _step(self, request_ids: Collection[int]) -> bool:
        budgets = [
            Budget(request_id, widths[0], self.min_chance[request_id])
            for request_id, widths in self.leave.items()
            if widths and request_id in request_ids
        ]
        if not budgets:
            return False
        for budget in budgets:
            self.leave[budget.request_id] = self.leave[budget.request_id][1:]
        self._set_threads(self.begun[budgets[0].request_id].schedule)
        for proposal in self._proposals(budgets):
            request_id = proposal.request_id
            if not proposal.token_ids:
                self.leave[request_id] = ()  # it cannot grow before the next correction
            self._publish(replace(proposal, incarnation=self.begun[request_id].incarnation))
        return True

    def _proposals(self, budgets: list[Budget]) -> list[Proposal]:
        size = sum(budget.width + self._unread.pop(budget.request_id, 0) for budget in budgets)
        try:
            with self._watch.step(size):
                said = self.drafter.step(budgets)
            return self._answers(budgets, said)
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            for budget in budgets:
                self.leave[budget.request_id] = ()
            self._report_out_of_memory(tuple(budget.request_id for budget in budgets))
            return []

    def _answers(self, budgets: Sequence[Budget], said: Sequence[Proposal]) -> list[Proposal]:
        """What can be used of what the drafter said, and empty proposals where it has no answer: who asked waits."""
        heard = [p for p in said if isinstance(p, Proposal) and is_valid(p) and self._is_of_here(p)]
        answered = {(p.request_id, p.applied_len) for p in heard}
        wanted = [(budget.request_id, self.applied[budget.request_id]) for budget in budgets]
        nothing = [_nothing(self.drafter.name, *each) for each in wanted if each not in answered]
        if (nothing or len(heard) < len(said)) and not self._warned:
            self._warned = True
            log.warning(
                "drafter %r said what cannot be used, or nothing: a step wants one Proposal for each request, of "
                "tuples of Python's own numbers, for the answer that it was told (docs/plugins.md says what, the "
                "conformance suite what is wrong); said once",
                self.drafter.name,
            )
        return [*heard, *nothing]

    def _is_of_here(self, proposal: Proposal) -> bool:
        return proposal.source == self.drafter.name and proposal.request_id in self.begun

    def health(self) -> Health:
        """Whether its step takes no longer than it should; asked from any thread."""
        return self._watch.health()

    def close(self) -> None:
        """Frees the drafter."""
        with self._turn:
            self.begun.clear()
            self.leave.clear()
            try:
                self.drafter.close()
            except Exception:
                log.exception("a drafter could not be closed")


def _nothing(source: str, request_id: int, applied_len: int) -> Proposal:
    """Never admitted, for what it says of the drafter is made up: it ends the wait, and that is all."""
    return Proposal(source, request_id, NO_EPOCH, 0, applied_len, first=1, parents=(), token_ids=(), scores=())
