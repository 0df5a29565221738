"""What the core knows of one drafter's view of one request, and how a proposal enters the cache.

Each drafter numbers its own nodes. Three fences keep a late, lost, repeated or malformed proposal from putting a
candidate under a prefix that it was not drafted from: the incarnation (an earlier life of the drafter or of the
request), the epoch (an earlier tree of the drafter) and the numbering (what was lost or seen already).
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeAlias

from langchain_card.core.candidates import DEAD, CandidateTree
from langchain_card.core.messages import Proposal

MAX_NUMBER = 65_536
"""Nodes that a drafter may number in one epoch."""

MAX_SECONDS = 3600.0
"""The longest time of one draft step that is believed."""


Judge: TypeAlias = Callable[[float], tuple[float, float]]


@dataclass(slots=True)
class SourceState:
    """One drafter, one request.

    Attributes:
        incarnation: of the `Begin` in force; proposals of any other are stale.
        epoch: of the drafter's numbering; older proposals are dropped.
        nodes: tree node of each of the drafter's own nodes; `candidates.DEAD` where its branch is gone.
        known: tree nodes that this drafter has published.
        expanded: tree nodes whose children it has published.
        deepest: of the tree nodes that this drafter has published; another one when it is dead.
        applied_len: output tokens that the drafter is known to have applied.
        credits: steps granted and not yet answered.
        exhausted: its last step added nothing; it is not asked again before the next correction.
    """

    incarnation: int = 0
    epoch: int = -1
    nodes: list[int] = field(default_factory=list)
    known: set[int] = field(default_factory=set)
    expanded: set[int] = field(default_factory=set)
    deepest: int = 0
    applied_len: int = 0
    credits: int = 0
    exhausted: bool = False

    def copy(self) -> SourceState:
        """An independent copy."""
        return replace(self, nodes=self.nodes.copy(), known=self.known.copy(), expanded=self.expanded.copy())

    def admit(self, proposal: Proposal, tree: CandidateTree, vocab_size: int) -> bool:
        """Takes note of the numbers of a proposal's nodes, all of them `DEAD` until `enter`.

        Args:
            proposal: of this drafter.
            tree: of the request.
            vocab_size: token ids at and above it are refused.

        Returns:
            Whether it is neither stale nor senseless; else nothing was done.
        """
        if not self._admits(proposal, tree, vocab_size):
            return False
        if proposal.epoch > self.epoch:
            self.epoch, self.nodes = proposal.epoch, []
        self.nodes += [DEAD] * (proposal.first - len(self.nodes))  # lost
        self.nodes[proposal.root] = tree.path[proposal.applied_len]
        self.nodes += [DEAD] * len(proposal.token_ids)
        self.applied_len = max(self.applied_len, proposal.applied_len)
        return True

    def enter(
        self,
        proposal: Proposal,
        tree: CandidateTree,
        max_nodes: int,
        judge: Judge | None = None,
        *,
        knows: bool = False,
    ) -> int:
        """Enters the nodes of a proposal that was admitted in this epoch into the cache.

        Args:
            proposal: of this drafter.
            tree: of the request.
            max_nodes: candidates that the tree may hold.
            judge: the log chances to reckon with, by the one that is stated; see `CandidateTree.insert`.
            knows: see there, too.

        Returns:
            How many were dropped because their branch is dead or the tree full.
        """
        nodes, number = self.nodes, proposal.first
        bound = len(tree.path) + (max_nodes if knows else max_nodes // 2)  # there is always room for who knows
        for parent, token, stated in zip(proposal.parents, proposal.token_ids, proposal.scores):  # noqa: B905
            if len(tree) < bound:
                judged = None if judge is None else judge(stated)
                nodes[number] = tree.insert(nodes[parent], token, stated, proposal.source, judged=judged, knows=knows)
            number += 1
        expanded = [nodes[number] for number in proposal.expanded if nodes[number] != DEAD]
        self.expanded.update(expanded)
        if knows:
            tree.look(expanded)
        entered = [node for node in nodes[proposal.first : number] if node != DEAD]
        self.deepest = max((self._deepest(tree), *entered), key=tree.depth)
        self.known.update(entered)
        return number - proposal.first - len(entered)

    def lead(self, tree: CandidateTree) -> int:
        """Depth of this drafter's deepest candidate below the root."""
        self.deepest = self._deepest(tree)
        return tree.depth(self.deepest)

    def _deepest(self, tree: CandidateTree) -> int:
        if tree.is_alive(self.deepest):
            return self.deepest
        return max(self.known.intersection(tree.living()), key=tree.depth, default=tree.root)

    def _admits(self, proposal: Proposal, tree: CandidateTree, vocab_size: int) -> bool:
        if not makes_sense(proposal) or proposal.incarnation != self.incarnation or proposal.epoch < self.epoch:
            return False
        if proposal.epoch == self.epoch and proposal.first < len(self.nodes):
            return False  # repeated
        return proposal.applied_len < len(tree.path) and _within(proposal.token_ids, vocab_size)

    def renumber(self, new: Mapping[int, int]) -> None:
        """Follows a sweep of the tree; what was swept out is dead."""
        self.nodes = [new.get(node, DEAD) for node in self.nodes]
        self.known = {new[node] for node in self.known if node in new}
        self.expanded = {new[node] for node in self.expanded if node in new}
        self.deepest = new.get(self.deepest, 0)


def _within(numbers: Sequence[int], bound: int) -> bool:
    """Whether all of them lie in [0, bound)."""
    return not numbers or (min(numbers) >= 0 and max(numbers) < bound)


def makes_sense(proposal: Proposal) -> bool:
    """Whether it says what a proposal may say, whatever was said before and whoever is asked."""
    if not well_typed(proposal):
        return False
    count, first = len(proposal.token_ids), proposal.first
    return (
        all(0.0 <= seconds <= MAX_SECONDS for seconds in (proposal.elapsed, proposal.reading))
        and 0 <= proposal.forwarded <= proposal.together <= MAX_NUMBER
        and 1 <= proposal.steps <= MAX_NUMBER
        and 1 <= proposal.layers <= MAX_NUMBER
        and first > 0
        and first + count <= MAX_NUMBER
        and len(proposal.parents) == len(proposal.scores) == count
        and 0 <= proposal.root < first
        and proposal.applied_len >= 0
        and _within(proposal.parents, first + count)
        and all(map(operator.lt, proposal.parents, range(first, first + count)))
        and _within(proposal.expanded, first + count)
        and min(proposal.token_ids, default=0) >= 0
        and not any(map(math.isnan, proposal.scores))
        and max(proposal.scores, default=0.0) <= 0.0
    )


def well_typed(proposal: Proposal) -> bool:
    """Whether numbers of nodes, tokens and steps are integers, chances and times real numbers, and all else as it says.

    Tuples, because who keeps a list may change it after it was looked at.
    """
    p = proposal
    single = (p.request_id, p.epoch, p.root, p.applied_len, p.first, p.forwarded, p.together, p.layers, p.steps)
    many = (p.parents, p.token_ids, p.scores, p.expanded)
    if {*map(type, many)} != {tuple} or type(p.source) is not str:
        return False
    integers = {*map(type, (*single, p.incarnation)), *map(type, p.parents), *map(type, p.token_ids)}
    if integers | {*map(type, p.expanded)} != {int}:
        return False
    numbers = (p.elapsed, p.reading, *p.scores)
    return {*map(type, numbers)} <= {int, float} and not any(type(n) is int and abs(n) > MAX_NUMBER for n in numbers)
