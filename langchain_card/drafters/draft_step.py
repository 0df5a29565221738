"""Drafters in levels: each one queries the one below it, and corrects it with its next question.

A drafter with another one below does not expand one node a step. It asks what follows the node that it would expand,
and forwards that node and the candidates in one pass. Those that are among its own children become expanded nodes of
its tree, one below the other; the others are dropped. The lower drafter hears what was taken with the next question,
as `Budget.ahead`, and what was committed as ever. So nothing is rolled back, and any `Drafter` may be below.

(Hierarchical speculative decoding, arXiv 2510.19705, with trees in the place of blocks.)
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from langchain_card.core.messages import Proposal
from langchain_card.drafters.lower_level import Below, Guess, Heard, Question, Says
from langchain_card.drafters.tree import HELD_BACK, MAX_NODES, DraftTree
from langchain_card.ports import Budget

MAX_SAID = 64
"""Candidates that an answer to one holds."""

Read: TypeAlias = Callable[[Sequence[int]], Sequence[int]]
"""Tokens of the target's as a level reads them."""


@dataclass(slots=True)
class Block:
    """What one step forwards for one request: open nodes of its tree, and guesses below the first of them.

    Rows are the nodes, then the guesses.

    Attributes:
        tree: of the request.
        budget: of the step.
        heads: nodes to be expanded; the root alone while it is open; none where nothing can be.
        guesses: what may follow the first of them; a parent comes before its children.
        num_assumed: guesses that the budget says are `ahead`: they hold, whatever the model says.
        text: committed tokens, as the model reads them, that have no KV yet; they come first when the root is open.
        text_slots: of them, where they are read as rows.
        expanded: nodes that became expanded.
        layers: of them that hang below each other, at most.
        lost: whether the level cannot say what is assumed: it has nothing to tell.
    """

    tree: DraftTree
    budget: Budget
    heads: list[int] = field(default_factory=list)
    guesses: list[Guess] = field(default_factory=list)
    num_assumed: int = 0
    text: Sequence[int] = ()
    text_slots: list[int] = field(default_factory=list)
    expanded: int = 0
    layers: int = 1
    lost: bool = False
    _slots: list[int] = field(default_factory=list)

    @classmethod
    def plan(cls, tree: DraftTree, budget: Budget, text: Sequence[int], says: Says) -> Block:
        """What a step expands: where it is assumed that the answer goes on, or else the likeliest open nodes."""
        if not all(map(says, budget.ahead)):
            return cls(tree, budget, lost=True)
        node, assumed = tree.follow(budget.ahead)
        if node not in tree.children:
            heads = [node]
        elif node != tree.root:
            leaves = (each for each in likeliest(tree, node) if each not in tree.children)
            heads = [*itertools.islice(leaves, budget.width)]
        else:
            heads = tree.choose(budget.width, budget.min_chance)
        block = cls(tree, budget, heads, [*enumerate(assumed)], len(assumed), text)
        fits = block.room >= 0 or (heads == [tree.root] and not assumed)
        return block if fits else cls(tree, budget)

    @property
    def room(self) -> int:
        """Guesses that may be added."""
        own = len(self.text) if self.heads == [self.tree.root] else len(self.heads)
        return len(self.tree.free_slots) - own - len(self.guesses)

    @property
    def ways(self) -> list[tuple[int, ...]]:
        """[rows] tokens from below the root down to each."""
        ways = [tuple(self.tree.tokens[node] for node in self.tree.path(head)) for head in self.heads]
        for parent, token in self.guesses:
            ways.append((*ways[parent], token))
        return ways

    def question(self, block: int) -> Question:
        """What follows the first node, and the guesses that hold?"""
        ahead, room = (self.ways[self.num_assumed], min(block, self.room)) if self.heads else ((), 0)
        return Question(self.budget.request_id, len(self.tree.output_ids), ahead, room)

    def guess(self, heard: Heard, says: Says) -> None:
        """Adds what the level below says, so far as this one can say it."""
        self.guesses += heard.guesses(self.num_assumed, len(self.heads) + len(self.guesses), says)

    def place(self, read: Read) -> tuple[Sequence[int], list[tuple[int, ...]] | None]:
        """Gives every row a slot.

        Args:
            read: tokens as the level's model reads them.

        Returns:
            Such tokens, and for each the slots on its path; None for the text alone, which goes to its positions.
        """
        tree, offset = self.tree, 0
        tokens = [*read([tree.tokens[head] for head in self.heads])]
        if self.heads != [tree.root]:
            paths = [tree.place(head) for head in self.heads]
        elif not self.guesses:
            return self.text, None
        else:
            tokens, offset = [*self.text], len(self.text) - 1
            self.text_slots = [tree.free_slots.pop() for _ in self.text]
            paths = [tuple(self.text_slots[: i + 1]) for i in range(len(self.text))]
        for parent, token in self.guesses:
            self._slots.append(tree.free_slots.pop())
            tokens += read([token])
            paths.append((*paths[offset + parent], self._slots[-1]))
        return tokens, paths

    def settle(self, found: Sequence[tuple[Sequence[int], Sequence[float]]]) -> None:
        """Expands the nodes, and those guesses that are children of expanded nodes.

        Args:
            found: [rows] the children of each: tokens, likeliest first, and log chances.
        """
        tree, nodes = self.tree, list[int | None](self.heads)
        tree.free_slots += self.text_slots
        for head, children in zip(self.heads, found):  # noqa: B905
            tree.expand(head, *children)
        for i, ((parent, token), children) in enumerate(zip(self.guesses, found[len(self.heads) :], strict=True)):
            above, node = nodes[parent], None
            if above is not None:
                node = tree.adopt(above, token) if i < self.num_assumed else tree.known(above, token)
            nodes.append(node)
            if node is None:
                tree.free_slots.append(self._slots[i])
            else:
                tree.slots[node] = self._slots[i]
                tree.expand(node, *children)
        self.expanded = sum(node is not None for node in nodes)
        depths = [1] * len(self.heads)
        for (parent, _), node in zip(self.guesses, nodes[len(self.heads) :], strict=True):
            depths.append(depths[parent] + 1 if node is not None else 0)
        self.layers = max(depths, default=1)

    def publish(self, source: str, together: int, elapsed: float, reading: float = 0.0) -> Proposal:
        """What the step brought; `elapsed` is that of all requests, which expanded `together` nodes."""
        tree, share = self.tree, elapsed * self.expanded / max(1, together)
        if not self.budget.whole:
            return tree.publish(
                source,
                self.budget.request_id,
                forwarded=self.expanded,
                together=together,
                layers=self.layers,
                elapsed=share,
                reading=reading,
            )
        node, unknown = tree.follow(() if self.lost else self.budget.ahead)
        nodes = [] if self.lost or unknown else [*itertools.islice(likeliest(tree, node), MAX_SAID)]
        number = {node: 0} | {each: i for i, each in enumerate(nodes, 1)}
        return Proposal(
            source=source,
            request_id=self.budget.request_id,
            epoch=2 * MAX_NODES * tree.epoch + len(tree.tokens),  # grows with the tree
            root=0,
            applied_len=len(tree.output_ids),
            first=1,
            parents=tuple(number[tree.parents[each]] for each in nodes),
            token_ids=tuple(tree.tokens[each] for each in nodes),
            scores=tuple(tree.scores[each] for each in nodes),
            forwarded=self.expanded,
            together=together,
            layers=self.layers,
            elapsed=share,
            reading=reading,
        )


def likeliest(tree: DraftTree, node: int) -> Iterator[int]:
    """Nodes below one, likeliest first."""
    heap = [(0.0, node)]
    while heap:
        _, parent = heapq.heappop(heap)
        if parent != node:
            yield parent
        for child in tree.children.get(parent, {}).values():
            if child != HELD_BACK:
                heapq.heappush(heap, (-tree.reached[child], child))


def query(blocks: Sequence[Block], below: Below | None, says: Says) -> tuple[float, float]:
    """Has the level below guess for all blocks; seconds that it took, and that it read, as it says."""
    if below is None:
        return 0.0, 0.0
    heard = below.ask([block.question(below.block) for block in blocks])
    for block, one in zip(blocks, heard, strict=True):
        block.guess(one, says)
    return sum(one.elapsed for one in heard), sum(one.reading for one in heard)
