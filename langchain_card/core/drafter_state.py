"""The core's view of one drafter and one request, how a proposal enters the cache, and how far scores are trusted.

Each drafter numbers its own nodes. Three fences keep a late, lost or repeated proposal from putting a candidate under a
prefix that it was not drafted from: the incarnation (an earlier life of the drafter or of the request), the epoch (an
earlier tree of the drafter) and the numbering (nodes that were lost, or seen already). Malformed proposals do not get
here: `is_valid` is checked where they enter this process, from a drafter's own code or from its process.
"""

from __future__ import annotations

import math
import operator
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeAlias

from langchain_card.core.candidates import DEAD, CandidateTree
from langchain_card.core.costs import Mean
from langchain_card.core.messages import Proposal

CHANCES = (0.005, 0.015, 0.05, 0.1, 0.2, 0.35, 0.5, 0.65, 0.8, 0.9, 0.96, 0.99, 1.0)
"""Upper ends of the classes of stated chances; a class is calibrated as one."""

PRIOR_WEIGHT = 20.0
CHANCE_DECAY = 0.995
MIN_CHANCE = 1e-6

_SCORES = tuple(map(math.log, CHANCES[:-1]))

MAX_NUMBER = 65_536
"""Nodes that a drafter may number in one epoch."""

MAX_TEXT = 2**31
"""Tokens of a text below which a proposal may report what was read and is left."""

MAX_SECONDS = 3600.0
"""Longest time of one draft step that a proposal may report."""

Trust: TypeAlias = Callable[[float], tuple[float, float]]
"""The log chances to use in place of a stated one: see `core.policy.Policy.trust`."""


@dataclass(slots=True)
class DrafterState:
    """One drafter's work for one request.

    Attributes:
        incarnation: number of the `Begin` in force; proposals with another number are stale.
        epoch: epoch of the drafter's numbering; proposals of older epochs are dropped.
        nodes: [drafter's nodes] tree node of each; `candidates.DEAD` where its branch is gone.
        published: tree nodes that this drafter has published.
        expanded: tree nodes whose children it has published.
        deepest: the deepest of `published`; looked up anew when it is dead.
        applied_len: output tokens that the drafter is known to have applied.
        sent_len: output tokens that it has been sent.
        granted: steps granted and not yet answered.
        exhausted: whether its last step added nothing; it gets no more steps before the next correction.
        unread: tokens of the text that it has to read before it drafts, as it last reported.
    """

    incarnation: int = 0
    epoch: int = -1
    nodes: list[int] = field(default_factory=list)
    published: set[int] = field(default_factory=set)
    expanded: set[int] = field(default_factory=set)
    deepest: int = 0
    applied_len: int = 0
    sent_len: int = 0
    granted: int = 0
    exhausted: bool = False
    unread: int = 0

    def copy(self) -> DrafterState:
        """Return an independent copy."""
        return replace(self, nodes=self.nodes.copy(), published=self.published.copy(), expanded=self.expanded.copy())

    def admit(self, proposal: Proposal, tree: CandidateTree, vocab_size: int) -> bool:
        """Register the numbers of a proposal's nodes, which stay `DEAD` until `enter`.

        Args:
            proposal: a valid one of this drafter.
            tree: the request's candidates.
            vocab_size: token ids at and above it are refused.

        Returns:
            Whether it passed the fences; if not, nothing has changed.
        """
        if not self._passes_fences(proposal, tree, vocab_size):
            return False
        if proposal.epoch > self.epoch:
            self.epoch, self.nodes = proposal.epoch, []
        self.nodes += [DEAD] * (proposal.first - len(self.nodes))  # lost
        self.nodes[proposal.root] = tree.path[proposal.applied_len]
        self.nodes += [DEAD] * len(proposal.token_ids)
        self.applied_len = max(self.applied_len, proposal.applied_len)
        return True

    def _passes_fences(self, proposal: Proposal, tree: CandidateTree, vocab_size: int) -> bool:
        if proposal.incarnation != self.incarnation or proposal.epoch < self.epoch:
            return False
        if proposal.epoch == self.epoch and proposal.first < len(self.nodes):
            return False  # repeated
        return proposal.applied_len < len(tree.path) and _within(proposal.token_ids, vocab_size)

    def enter(
        self,
        proposal: Proposal,
        tree: CandidateTree,
        max_nodes: int,
        trust: Trust | None = None,
        *,
        from_model: bool = False,
    ) -> int:
        """Enter the nodes of a proposal that was admitted in this epoch into the cache.

        Args:
            proposal: one of this drafter.
            tree: the request's candidates.
            max_nodes: candidates that the tree may hold; a drafter without a model may fill half of it.
            trust: see `CandidateTree.insert`; None takes chances as they are stated.
            from_model: whether the scores are a language model's.

        Returns:
            How many nodes were dropped because their branch is dead, they have no chance, or the tree is full.
        """
        nodes, number, source, insert = self.nodes, proposal.first, proposal.source, tree.insert
        bound = len(tree.path) + (max_nodes if from_model else max_nodes // 2)
        for parent, token, stated in zip(proposal.parents, proposal.token_ids, proposal.scores):  # noqa: B905
            if (above := nodes[parent]) != DEAD and stated > -math.inf and len(tree) < bound:
                logps = (stated, stated) if trust is None else trust(stated)
                nodes[number] = insert(above, token, stated, source, logps, from_model=from_model)
            number += 1
        expanded = [nodes[number] for number in proposal.expanded if nodes[number] != DEAD]
        self.expanded.update(expanded)
        if from_model:
            tree.mark_expanded(expanded)
        entered = [node for node in nodes[proposal.first : number] if node != DEAD]
        self.deepest = tree.deepest([self._deepest(tree), *entered])
        self.published.update(entered)
        return number - proposal.first - len(entered)

    def lead(self, tree: CandidateTree) -> int:
        """Return the depth of this drafter's deepest candidate below the root."""
        self.deepest = self._deepest(tree)
        return tree.depth(self.deepest)

    def _deepest(self, tree: CandidateTree) -> int:
        if tree.is_alive(self.deepest):
            return self.deepest
        return tree.deepest(self.published.intersection(tree.living()))

    def renumber(self, new: Sequence[int]) -> None:
        """Follow a sweep of the tree; nodes that were swept out are dead."""
        self.nodes = [new[node] for node in self.nodes]
        self.published = {new[node] for node in self.published} - {DEAD}
        self.expanded = {new[node] for node in self.expanded} - {DEAD}
        self.deepest = max(0, new[self.deepest])


def _within(numbers: Sequence[int], bound: int) -> bool:
    """Return whether all of them lie in [0, bound)."""
    return not numbers or (min(numbers) >= 0 and max(numbers) < bound)


def is_valid(proposal: Proposal) -> bool:
    """Return whether a proposal is well formed, whatever was proposed before it.

    Called where proposals enter the process: where a drafter's code, which may be a plug-in, returns them, and where
    they arrive from a drafter's process.
    """
    if not _is_well_typed(proposal):
        return False
    count, first = len(proposal.token_ids), proposal.first
    return (
        all(0.0 <= seconds <= MAX_SECONDS for seconds in (proposal.elapsed, proposal.reading))
        and 0 <= proposal.forwarded <= proposal.together <= MAX_NUMBER
        and 1 <= proposal.layers <= MAX_NUMBER
        and _within((proposal.read, proposal.unread), MAX_TEXT)
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


def _is_well_typed(proposal: Proposal) -> bool:
    """Return whether nodes, tokens and counts are integers, chances and times real numbers, and sequences tuples.

    A list is refused: its owner may change it after this check.
    """
    p = proposal
    single = (
        p.request_id, p.epoch, p.root, p.applied_len, p.first, p.forwarded, p.together, p.layers, p.read, p.unread
    )  # fmt: skip
    many = (p.parents, p.token_ids, p.scores, p.expanded)
    if {*map(type, many)} != {tuple} or type(p.source) is not str:
        return False
    integers = {*map(type, (*single, p.incarnation)), *map(type, p.parents), *map(type, p.token_ids)}
    if integers | {*map(type, p.expanded)} != {int}:
        return False
    numbers = (p.elapsed, p.reading, *p.scores)
    if not (types := {*map(type, numbers)}) <= {int, float}:
        return False
    return int not in types or not any(type(n) is int and abs(n) > MAX_NUMBER for n in numbers)


class Calibration:
    """The chances that one drafter states, lowered to the share of them that came true.

    An overconfident drafter would fill the window and crowd out better ones. A modest drafter keeps its own chances,
    which are good enough to choose by (docs/LOG.md, 2026-11-23).

    Args:
        prior: share of a stated chance that is trusted before anything was learned.
    """

    def __init__(self, prior: float = 1.0) -> None:
        self._stated = [Mean(chance, PRIOR_WEIGHT, CHANCE_DECAY) for chance in CHANCES]
        self._true = [Mean(prior * chance, PRIOR_WEIGHT, CHANCE_DECAY) for chance in CHANCES]
        self._lower = [math.log(prior)] * len(CHANCES)

    def score(self, stated: float) -> float:
        """Return the log chance to use in place of the stated one."""
        return stated + self._lower[bisect_left(_SCORES, stated)]

    def learn(self, stated: float, *, taken: bool) -> None:
        """Learn whether a candidate was `taken`, when the token after its parent was committed."""
        about = bisect_left(_SCORES, stated)
        believed, true = self._stated[about], self._true[about]
        believed.add(math.exp(stated))
        true.add(taken)
        self._lower[about] = min(0.0, math.log(max(true.value, MIN_CHANCE) / max(believed.value, MIN_CHANCE)))
