"""What the core knows of one drafter's view of one request, and how a proposal enters the cache.

Each drafter numbers its own nodes. Three fences keep a late, lost, repeated or malformed proposal from putting a
candidate under a prefix that it was not drafted from: the incarnation (an earlier life of the drafter or of the
request), the epoch (an earlier tree of the drafter) and the numbering (what was lost or seen already).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from langchain_card.core.candidates import DEAD, CandidateTree
from langchain_card.core.messages import Proposal

MAX_NUMBER = 65_536
"""Nodes that a drafter may number in one epoch."""

MAX_SECONDS = 3600.0
"""The longest time of one draft step that is believed."""


@dataclass(slots=True)
class SourceState:
    """One drafter, one request.

    Attributes:
        incarnation: of the `Begin` in force; proposals of any other are stale.
        epoch: of the drafter's numbering; older proposals are dropped.
        nodes: tree node of each of the drafter's own nodes; `candidates.DEAD` where its branch is gone.
        expanded: tree nodes whose children this drafter has published.
        applied_len: output tokens that the drafter is known to have applied.
        credits: steps granted and not yet answered.
        exhausted: its last step added nothing; it is not asked again before the next correction.
    """

    incarnation: int = 0
    epoch: int = -1
    nodes: list[int] = field(default_factory=list)
    expanded: set[int] = field(default_factory=set)
    applied_len: int = 0
    credits: int = 0
    exhausted: bool = False

    def copy(self) -> SourceState:
        """An independent copy."""
        return replace(self, nodes=self.nodes.copy(), expanded=self.expanded.copy())

    def merge(self, proposal: Proposal, tree: CandidateTree, max_nodes: int, vocab_size: int) -> int | None:
        """Enters a proposal's nodes into the cache.

        Args:
            proposal: of this drafter.
            tree: of the request.
            max_nodes: candidates that the tree may hold.
            vocab_size: token ids at and above it are refused.

        Returns:
            How many of its nodes were dropped because their branch is dead or the tree full; None when all of it is
            stale or makes no sense, and nothing was done.
        """
        if not self._admits(proposal, tree, vocab_size):
            return None
        if proposal.epoch > self.epoch:
            self.epoch, self.nodes = proposal.epoch, []
        self.nodes += [DEAD] * (proposal.first - len(self.nodes))  # lost
        self.nodes[proposal.root] = tree.path[proposal.applied_len]
        self.applied_len = max(self.applied_len, proposal.applied_len)
        dropped = 0
        for parent, token, score in zip(proposal.parents, proposal.token_ids, proposal.scores):  # noqa: B905
            full = len(tree) - len(tree.path) >= max_nodes
            node = DEAD if full else tree.insert(self.nodes[parent], token, score, proposal.source)
            self.nodes.append(node)
            dropped += node == DEAD
        self.expanded.update(self.nodes[number] for number in proposal.expanded if self.nodes[number] != DEAD)
        return dropped

    def _admits(self, proposal: Proposal, tree: CandidateTree, vocab_size: int) -> bool:
        count, first = len(proposal.token_ids), proposal.first
        if not _well_typed(proposal) or proposal.incarnation != self.incarnation or proposal.epoch < self.epoch:
            return False
        if proposal.epoch == self.epoch and first < len(self.nodes):
            return False  # repeated
        return (
            all(0.0 <= seconds <= MAX_SECONDS for seconds in (proposal.elapsed, proposal.reading))
            and 0 <= proposal.forwarded <= proposal.together <= MAX_NUMBER
            and 1 <= proposal.steps <= MAX_NUMBER
            and first > 0
            and first + count <= MAX_NUMBER
            and len(proposal.parents) == len(proposal.scores) == count
            and 0 <= proposal.root < first
            and 0 <= proposal.applied_len < len(tree.path)
            and all(0 <= parent < first + i for i, parent in enumerate(proposal.parents))
            and all(0 <= number < first + count for number in proposal.expanded)
            and all(0 <= token < vocab_size for token in proposal.token_ids)
            and all(score <= 0.0 for score in proposal.scores)
        )

    def renumber(self, new: Mapping[int, int]) -> None:
        """Follows a sweep of the tree; what was swept out is dead."""
        self.nodes = [new.get(node, DEAD) for node in self.nodes]
        self.expanded = {new[node] for node in self.expanded if node in new}


def _well_typed(proposal: Proposal) -> bool:
    """Whether all numbers of nodes, tokens and steps are integers, and chances and times are real numbers."""
    p = proposal
    single = (p.epoch, p.root, p.applied_len, p.first, p.forwarded, p.together, p.steps, p.incarnation)
    integers = {*map(type, single), *map(type, p.parents), *map(type, p.token_ids), *map(type, p.expanded)}
    return integers == {int} and {type(p.elapsed), type(p.reading), *map(type, p.scores)} <= {int, float}
