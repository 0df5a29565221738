"""`DraftTree`: a drafter's own tree of candidates for one request, likeliest node first. No model in it.

Nothing is pruned: every published node stays open until it is expanded, so a branch that was passed over can be grown
at any time. A correction that lies in the tree re-roots it, and every surviving node keeps its KV slot; one that does
not drops the tree and starts a new epoch at the last committed token.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from langchain_card.core.messages import Proposal

NUM_CHILDREN = 16
"""Children published of each expanded node, at most. Whatever is not among them is a miss."""

MIN_CHANCE = 0.001
"""Children below it are not published."""

MAX_NODES = 1024
"""Nodes of one epoch; beyond it the living ones are numbered anew."""


class Applied(NamedTuple):
    """What a correction changed.

    Attributes:
        token_ids: tokens that are new.
        slots: KV slots of those that had been forwarded, in order.
        ranks: for each expanded node that was committed, the rank of the child that came true; None when none did.
    """

    token_ids: Sequence[int] = ()
    slots: Sequence[int] = ()
    ranks: Sequence[int | None] = ()


class DraftTree:
    """One request as a drafter sees it.

    Args:
        prompt_ids: at least one token.
        output_ids: tokens of the answer so far.
        num_slots: unverified nodes that may hold KV at once.

    Attributes:
        output_ids: answer tokens applied.
        epoch: see `core.messages.Proposal`.
        tokens, parents, scores, slots: [nodes]; scores are cumulative from node 0, slots None until forwarded.
        children: [nodes] child by token.
        root: node of the last applied token.
        open: nodes that are not expanded yet.
        published: nodes of this epoch that were published, or stand for the last token applied.
        free_slots: KV slots without a node.
    """

    def __init__(self, prompt_ids: Sequence[int], output_ids: Sequence[int], num_slots: int) -> None:
        self.prompt_ids = tuple(prompt_ids)
        self.output_ids = list(output_ids)
        self.num_slots = num_slots
        self.epoch, self.published = -1, 0
        self._start_epoch()

    def copy(self) -> DraftTree:
        """An independent copy."""
        copied = DraftTree.__new__(DraftTree)
        copied.prompt_ids, copied.num_slots = self.prompt_ids, self.num_slots
        copied.epoch, copied.root, copied.published = self.epoch, self.root, self.published
        copied.children = [children.copy() for children in self.children]
        for name in ("output_ids", "tokens", "parents", "scores", "slots", "open", "free_slots"):
            setattr(copied, name, getattr(self, name).copy())
        return copied

    def apply(self, start: int, token_ids: Sequence[int]) -> Applied:
        """The answer's tokens from `start` on are `token_ids`: a hit re-roots the tree, a miss drops it."""
        known = len(self.output_ids)
        if not start <= known < start + len(token_ids):
            return Applied()  # nothing new, or an earlier correction was lost: the next one repeats it
        new, slots, ranks = token_ids[known - start :], list[int](), list[int | None]()
        node: int | None = self.root
        for token in new:
            if node is not None and (children := self.children[node]):
                ranks.append(list(children).index(token) if token in children else None)
            node = self.children[node].get(token) if node is not None else None
            if node is not None and (slot := self.slots[node]) is not None:
                slots.append(slot)
        self.output_ids += new
        if node is None:
            self._start_epoch()
        else:
            self._re_root(node)
        return Applied(new, slots, ranks)

    def choose(self, width: int, min_chance: float = 0.0) -> list[int]:
        """The likeliest open nodes, at most `width`, that are reached with `min_chance`; the root while it is open."""
        if self.root in self.open:
            return [self.root]
        least = self.scores[self.root] + math.log(min_chance) if min_chance else -math.inf
        likely = [(-self.scores[node], node) for node in self.open if self.scores[node] >= least]
        return [node for _, node in heapq.nsmallest(min(width, len(self.free_slots)), likely)]

    def path(self, node: int) -> list[int]:
        """Nodes from the first one below the root down to `node`."""
        nodes: list[int] = []
        while node != self.root:
            nodes.append(node)
            node = self.parents[node]
        return nodes[::-1]

    def place(self, node: int) -> tuple[int, ...]:
        """Gives a node a slot; the slots on its path."""
        self.slots[node] = self.free_slots.pop()
        slots = tuple(slot for above in self.path(node) if (slot := self.slots[above]) is not None)
        assert len(slots) == len(self.path(node)), "a node was forwarded before its parent"
        return slots

    def expand(self, parent: int, token_ids: Sequence[int], scores: Sequence[float]) -> None:
        """Appends children; `scores` are conditional on `parent`."""
        self.open.discard(parent)
        for token, score in zip(token_ids, scores):  # noqa: B905
            self.children[parent][token] = len(self.tokens)
            self.open.add(len(self.tokens))
            self.tokens.append(token)
            self.parents.append(parent)
            self.scores.append(self.scores[parent] + score)
            self.slots.append(None)
            self.children.append({})

    def publish(
        self,
        source: str,
        request_id: int,
        *,
        forwarded: int = 0,
        together: int | None = None,
        elapsed: float = 0.0,
        reading: float = 0.0,
    ) -> Proposal:
        """All nodes of this epoch that were not published yet; see `core.messages.Proposal`."""
        first = self.published
        self.published = len(self.tokens)
        new = range(first, len(self.tokens))
        return Proposal(
            source=source,
            request_id=request_id,
            epoch=self.epoch,
            root=self.root,
            applied_len=len(self.output_ids),
            first=first,
            parents=tuple(self.parents[first:]),
            token_ids=tuple(self.tokens[first:]),
            scores=tuple(self.scores[node] - self.scores[self.parents[node]] for node in new),
            expanded=tuple(dict.fromkeys(self.parents[first:])),
            forwarded=forwarded,
            together=forwarded if together is None else together,
            elapsed=elapsed,
            reading=reading,
        )

    def _start_epoch(self) -> None:
        self.epoch += 1
        self.published = 1
        self.tokens: list[int] = [self.output_ids[-1] if self.output_ids else self.prompt_ids[-1]]
        self.parents: list[int] = [-1]
        self.scores: list[float] = [0.0]
        self.root: int = 0
        self.slots: list[int | None] = [None]
        self.children: list[dict[int, int]] = [{}]
        self.open: set[int] = {0}
        self.free_slots = list(range(self.num_slots))

    def _re_root(self, root: int) -> None:
        self.root = root
        alive = {root: 0}
        for node in range(root + 1, len(self.tokens)):
            if self.parents[node] in alive:
                alive[node] = len(alive)
        used = {self.slots[node] for node in alive if node != root}
        self.free_slots = [slot for slot in range(self.num_slots) if slot not in used]
        self.open &= alive.keys()
        if len(self.tokens) > MAX_NODES:
            self._renumber(alive)

    def _renumber(self, new: Mapping[int, int]) -> None:
        """Starts an epoch with the nodes that are alive, by their old numbers; the next proposal repeats them."""
        self.epoch += 1
        self.published = 1
        self.parents = [new.get(self.parents[node], -1) for node in new]
        self.tokens = [self.tokens[node] for node in new]
        self.scores = [self.scores[node] for node in new]
        self.slots = [self.slots[node] for node in new]
        self.children = [{token: new[child] for token, child in self.children[node].items()} for node in new]
        self.open = {new[node] for node in self.open}
        self.root = 0
