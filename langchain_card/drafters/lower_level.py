"""A level below a drafter: a second, cheaper drafter that guesses what the first one will propose."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple, TypeAlias

from langchain_card.core.candidates import CandidateTree
from langchain_card.core.drafter_state import DrafterState, is_valid
from langchain_card.core.messages import Proposal
from langchain_card.core.request import Request
from langchain_card.drafters.grammar_filter import GrammarFilter
from langchain_card.errors import is_out_of_memory
from langchain_card.ports import Budget, Constraint, Drafter

log = logging.getLogger(__name__)

MAX_CANDIDATES = 512
"""Candidates of a lower drafter that are kept for one request for guesses."""

MAX_READ = 256
"""Tokens of a text that a lower drafter reads at a time: the upper one waits for it."""

Guess: TypeAlias = tuple[int, int]
"""The row of the guess's parent in a `DraftStep`, and its token."""

InVocabulary: TypeAlias = Callable[[int], bool]
"""Tells whether a level has a token of the target's in its own vocabulary."""


class GuessRequest(NamedTuple):
    """A request for guesses.

    Attributes:
        request_id: the request.
        applied_len: length of its answer.
        ahead: tokens assumed to follow the answer.
        room: guesses at most.
    """

    request_id: int
    applied_len: int
    ahead: tuple[int, ...]
    room: int


@dataclass(slots=True)
class Guesses:
    """The answer of a lower drafter to one request, checked in the same way as `DraftWorker` checks proposals.

    Attributes:
        wanted: the request.
        elapsed, reading: seconds that it took, as the drafter reports them.
    """

    wanted: GuessRequest
    elapsed: float = 0.0
    reading: float = 0.0
    _tree: CandidateTree = field(default_factory=lambda: CandidateTree(0))  # its root: the last token ahead
    _drafter: DrafterState = field(default_factory=DrafterState)

    def receive(self, proposals: Sequence[Proposal], vocab_size: int, grammars: GrammarFilter) -> bool:
        """Take the proposals for this request; return True if they brought something and there is room for more."""
        before = len(self._tree)
        for proposal in proposals:
            if type(proposal) is not Proposal or (proposal.request_id, proposal.applied_len) != self.wanted[:2]:
                continue
            if not is_valid(proposal):
                continue
            proposal = replace(grammars.filtered(proposal, self.wanted.ahead), applied_len=0)
            if self._drafter.admit(proposal, self._tree, vocab_size):
                self._drafter.enter(proposal, self._tree, 2 * MAX_CANDIDATES)
                self.elapsed += proposal.elapsed
                self.reading += proposal.reading
        return before < len(self._tree) and len(self._tree.best_chain(self.wanted.room)[0]) < self.wanted.room

    def rows(self, last: int, first: int, in_vocabulary: InVocabulary) -> list[Guess]:
        """Return the likeliest guesses after row `last`, parents first, in rows from `first` on.

        Tokens that the upper level does not have are left out, with all that follows them.
        """
        rows, guesses = {self._tree.root: last}, list[Guess]()
        for node in self._tree.best_subtree(self.wanted.room)[0]:
            parent, token = self._tree.parents[node], self._tree.tokens[node]
            if parent in rows and in_vocabulary(token):
                rows[node] = first + len(guesses)
                guesses.append((rows[parent], token))
        return guesses


class LowerLevel:
    """The level below a drafter. If it fails, it is left out from then on, and the upper drafter works alone.

    Args:
        drafter: any drafter that looks ahead.
        block: guesses wanted at a time. A paced drafter takes up to so many steps for them, another one just one.
        vocab_size: token ids at and above it are refused.
        constrain: opens a grammar at the start of an answer; without it, guesses may break the grammar.
    """

    def __init__(
        self,
        drafter: Drafter,
        block: int,
        vocab_size: int = 2**31,
        constrain: Callable[[str], Constraint] | None = None,
    ) -> None:
        self._filter = GrammarFilter(constrain)
        self.drafter, self.block, self._vocab_size = drafter, block, vocab_size
        self._of_grammars = getattr(drafter, "of_grammars", False)
        self._steps = block if drafter.paced else 1
        self.failed = False

    def begin(self, request: Request, output_ids: Sequence[int]) -> None:
        """Open a request, if the drafter works for it."""
        if request.params.grammar or not self._of_grammars:
            self._filter.begin(request, output_ids)
            self._call(lambda: self.drafter.begin(request, output_ids))

    def correct(self, request_id: int, start: int, token_ids: Sequence[int]) -> None:
        """Apply the answer's tokens from `start` on."""
        self._filter.correct(request_id, start, token_ids)
        self._call(lambda: self.drafter.correct(request_id, start, token_ids))

    def end(self, request_id: int) -> None:
        """Free a request."""
        self._filter.end(request_id)
        self._call(lambda: self.drafter.end(request_id))

    def close(self) -> None:
        """Free the drafter, unless it has failed and is freed already."""
        if not self.failed:
            self._free()

    def guess(self, wanted: Sequence[GuessRequest]) -> list[Guesses]:
        """Return the drafter's guesses for each request; it takes its steps for all of them together."""
        guesses = [Guesses(each) for each in wanted]
        self._call(lambda: self._guess([each for each in guesses if each.wanted.room > 0]))
        return guesses

    def _guess(self, unfinished: list[Guesses]) -> None:
        for _ in range(self._steps):
            if not unfinished:
                break
            budgets = [
                Budget(each.wanted.request_id, ahead=each.wanted.ahead, whole=True, max_read=MAX_READ)
                for each in unfinished
            ]
            proposals = self.drafter.step(budgets)
            unfinished = [each for each in unfinished if each.receive(proposals, self._vocab_size, self._filter)]

    def _call(self, action: Callable[[], None]) -> None:
        """Call the drafter, and leave it out after an error; running out of memory is reported by the worker."""
        if self.failed:
            return
        try:
            action()
        except Exception as error:
            if is_out_of_memory(error):
                raise
            self.failed = True
            log.exception("the drafter %r below another one failed, and is left out", self.drafter.name)
            self._free()

    def _free(self) -> None:
        try:
            self.drafter.close()
        except Exception:
            log.exception("the drafter %r below another one could not be closed", self.drafter.name)
