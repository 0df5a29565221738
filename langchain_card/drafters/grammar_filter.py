"""`GrammarFilter`: takes candidates that a grammar forbids out of proposals, whatever drafter made them.

A forbidden node keeps its number, so that the numbering of the drafter holds. Its score becomes minus infinity: it
never enters the cache, nor does anything below it (`core.messages.Proposal`).
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from langchain_card.core.messages import Proposal
from langchain_card.core.request import Request
from langchain_card.ports import Constraint

log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Answer:
    """The answer so far of a request with a grammar, and the nodes of a drafter's current epoch.

    Attributes:
        constraint: the grammar after the answer; None if the answer has left it.
        eos_ids: tokens that end the answer.
        length: tokens of the answer.
        epoch: of the nodes.
        nodes: parent and token of each; None where they are not known.
    """

    constraint: Constraint | None
    eos_ids: Sequence[int]
    length: int = 0
    epoch: int = -1
    nodes: list[tuple[int, int] | None] = field(default_factory=list)

    def append(self, token_ids: Sequence[int]) -> None:
        self.length += len(token_ids)
        for token in token_ids:
            if self.constraint is not None and token not in self.eos_ids and not self.constraint.accept(token):
                self.constraint = None
                log.warning("an answer has left its grammar as the draft reads it: the draft goes on without it")

    def number(self, proposal: Proposal, *, whole: bool) -> bool:
        """Register the nodes of a proposal; return False if it neither is whole nor continues the numbering."""
        if whole:
            self.epoch = proposal.epoch - 1
        if proposal.epoch < self.epoch or (proposal.epoch == self.epoch and proposal.first < len(self.nodes)):
            return False
        if proposal.epoch > self.epoch:
            self.epoch, self.nodes = proposal.epoch, []
        self.nodes += [None] * (proposal.first - len(self.nodes))
        self.nodes += zip(proposal.parents, proposal.token_ids, strict=True)
        return True

    def path(self, node: int, root: int) -> list[int] | None:
        """Return the tokens from below the root down to a node; None if the node is not below the root."""
        tokens = list[int]()
        while node != root:
            if (entry := self.nodes[node]) is None:
                return None
            node, token = entry
            tokens.append(token)
        return tokens[::-1]


class GrammarFilter:
    """Follows the grammars of the requests of one drafter.

    Args:
        constrain: opens a grammar at the start of an answer; None leaves every candidate in.
    """

    def __init__(self, constrain: Callable[[str], Constraint] | None) -> None:
        self._constrain = constrain
        self._answers: dict[int, _Answer] = {}

    def begin(self, request: Request, output_ids: Sequence[int]) -> None:
        """Open a request, if it has a grammar."""
        self.end(request.request_id)
        if request.params.grammar and self._constrain is not None:
            constraint = self._constrain(request.params.grammar)
            answer = self._answers[request.request_id] = _Answer(constraint, request.eos_ids)
            answer.append(output_ids)

    def correct(self, request_id: int, start: int, token_ids: Sequence[int]) -> None:
        """Apply the answer's tokens from `start` on."""
        answer = self._answers.get(request_id)
        if answer is not None and answer.length >= start:  # else an earlier correction was lost: the next repeats it
            answer.append(token_ids[answer.length - start :])

    def end(self, request_id: int) -> None:
        """Free a request."""
        self._answers.pop(request_id, None)

    def filtered(self, proposal: Proposal, ahead: Sequence[int] | None = None) -> Proposal:
        """Return a valid proposal without the nodes that the grammar forbids.

        If none is left, the drafter can add nothing before the next correction, and the nodes are left out.

        Args:
            proposal: the next one of the drafter. One for another length of the answer, or that breaks the numbering,
                loses all nodes.
            ahead: tokens between the answer and the root of a whole proposal (`Budget`); None for one that continues
                the numbering.
        """
        answer = self._answers.get(proposal.request_id)
        constraint = None if answer is None else answer.constraint
        if answer is None or constraint is None or not proposal.token_ids:
            return proposal
        follows = answer.number(proposal, whole=ahead is not None) and proposal.applied_len == answer.length
        assumed = [*(ahead or ())]
        scores, last = list(proposal.scores), proposal.first + len(proposal.scores)
        for i, node in enumerate(range(proposal.first, last)):
            path = answer.path(node, proposal.root) if follows else None
            if path is None or constraint.fitting([*assumed, *path]) < len(assumed) + len(path):
                scores[i] = -math.inf
        if max(scores) > -math.inf:
            return replace(proposal, scores=tuple(scores))
        expanded = tuple(node for node in proposal.expanded if node < proposal.first)
        return replace(proposal, parents=(), token_ids=(), scores=(), expanded=expanded)
