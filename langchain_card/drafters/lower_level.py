"""The level below a drafter: what it is asked, and what is made of what it says."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple, TypeAlias

from langchain_card.core.candidates import CandidateTree
from langchain_card.core.drafter_state import SourceState
from langchain_card.core.messages import Proposal
from langchain_card.core.request import Request
from langchain_card.errors import is_out_of_memory
from langchain_card.ports import Budget, Drafter

log = logging.getLogger(__name__)

MAX_HEARD = 512
"""Candidates of a lower drafter that one question takes in."""

Guess: TypeAlias = tuple[int, int]
"""The row of its parent in a `Block`, and a token."""


Says: TypeAlias = Callable[[int], bool]
"""Whether a level has a token of the target's in its own vocabulary."""


class Question(NamedTuple):
    """What follows?

    Attributes:
        request_id: whose answer.
        applied_len: its length.
        ahead: tokens assumed to follow it.
        room: candidates at most.
    """

    request_id: int
    applied_len: int
    ahead: tuple[int, ...]
    room: int


@dataclass(slots=True)
class Heard:
    """What a lower drafter says to one question, checked as the core checks what drafters say.

    Attributes:
        question: the question.
        elapsed, reading: seconds that it took, as the drafter says.
    """

    question: Question
    elapsed: float = 0.0
    reading: float = 0.0
    _tree: CandidateTree = field(default_factory=lambda: CandidateTree(0))  # its root: the last token ahead
    _source: SourceState = field(default_factory=SourceState)

    def hear(self, proposals: Sequence[Proposal], vocab_size: int) -> bool:
        """Takes in what is for this question; whether to ask on: it brought something, and there is room for more."""
        before = len(self._tree)
        for proposal in proposals:
            if (proposal.request_id, proposal.applied_len) != self.question[:2]:
                continue
            proposal = replace(proposal, applied_len=0)
            if self._source.admit(proposal, self._tree, vocab_size):
                self._source.enter(proposal, self._tree, 2 * MAX_HEARD)
                self.elapsed += proposal.elapsed
                self.reading += proposal.reading
        return before < len(self._tree) and len(self._tree.best_chain(self.question.room)[0]) < self.question.room

    def guesses(self, last: int, first: int, says: Says) -> list[Guess]:
        """The likeliest candidates, parents first, to follow row `last`, in rows from `first` on.

        Those that the drafter above cannot say are left out, with what follows them.
        """
        rows, found = {self._tree.root: last}, list[Guess]()
        for node in self._tree.best_subtree(self.question.room)[0]:
            parent, token = self._tree.parents[node], self._tree.tokens[node]
            if parent in rows and says(token):
                rows[node] = first + len(found)
                found.append((rows[parent], token))
        return found


class Below:
    """The level below a drafter. One that fails is left out from then on: the one above works as it does alone.

    Args:
        drafter: any.
        block: candidates that it is asked for at a time. A paced one takes as many steps at most; another one, one.
        vocab_size: token ids at and above it are refused.
    """

    def __init__(self, drafter: Drafter, block: int, vocab_size: int = 2**31) -> None:
        self.drafter, self.block, self._vocab_size = drafter, block, vocab_size
        self._of_grammars = getattr(drafter, "of_grammars", False)
        self._steps = block if drafter.paced else 1
        self.failed = False

    def begin(self, request: Request, output_ids: Sequence[int]) -> None:
        """As to the drafter above."""
        if request.params.grammar or not self._of_grammars:
            self._call(lambda: self.drafter.begin(request, output_ids))

    def correct(self, request_id: int, start: int, token_ids: Sequence[int]) -> None:
        """As to the drafter above."""
        self._call(lambda: self.drafter.correct(request_id, start, token_ids))

    def end(self, request_id: int) -> None:
        """As to the drafter above."""
        self._call(lambda: self.drafter.end(request_id))

    def close(self) -> None:
        """Frees it; one that failed is freed already."""
        if not self.failed:
            self._free()

    def ask(self, questions: Sequence[Question]) -> list[Heard]:
        """What the drafter says to each of them; it takes its steps for all requests together."""
        heard = [Heard(question) for question in questions]
        self._call(lambda: self._hear([one for one in heard if one.question.room > 0]))
        return heard

    def _hear(self, open_ones: list[Heard]) -> None:
        for _ in range(self._steps):
            if not open_ones:
                break
            asked = [one.question for one in open_ones]
            proposals = self.drafter.step([Budget(q.request_id, ahead=q.ahead, whole=True) for q in asked])
            open_ones = [one for one in open_ones if one.hear(proposals, self._vocab_size)]

    def _call(self, what: Callable[[], None]) -> None:
        """Without memory for it, requests are decoded without the whole stack, which is the worker's to say."""
        if self.failed:
            return
        try:
            what()
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
