"""`CandidateTree`: the shared cache of one request.

A trie over the answer: node 0 stands for the last prompt token, the committed tokens hang below it in one path, and
candidates hang below the last committed token, the *root*. Arrays are append-only: after a correction the nodes of a
branch that came out wrong have no children any more, but keep their numbers. Dead nodes are swept out when they
outnumber the bound.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Set as AbstractSet
from typing import TypeAlias

DEAD = -1
"""Node number for what hangs under a branch that is no longer possible."""

Subtree: TypeAlias = tuple[list[int], list[float]]
"""Nodes, and the chance of each."""


class CandidateTree:
    """Committed path and candidates of one request.

    Attributes:
        tokens: [nodes] token ids.
        parents: [nodes] parent node; smaller than the node itself.
        scores: [nodes] log of the estimated chance that the target picks this token after its parent.
        sources: [nodes] the drafter that proposed it first, or "".
        root: node of the last committed token.
        path: nodes of the committed tokens; `path[n]` is the node after n output tokens.
    """

    __slots__ = (
        "_best", "_children", "_deepest", "_depths", "_pruned",
        "parents", "path", "root", "scores", "sources", "tokens",
    )  # fmt: skip

    def __init__(self, last_prompt_token: int) -> None:
        self.tokens = [last_prompt_token]
        self.parents = [DEAD]
        self.scores = [0.0]
        self.sources = [""]
        self.root = 0
        self.path = [0]
        self._children: dict[int, dict[int, int]] = {}  # by token, of the nodes that have any
        self._pruned = True  # whether only living nodes have them
        self._depths = [0]  # [nodes] below node 0
        self._deepest = 0  # no candidate lies deeper
        self._best: tuple[int, Subtree] | None = None  # with its budget, until the candidates change

    def __len__(self) -> int:
        return len(self.tokens)

    def copy(self) -> CandidateTree:
        """An independent copy."""
        copied = CandidateTree.__new__(CandidateTree)
        for name in ("tokens", "parents", "scores", "sources", "path", "_depths"):
            setattr(copied, name, getattr(self, name).copy())
        copied._children = {node: children.copy() for node, children in self._children.items()}
        copied.root, copied._deepest, copied._best, copied._pruned = self.root, self._deepest, self._best, self._pruned
        return copied

    def insert(self, parent: int, token: int, score: float, source: str) -> int:
        """Adds a candidate, or finds the node it equals.

        Returns:
            The node, or `DEAD` when the parent is dead or the committed tokens took another branch there.
        """
        if parent == DEAD:
            return DEAD
        if not self._pruned:
            self._prune()
        children = self._children.get(parent)
        if children is None:
            if not self.is_alive(parent):
                return self._committed(parent, token)
            children = self._children[parent] = {}
        node = children.get(token)
        if node is None:
            node = children[token] = self._append(parent, token, score, source)
        elif self.scores[node] < score:
            self.scores[node], self._best = min(score, 0.0), None
        return node

    def is_alive(self, node: int) -> bool:
        """Whether `node` is the root or lies below it."""
        if not self._pruned:
            self._prune()
        return node == self.root or self.parents[node] in self._children

    def _prune(self) -> None:
        """Takes their children from all nodes that are not the root and do not lie below it."""
        living = [self.root]
        for node in living:
            if node in self._children:
                living += self._children[node].values()
        self._children = {node: self._children[node] for node in living if node in self._children}
        self._pruned = True

    def _committed(self, parent: int, token: int) -> int:
        """The node of `token` when it was committed after `parent`, else `DEAD`."""
        depth = self._depths[parent]
        if self.path[depth : depth + 1] != [parent] or depth + 1 == len(self.path):
            return DEAD
        node = self.path[depth + 1]
        return node if self.tokens[node] == token else DEAD

    def children(self, node: int) -> list[int]:
        """All children of `node`, oldest first."""
        return list(self._children.get(node, {}).values())

    def advance(self, token: int) -> bool:
        """Commits `token`: the root moves to it, and everything beside it is dead.

        Returns:
            Whether the token was in the cache (a hit).
        """
        node = self._children.get(self.root, {}).get(token)
        self.root = self._append(self.root, token, 0.0, "") if node is None else node
        self._pruned, self._best = False, None
        self.path.append(self.root)
        return node is not None

    def best_subtree(self, budget: int) -> Subtree:
        """The connected subtree below the root with the largest expected number of accepted tokens.

        Args:
            budget: nodes at most, the root not counted.

        Returns:
            Nodes, every parent before its children, likeliest first; and each one's chance of being accepted.
        """
        if self._best is None or self._best[0] != budget:
            self._best = budget, self._likeliest(budget)
        return self._best[1]

    def _likeliest(self, budget: int) -> Subtree:
        nodes: list[int] = []
        chances: list[float] = []
        heap: list[tuple[float, int]] = []
        scores, reached, node = self.scores, 0.0, self.root
        while len(nodes) < budget:
            for child in self._children.get(node, {}).values():
                heapq.heappush(heap, (reached - scores[child], child))
            if not heap:
                break
            reached, node = heapq.heappop(heap)
            nodes.append(node)
            chances.append(math.exp(-reached))
        return nodes, chances

    def best_chain(self, budget: int) -> tuple[list[int], list[float]]:
        """The same with one child a node: the likeliest."""
        chosen: list[int] = []
        chances: list[float] = []
        reached, node = 0.0, self.root
        while len(chosen) < budget and (children := self._children.get(node, {}).values()):
            node = max(children, key=self.scores.__getitem__)
            reached += self.scores[node]
            chosen.append(node)
            chances.append(math.exp(reached))
        return chosen, chances

    def open_chances(
        self, expanded: AbstractSet[int], budget: int, width: int = 1, min_chance: float = 0.0
    ) -> list[float]:
        """Where a drafter would look next: the likeliest nodes outside `expanded`.

        Args:
            expanded: nodes under which it has looked.
            budget: only the root and the best subtree of so many nodes are searched.
            width: nodes at most.
            min_chance: chance of being reached at least.

        Returns:
            For each the chance that the target's tokens lead there, and on to no known child.
        """
        nodes, chances = self.best_subtree(budget)
        likely = itertools.takewhile(lambda at: at[1] >= min_chance, zip((self.root, *nodes), (1.0, *chances)))  # noqa: B905
        found = itertools.islice(((node, chance) for node, chance in likely if node not in expanded), width)
        return [chance * max(0.0, 1.0 - self._covered(node)) for node, chance in found]

    def _covered(self, node: int) -> float:
        return sum(math.exp(self.scores[child]) for child in self.children(node))

    def lead(self) -> int:
        """Depth of the deepest candidate below the root."""
        if not self.is_alive(self._deepest):
            self._deepest = max(self._living(), key=self._depths.__getitem__)
        return self._depths[self._deepest] - self._depths[self.root]

    def _living(self) -> list[int]:
        """The root and all that lies below it."""
        return [self.root, *(child for children in self._children.values() for child in children.values())]

    def sweep(self) -> dict[int, int]:
        """Forgets dead nodes.

        Returns:
            New number of every node that stays: the committed path and all that is alive.
        """
        self.lead()  # prunes, and finds the deepest that lives
        stay = [*self.path[:-1], *sorted(self._living())]
        new = {old: i for i, old in enumerate(stay)}
        self.parents = [new.get(self.parents[n], DEAD) for n in stay]
        for name in ("tokens", "scores", "sources", "_depths"):
            setattr(self, name, [getattr(self, name)[n] for n in stay])
        self._children = {
            new[node]: {token: new[child] for token, child in children.items()}
            for node, children in self._children.items()
        }
        self.root = new[self.root]
        self.path = [new[n] for n in self.path]
        self._deepest, self._best = new[self._deepest], None
        return new

    def _append(self, parent: int, token: int, score: float, source: str) -> int:
        node, depth = len(self.tokens), self._depths[parent] + 1
        self.tokens.append(token)
        self.parents.append(parent)
        self.scores.append(min(score, 0.0))
        self.sources.append(source)
        self._depths.append(depth)
        self._best = None
        if depth > self._depths[self._deepest]:
            self._deepest = node
        return node
