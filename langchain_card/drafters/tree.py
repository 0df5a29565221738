"""`DraftTree`: a drafter's own tree of candidates for one request, likeliest node first, without a model.

Nothing is pruned: a node stays open until it is expanded, so that a branch can be grown at any time. Only children that
the target reaches with some chance become nodes and are published. The others are held back until the root has come
near enough. A correction inside the tree moves the root, and every surviving node keeps its KV slot. A correction
outside drops the tree and starts a new epoch at the last committed token.

Dead nodes are dropped with each correction, in one pass; a step touches only the nodes that it makes.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from heapq import heapify, heappop, heappush
from itertools import repeat
from typing import NamedTuple, TypeAlias

from langchain_card.core.messages import Proposal

NUM_CHILDREN = 16
"""Children that are kept of each expanded node, at most. Any other token is a miss."""

MIN_CHANCE = 0.001
"""Children with a smaller chance are not kept."""

FLOOR = math.log(1e-4)
"""Children are held back while the target reaches them, from the root, with a smaller log chance."""

HELD_BACK = -1
"""Stands in place of a child's node."""

MAX_NODES = 8192
"""Nodes of one epoch; beyond this number the living ones are numbered anew."""


class Applied(NamedTuple):
    """The changes that a correction made.

    Attributes:
        token_ids: the new tokens.
        slots: KV slots of those that had been forwarded, in order.
        ranks: for each expanded node that was committed, the rank of the child that came true, or None.
    """

    token_ids: Sequence[int] = ()
    slots: Sequence[int] = ()
    ranks: Sequence[int | None] = ()


Children: TypeAlias = tuple[Sequence[int], Sequence[float]]
"""Tokens and scores of the children of a node, likeliest first."""

_HeldBack: TypeAlias = tuple[float, int, int, Children]
"""The likeliest child held back: negated `reached`, parent and rank; and all children of the parent."""


class DraftTree:
    """The candidates of one drafter for one request.

    Args:
        prompt_ids: at least one token.
        output_ids: tokens of the answer so far.
        num_slots: nodes that may hold KV at once.

    Attributes:
        output_ids: answer tokens applied.
        epoch: see `core.messages.Proposal`.
        tokens, parents: [nodes].
        scores, reached: [nodes] log chance that the target picks the token after its parent; its sum from the root on.
        root: node of the last applied token.
        children: the children of each living, expanded node, likeliest first: token -> node, or `HELD_BACK`.
        slots: KV slot of each living node that was forwarded.
        published: number of nodes of this epoch that were published, or stand for applied tokens.
        free_slots: KV slots without a node.
    """

    def __init__(self, prompt_ids: Sequence[int], output_ids: Sequence[int], num_slots: int) -> None:
        self.prompt_ids = tuple(prompt_ids)
        self.output_ids = list(output_ids)
        self.num_slots = num_slots
        self.slots: dict[int, int] = {}
        self.free_slots = list(range(num_slots))
        self.epoch, self.root, self.published = -1, 0, 1
        self._start_epoch()

    def copy(self) -> DraftTree:
        """Return an independent copy."""
        copied = DraftTree.__new__(DraftTree)
        copied.prompt_ids, copied.num_slots = self.prompt_ids, self.num_slots
        copied.epoch, copied.root, copied.published = self.epoch, self.root, self.published
        copied.children = {node: children.copy() for node, children in self.children.items()}
        names = ("output_ids", "tokens", "parents", "scores", "reached", "slots", "free_slots")
        for name in (*names, "_open", "_held_back", "_slot_paths", "_token_paths"):
            setattr(copied, name, getattr(self, name).copy())
        return copied

    @property
    def open(self) -> list[int]:
        """Living nodes that are not expanded yet."""
        if self.root not in self.children:
            return [self.root]
        return sorted(node for _, node in self._open if node not in self.children)

    def apply(self, start: int, token_ids: Sequence[int]) -> Applied:
        """Apply the answer's tokens from `start` on: a hit moves the root, a miss drops the tree."""
        known = len(self.output_ids)
        if not start <= known < start + len(token_ids):
            return Applied()  # nothing new, or an earlier correction was lost: the next one repeats it
        new, slots, ranks = token_ids[known - start :], list[int](), list[int | None]()
        node, path = self.root, list[int]()
        for token in new:
            if node not in self.children:
                break
            children = self.children[node]
            ranks.append(list(children).index(token) if token in children else None)
            if (node := children.get(token, HELD_BACK)) == HELD_BACK:
                break
            path.append(node)
            if node in self.slots:
                slots.append(self.slots[node])
        self.output_ids += new
        if len(path) < len(new):
            self._start_epoch()
        else:
            self._re_root(path)
        return Applied(new, slots, ranks)

    def choose(self, width: int, min_chance: float = 0.0) -> list[int]:
        """Take the likeliest open nodes, at most `width`, that are reached with `min_chance`, to be expanded.

        While the root is open, it is taken alone.
        """
        open_, children = self._open, self.children
        if self.root not in children:
            return [self.root]
        most = -self.reached[self.root] - math.log(min_chance) if min_chance else math.inf
        room, chosen = min(width, len(self.free_slots)), list[int]()
        while open_ and len(chosen) < room and open_[0][0] <= most:
            if (node := heappop(open_)[1]) not in children:  # else it was expanded meanwhile
                chosen.append(node)
        return chosen

    def known(self, parent: int, token: int) -> int | None:
        """Return the node of a published child, or None."""
        node = self.children[parent].get(token, HELD_BACK)
        return None if node == HELD_BACK else node

    def follow(self, token_ids: Sequence[int]) -> tuple[int, Sequence[int]]:
        """Follow tokens below the root as far as nodes are expanded; return the last node, and the tokens left over."""
        node = self.root
        for i, token in enumerate(token_ids):
            if node not in self.children:
                return node, token_ids[i:]
            node = self.adopt(node, token)
        return node, ()

    def adopt(self, parent: int, token: int) -> int:
        """Return the node of a child; make it if it is not published."""
        if self.known(parent, token) is None:
            self.children[parent][token] = HELD_BACK
            self._add([(parent, 0, ([token], [math.log(MIN_CHANCE)]))])
        return self.children[parent][token]

    def token_path(self, node: int) -> tuple[int, ...]:
        """Return the tokens from below the root down to a living node."""
        if (path := self._token_paths.get(node)) is None:
            path = self._token_paths[node] = (*self.token_path(self.parents[node]), self.tokens[node])
        return path

    def place(self, node: int) -> tuple[int, ...]:
        """Give a node a KV slot; return the slots on its path, all of whose nodes were forwarded."""
        slot = self.slots[node] = self.free_slots.pop()
        path = self._slot_paths[node] = (*self._slot_path(self.parents[node]), slot)
        return path

    def _slot_path(self, node: int) -> tuple[int, ...]:
        if (path := self._slot_paths.get(node)) is None:
            path = self._slot_paths[node] = (*self._slot_path(self.parents[node]), self.slots[node])
        return path

    def expand(self, node: int, token_ids: Sequence[int], scores: Sequence[float]) -> None:
        """Add the children of a node, likeliest first; `scores` are conditional on the node."""
        self.expand_all([node], [(token_ids, scores)])

    def expand_all(self, nodes: Sequence[int], listed: Sequence[Children]) -> None:
        """Add the children of several nodes."""
        for node, (token_ids, _) in zip(nodes, listed):  # noqa: B905
            self.children[node] = dict.fromkeys(token_ids, HELD_BACK)
        self._add(zip(nodes, repeat(0), listed))

    def publish(
        self,
        source: str,
        request_id: int,
        *,
        forwarded: int = 0,
        together: int | None = None,
        layers: int = 1,
        elapsed: float = 0.0,
        reading: float = 0.0,
    ) -> Proposal:
        """Return a proposal of all nodes of this epoch that were not published yet; see `core.messages.Proposal`."""
        first, self.published = self.published, len(self.tokens)
        parents = tuple(self.parents[first:])
        return Proposal(
            source=source,
            request_id=request_id,
            epoch=self.epoch,
            root=self.root,
            applied_len=len(self.output_ids),
            first=first,
            parents=parents,
            token_ids=tuple(self.tokens[first:]),
            scores=tuple(self.scores[first:]),
            expanded=tuple(dict.fromkeys(parents)),
            forwarded=forwarded,
            together=forwarded if together is None else together,
            layers=layers,
            elapsed=elapsed,
            reading=reading,
        )

    def _add(self, expanded: Iterable[tuple[int, int, Children]]) -> None:
        """Make nodes of the children that are likely enough, and always of the first child.

        Args:
            expanded: expanded nodes; the rank of the first child to look at; and all children.
        """
        tokens, parents, all_scores, all_reached = self.tokens, self.parents, self.scores, self.reached
        least, open_ = all_reached[self.root] + FLOOR, self._open
        for parent, first, listed in expanded:
            (token_ids, scores), children, above = listed, self.children[parent], all_reached[parent]
            for rank in range(first, len(scores)):
                token, score = token_ids[rank], scores[rank]
                reached = above + score
                if reached < least and rank:
                    self._held_back.append((-reached, parent, rank, listed))
                    break
                if children[token] == HELD_BACK:  # else it was adopted meanwhile
                    children[token] = node = len(tokens)
                    tokens.append(token)
                    parents.append(parent)
                    all_scores.append(score)
                    all_reached.append(reached)
                    heappush(open_, (-reached, node))

    def _start_epoch(self) -> None:
        self.epoch += 1
        self.published = 1
        self.tokens: list[int] = [self.output_ids[-1] if self.output_ids else self.prompt_ids[-1]]
        self.parents: list[int] = [-1]
        self.scores: list[float] = [0.0]
        self.reached: list[float] = [0.0]
        self.root = 0
        self.children: dict[int, dict[int, int]] = {}
        self.free_slots += self.slots.values()
        self.slots.clear()
        self._start_paths()
        self._open: list[tuple[float, int]] = []  # a heap of nodes
        self._held_back: list[_HeldBack] = []

    def _start_paths(self) -> None:
        """Forget the paths of all nodes: they begin below the root, which is another one."""
        self._slot_paths: dict[int, tuple[int, ...]] = {self.root: ()}
        self._token_paths: dict[int, tuple[int, ...]] = {self.root: ()}

    def _re_root(self, path: Sequence[int]) -> None:
        """Move the root down `path`; everything beside it is dead."""
        self.root = path[-1]
        self.published = max(self.published, self.root + 1)  # the root may be unpublished: it is committed now
        before, children, slots = self.children, dict[int, dict[int, int]](), self.slots
        expanded = [self.root] if self.root in before else []
        for node in expanded:
            below = children[node] = before[node]
            expanded += filter(before.__contains__, below.values())
        self.children = children
        self.slots = {node: slots.pop(node) for node in children if node != self.root}
        self.free_slots += slots.values()
        self._start_paths()
        parents = self.parents
        self._open = [entry for entry in self._open if parents[entry[1]] in children]
        heapify(self._open)
        held_back, most = [entry for entry in self._held_back if entry[1] in children], -self.reached[self.root] - FLOOR
        self._held_back = [entry for entry in held_back if entry[0] > most]
        self._add(entry[1:] for entry in sorted(entry for entry in held_back if entry[0] <= most))
        if len(self.tokens) > MAX_NODES:
            self._renumber()

    def _renumber(self) -> None:
        """Start an epoch with the living nodes; the next proposal repeats them."""
        below = {child for children in self.children.values() for child in children.values()} - {HELD_BACK}
        alive = [self.root, *sorted(below)]
        new = {node: i for i, node in enumerate(alive)}
        self.epoch += 1
        self.published = 1
        self.parents = [new.get(self.parents[node], -1) for node in alive]
        self.tokens = [self.tokens[node] for node in alive]
        self.scores = [self.scores[node] for node in alive]
        self.reached = [self.reached[node] for node in alive]
        self.slots = {new[node]: slot for node, slot in self.slots.items()}
        self.children = {
            new[node]: {token: new.get(child, HELD_BACK) for token, child in children.items()}
            for node, children in self.children.items()
        }
        self._open = [(score, new[node]) for score, node in self._open]  # the order stays: still a heap
        self._held_back = [(score, new[node], rank, listed) for score, node, rank, listed in self._held_back]
        self.root = 0
        self._start_paths()
