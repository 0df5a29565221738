"""`DraftStep`: the rows that one step of a drafter with a model forwards, and what becomes of them.

A drafter alone forwards the nodes that it expands. With a lower level below it, it first gets guesses of what follows
the first of these nodes, and forwards node and guesses in one pass. Guesses that are among its own children become
expanded nodes of its tree, one below the other; the others are dropped. The next request for guesses tells the lower
drafter which ones were taken (`Budget.ahead`), and corrections tell it what was committed. So nothing is rolled back,
and any `Drafter` that looks ahead may be the lower one.

(Hierarchical speculative decoding, arXiv 2510.19705, with trees in the place of blocks.)
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from langchain_card.core.messages import Proposal
from langchain_card.drafters.lower_level import Guess, Guesses, GuessRequest, InVocabulary, LowerLevel
from langchain_card.drafters.tree import HELD_BACK, MAX_NODES, Children, DraftTree
from langchain_card.ports import Budget

MAX_WHOLE = 64
"""Candidates of a proposal that must be complete (`Budget.whole`)."""

Read: TypeAlias = Callable[[Sequence[int]], Sequence[int]]
"""Translates tokens of the target's into those that a level's model reads."""


@dataclass(slots=True)
class DraftStep:
    """One step for one request: open nodes of its tree to expand, and guesses below the first of them.

    Rows are the nodes, then the guesses.

    Attributes:
        tree: the request's.
        budget: the step's.
        heads: nodes to expand: the root alone while it is open; none if the tree cannot grow.
        guesses: candidates below the first head; a parent comes before its children.
        num_assumed: guesses that come from `Budget.ahead`: they hold, whatever the model's scores are.
        text: committed tokens, as the model reads them, that have no KV yet; they come first when the root is open.
        text_slots: their KV slots, if they are read as rows.
        expanded: nodes that became expanded.
        layers: how many of these hang below each other, at most.
        lost: whether a token ahead is not in the level's vocabulary, so that it has nothing to propose.
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
    def plan(cls, tree: DraftTree, budget: Budget, text: Sequence[int], in_vocabulary: InVocabulary) -> DraftStep:
        """Plan a step: expand nodes after the tokens ahead, or else the likeliest open nodes."""
        if not all(map(in_vocabulary, budget.ahead)):
            return cls(tree, budget, lost=True)
        node, assumed = tree.follow(budget.ahead)
        if node not in tree.children:
            heads = [node]
        elif node != tree.root:
            leaves = (leaf for leaf in likeliest(tree, node) if leaf not in tree.children)
            heads = [*itertools.islice(leaves, budget.width)]
        else:
            heads = tree.choose(budget.width, budget.min_chance)
        step = cls(tree, budget, heads, [*enumerate(assumed)], len(assumed), text)
        fits = step.room >= 0 or (heads == [tree.root] and not assumed)
        return step if fits else cls(tree, budget)

    @property
    def room(self) -> int:
        """Number of guesses that may be added."""
        num_rows = len(self.text) if self.heads == [self.tree.root] else len(self.heads)
        return len(self.tree.free_slots) - num_rows - len(self.guesses)

    @property
    def num_rows(self) -> int:
        """Number of nodes and guesses."""
        return len(self.heads) + len(self.guesses)

    @property
    def token_paths(self) -> list[tuple[int, ...]]:
        """[rows] tokens from below the root down to each row."""
        paths = [*map(self.tree.token_path, self.heads)]
        for parent, token in self.guesses:
            paths.append((*paths[parent], token))
        return paths

    def guess_request(self, block: int) -> GuessRequest:
        """Request at most `block` guesses after the first head and the tokens ahead."""
        ahead, room = (self.token_paths[self.num_assumed], min(block, self.room)) if self.heads else ((), 0)
        return GuessRequest(self.budget.request_id, len(self.tree.output_ids), ahead, room)

    def add(self, guesses: Guesses, in_vocabulary: InVocabulary) -> None:
        """Add the guesses of the lower level that are in this level's vocabulary."""
        self.guesses += guesses.rows(self.num_assumed, self.num_rows, in_vocabulary)

    def place(self, read: Read) -> tuple[Sequence[int], list[tuple[int, ...]] | None]:
        """Give every row a KV slot.

        Args:
            read: translates tokens into those that the level's model reads.

        Returns:
            The tokens of all rows, and for each the slots on its path; None for the text alone, which needs no slots.
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

    def settle(self, children: Sequence[Children]) -> None:
        """Expand the heads, and those guesses that are children of expanded nodes.

        Args:
            children: [rows] the children of each row: tokens, likeliest first, and log chances.
        """
        tree, nodes = self.tree, list[int | None](self.heads)
        tree.free_slots += self.text_slots
        tree.expand_all(self.heads, children)
        for i, ((parent, token), listed) in enumerate(zip(self.guesses, children[len(self.heads) :], strict=True)):
            above, node = nodes[parent], None
            if above is not None:
                node = tree.adopt(above, token) if i < self.num_assumed else tree.known(above, token)
            nodes.append(node)
            if node is None:
                tree.free_slots.append(self._slots[i])
            else:
                tree.slots[node] = self._slots[i]
                tree.expand(node, *listed)
        self.expanded = len(nodes) - nodes.count(None)
        depths = [1] * len(self.heads)
        for (parent, _), node in zip(self.guesses, nodes[len(self.heads) :], strict=True):
            depths.append(depths[parent] + 1 if node is not None else 0)
        self.layers = max(depths, default=1)

    def publish(self, source: str, together: int, elapsed: float, reading: float = 0.0) -> Proposal:
        """Return the step's proposal; `elapsed` is the time of all requests, which expanded `together` nodes."""
        tree, share = self.tree, elapsed * self.expanded / max(1, together)
        cost: dict[str, Any] = {"forwarded": self.expanded, "together": together, "layers": self.layers}
        cost |= {"elapsed": share, "reading": reading}
        if not self.budget.whole:
            return tree.publish(source, self.budget.request_id, **cost)
        node, unknown = tree.follow(() if self.lost else self.budget.ahead)
        nodes = [] if self.lost or unknown else [*itertools.islice(likeliest(tree, node), MAX_WHOLE)]
        number = {node: 0} | {found: i for i, found in enumerate(nodes, 1)}
        return Proposal(
            source=source,
            request_id=self.budget.request_id,
            epoch=2 * MAX_NODES * tree.epoch + len(tree.tokens),  # grows with the tree
            root=0,
            applied_len=len(tree.output_ids),
            first=1,
            parents=tuple(number[tree.parents[node]] for node in nodes),
            token_ids=tuple(tree.tokens[node] for node in nodes),
            scores=tuple(tree.scores[node] for node in nodes),
            **cost,
        )


def likeliest(tree: DraftTree, node: int) -> Iterator[int]:
    """Yield the nodes below one, likeliest first."""
    heap = [(0.0, node)]
    while heap:
        _, parent = heapq.heappop(heap)
        if parent != node:
            yield parent
        for child in tree.children.get(parent, {}).values():
            if child != HELD_BACK:
                heapq.heappush(heap, (-tree.reached[child], child))


def add_guesses(
    steps: Sequence[DraftStep], lower: LowerLevel | None, in_vocabulary: InVocabulary
) -> tuple[float, float]:
    """Add the lower level's guesses to all steps; return the seconds that it took, and that it spent reading."""
    if lower is None:
        return 0.0, 0.0
    guesses = lower.guess([step.guess_request(lower.block) for step in steps])
    for step, added in zip(steps, guesses, strict=True):
        step.add(added, in_vocabulary)
    return sum(added.elapsed for added in guesses), sum(added.reading for added in guesses)
