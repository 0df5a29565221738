"""`CandidateTree`: the shared cache of one request.

A trie over the answer: node 0 stands for the last prompt token, the committed tokens hang below it in one path, and
candidates hang below the last committed token, the *root*. Arrays are append-only and nothing is deleted on a
correction: a branch that came out wrong is simply no longer reachable from the root. Dead nodes are swept out when
they outnumber the bound.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Set as AbstractSet

DEAD = -1
"""Node number for what hangs under a branch that is no longer possible."""


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

    __slots__ = ("_alive_under", "_children", "parents", "path", "root", "scores", "sources", "tokens")

    def __init__(self, last_prompt_token: int) -> None:
        self.tokens = [last_prompt_token]
        self.parents = [DEAD]
        self.scores = [0.0]
        self.sources = [""]
        self.root = 0
        self.path = [0]
        self._children: list[dict[int, int]] = [{}]
        self._alive_under = [0]

    def __len__(self) -> int:
        return len(self.tokens)

    def copy(self) -> CandidateTree:
        """An independent copy."""
        copied = CandidateTree.__new__(CandidateTree)
        for name in ("tokens", "parents", "scores", "sources", "path", "_alive_under"):
            setattr(copied, name, getattr(self, name).copy())
        copied.root, copied._children = self.root, [children.copy() for children in self._children]
        return copied

    def insert(self, parent: int, token: int, score: float, source: str) -> int:
        """Adds a candidate, or finds the node it equals.

        Returns:
            The node, or `DEAD` when the parent is dead or the committed tokens took another branch there.
        """
        if parent == DEAD:
            return DEAD
        node = self._children[parent].get(token)
        if node is not None:
            self.scores[node] = max(self.scores[node], min(score, 0.0))
            return node
        if not self.is_alive(parent):
            return DEAD
        return self._append(parent, token, score, source)

    def is_alive(self, node: int) -> bool:
        """Whether `node` is the root or lies below it."""
        seen = []
        while node > self.root and self._alive_under[node] != self.root:
            seen.append(node)
            node = self.parents[node]
        alive = node >= self.root  # the root itself, or a node already known to lie under it
        if alive:
            for below in seen:
                self._alive_under[below] = self.root
        return alive

    def children(self, node: int) -> list[int]:
        """All children of `node`, oldest first."""
        return list(self._children[node].values())

    def advance(self, token: int) -> bool:
        """Commits `token`: the root moves to it, and everything beside it is dead.

        Returns:
            Whether the token was in the cache (a hit).
        """
        node = self._children[self.root].get(token)
        hit = node is not None
        self.root = node if node is not None else self._append(self.root, token, 0.0, "")
        self._alive_under[self.root] = self.root
        self.path.append(self.root)
        return hit

    def best_subtree(self, budget: int) -> tuple[list[int], list[float]]:
        """The connected subtree below the root with the largest expected number of accepted tokens.

        Args:
            budget: nodes at most, the root not counted.

        Returns:
            Nodes, every parent before its children, likeliest first; and each one's chance of being accepted.
        """
        chosen: list[int] = []
        chances: list[float] = []
        heap: list[tuple[float, int]] = []
        reached, node = 0.0, self.root
        while len(chosen) < budget:
            for child in self._children[node].values():
                heapq.heappush(heap, (-reached - self.scores[child], child))
            if not heap:
                break
            negated, node = heapq.heappop(heap)
            reached = -negated
            chosen.append(node)
            chances.append(math.exp(reached))
        return chosen, chances

    def open_chances(self, expanded: AbstractSet[int], width: int = 1, min_chance: float = 0.0) -> list[float]:
        """Where a drafter would look next: the likeliest nodes outside `expanded`.

        Args:
            expanded: nodes under which it has looked.
            width: nodes at most.
            min_chance: chance of being reached at least.

        Returns:
            For each the chance that the target's tokens lead there, and on to no known child.
        """
        found: list[float] = []
        heap = [(0.0, self.root)]
        while heap and len(found) < width:
            negated, node = heapq.heappop(heap)
            chance = math.exp(-negated)
            if chance < min_chance:
                break
            children = self._children[node].values()
            if node not in expanded:
                covered = sum(math.exp(self.scores[child]) for child in children)
                found.append(chance * max(0.0, 1.0 - covered))
                continue
            for child in children:
                heapq.heappush(heap, (negated - self.scores[child], child))
        return found

    def lead(self) -> int:
        """Depth of the deepest candidate below the root."""
        depth, layer = 0, self.children(self.root)
        while layer:
            depth += 1
            layer = [child for node in layer for child in self._children[node].values()]
        return depth

    def sweep(self) -> dict[int, int]:
        """Forgets dead nodes.

        Returns:
            New number of every node that stays: the committed path and all that is alive.
        """
        on_path = set(self.path)
        stay = [n for n in range(len(self.tokens)) if n in on_path or (n > self.root and self.is_alive(n))]
        new = {old: i for i, old in enumerate(stay)}
        self.parents = [new.get(self.parents[n], DEAD) for n in stay]
        self.tokens = [self.tokens[n] for n in stay]
        self.scores = [self.scores[n] for n in stay]
        self.sources = [self.sources[n] for n in stay]
        self._children = [{t: new[c] for t, c in self._children[n].items() if c in new} for n in stay]
        self.root = new[self.root]
        self.path = [new[n] for n in self.path]
        self._alive_under = [self.root] * len(stay)
        return new

    def _append(self, parent: int, token: int, score: float, source: str) -> int:
        node = len(self.tokens)
        self.tokens.append(token)
        self.parents.append(parent)
        self.scores.append(min(score, 0.0))
        self.sources.append(source)
        self._children.append({})
        self._alive_under.append(self.root)
        self._children[parent][token] = node
        return node
