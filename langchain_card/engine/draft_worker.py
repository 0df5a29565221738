"""`DraftWorker`: applies commands to a drafter and takes the steps that are granted."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace

from langchain_card.core.drafter_state import is_valid
from langchain_card.core.messages import Begin, Correct, End, Grow, Proposal
from langchain_card.drafters.grammar_filter import GrammarFilter
from langchain_card.engine.liveness import StepWatch
from langchain_card.errors import is_out_of_memory
from langchain_card.ports import Budget, Constraint, DraftCommand, Drafter, Health

log = logging.getLogger(__name__)

NO_EPOCH = -2
"""An epoch that no drafter uses."""


class DraftWorker:
    """A worker that runs one drafter. Several threads may send commands and take steps, one at a time.

    Args:
        drafter: the drafter.
        publish: takes each proposal.
        report_out_of_memory: takes the ids of requests that the drafter had no memory for.
        set_threads: called with the request's schedule before its steps, to set the number of CPU threads.
        constrain: opens a grammar at the start of an answer; without it, candidates may break the grammar.

    Attributes:
        begun: the latest `Begin` of every open request, by id.
        granted: widths of the steps that may still be taken, by request id.
        min_chance: minimal chance of nodes that these steps expand, by request id.
        read: tokens of the text that each of these steps may read, by request id.
        applied: number of output tokens that the drafter has received, by request id.
    """

    def __init__(
        self,
        drafter: Drafter,
        publish: Callable[[Proposal], None],
        report_out_of_memory: Callable[[tuple[int, ...]], None],
        set_threads: Callable[[str], None] = lambda _: None,
        constrain: Callable[[str], Constraint] | None = None,
    ) -> None:
        self.drafter = drafter
        self._publish = publish
        self._report_out_of_memory = report_out_of_memory
        self._set_threads = set_threads
        self._filter = GrammarFilter(constrain)
        self._lock = threading.Lock()
        self.begun: dict[int, Begin] = {}
        self.granted: dict[int, tuple[int, ...]] = {}
        self.min_chance: dict[int, float] = {}
        self.max_read: dict[int, int] = {}
        self._unread: dict[int, int] = {}  # tokens of each text that are left to read, as far as is known
        self.applied: dict[int, int] = {}
        self._watch = StepWatch(time.monotonic)
        self._warned = False

    def handle(self, command: DraftCommand) -> None:
        """Apply one command; commands for requests that are not open are ignored."""
        with self._lock:
            self._apply(command)

    def work(self, request_ids: Collection[int]) -> None:
        """Take all steps granted to these requests; each step serves all of them together."""
        with self._lock:
            while self._step(request_ids):
                pass

    def step(self, but: Collection[int] = ()) -> bool:
        """Take one granted step for every request except `but`; return False if none has one."""
        with self._lock:
            return self._step(self.granted.keys() - but)

    def _apply(self, command: DraftCommand) -> None:
        match command:
            case Begin(_, request):
                self.begun[request.request_id], self.granted[request.request_id] = command, ()
                self._unread[request.request_id] = len(request.prompt_ids) + len(command.output_ids)
                self.applied[request.request_id] = len(command.output_ids)
                self._filter.begin(request, command.output_ids)
                self.drafter.begin(request, command.output_ids)
            case Correct(_, request_id, start, token_ids) if request_id in self.begun:
                self.granted[request_id] = ()
                if start <= (applied := self.applied[request_id]):  # else an earlier correction was lost
                    self.applied[request_id] = max(applied, start + len(token_ids))
                self._filter.correct(request_id, start, token_ids)
                self.drafter.correct(request_id, start, token_ids)
            case Grow(_, request_id, widths) if request_id in self.begun:
                self.granted[request_id] += widths
                self.min_chance[request_id], self.max_read[request_id] = command.min_chance, command.max_read
            case End(_, request_id) if request_id in self.begun:
                del self.granted[request_id], self.begun[request_id], self.applied[request_id]
                self._unread.pop(request_id, None)
                self.min_chance.pop(request_id, None)
                self.max_read.pop(request_id, None)
                self._filter.end(request_id)
                self.drafter.end(request_id)

    def _step(self, request_ids: Collection[int]) -> bool:
        budgets = [
            Budget(request_id, widths[0], self.min_chance[request_id], max_read=self.max_read[request_id])
            for request_id, widths in self.granted.items()
            if widths and request_id in request_ids
        ]
        if not budgets:
            return False
        for budget in budgets:
            self.granted[budget.request_id] = self.granted[budget.request_id][1:]
        self._set_threads(self.begun[budgets[0].request_id].schedule)
        for proposal in self._proposals(budgets):
            request_id = proposal.request_id
            if not proposal.token_ids and not proposal.read:
                self.granted[request_id] = ()  # it cannot grow before the next correction
            self._publish(replace(proposal, incarnation=self.begun[request_id].incarnation))
        return True

    def _proposals(self, budgets: list[Budget]) -> list[Proposal]:
        size = 0
        for budget in budgets:
            unread = self._unread.get(budget.request_id, 0)
            size += budget.width + (unread if budget.max_read is None else min(unread, budget.max_read))
        try:
            with self._watch.step(size):
                proposals = self._usable(budgets, self.drafter.step(budgets))
            proposals = [*map(self._filter.filtered, proposals)]
            self._unread |= {proposal.request_id: proposal.unread for proposal in proposals}
            return proposals
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            for budget in budgets:
                self.granted[budget.request_id] = ()
            self._report_out_of_memory(tuple(budget.request_id for budget in budgets))
            return []

    def _usable(self, budgets: Sequence[Budget], proposals: Sequence[Proposal]) -> list[Proposal]:
        """Return the usable proposals, and an empty one for each request without: the coordinator waits for it."""
        usable = [p for p in proposals if type(p) is Proposal and is_valid(p) and self._is_expected(p)]
        answered = {(p.request_id, p.applied_len) for p in usable}
        wanted = [(budget.request_id, self.applied[budget.request_id]) for budget in budgets]
        empty = [_empty_proposal(self.drafter.name, *key) for key in wanted if key not in answered]
        if (empty or len(usable) < len(proposals)) and not self._warned:
            self._warned = True
            log.warning(
                "drafter %r returned unusable proposals, or too few: a step must return one Proposal for each request, "
                "made of tuples of Python's own numbers, for the answer so far (docs/plugins.md has the rules, the "
                "conformance suite finds the fault); this is logged once",
                self.drafter.name,
            )
        return [*usable, *empty]

    def _is_expected(self, proposal: Proposal) -> bool:
        return proposal.source == self.drafter.name and proposal.request_id in self.begun

    def health(self) -> Health:
        """Return the worker's health; may be called from any thread."""
        return self._watch.health()

    def close(self) -> None:
        """Free the drafter."""
        with self._lock:
            self.begun.clear()
            self.granted.clear()
            try:
                self.drafter.close()
            except Exception:
                log.exception("a drafter could not be closed")


def _empty_proposal(source: str, request_id: int, applied_len: int) -> Proposal:
    """Make a proposal that ends the coordinator's wait; its epoch keeps it from being used for anything else."""
    return Proposal(source, request_id, NO_EPOCH, 0, applied_len, first=1, parents=(), token_ids=(), scores=())
