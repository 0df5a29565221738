"""`CandidateTree`: the shared cache of one request.

A trie over the answer: node 0 stands for the last prompt token, the committed tokens hang below it in one path, and
candidates hang below the last committed token, the *root*. Arrays are append-only: after a correction the nodes of a
branch that came out wrong have no children any more, but keep their numbers. Dead nodes are swept out when they
outnumber the bound.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Collection
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
        words: [nodes] whose word the score is, and the log chance that was stated.
        doubted: [nodes] the score where a drafter that knows has looked and did not list it.
        looked: nodes behind which such a drafter has looked.
        listed: nodes that it listed: its word counts, and no other's.
        root: node of the last committed token.
        path: nodes of the committed tokens; `path[n]` is the node after n output tokens.
    """

    __slots__ = (
        "_best", "_children", "_depths", "_pruned", "doubted", "listed", "looked",
        "parents", "path", "root", "scores", "sources", "tokens", "words",
    )  # fmt: skip

    def __init__(self, last_prompt_token: int) -> None:
        self.tokens = [last_prompt_token]
        self.parents = [DEAD]
        self.scores = [0.0]
        self.sources = [""]
        self.words = [("", 0.0)]
        self.doubted = [0.0]
        self.looked: set[int] = set()
        self.listed: set[int] = set()
        self.root = 0
        self.path = [0]
        self._children: dict[int, dict[int, int]] = {}  # by token, of the nodes that have any
        self._pruned = True  # whether only living nodes have them
        self._depths = [0]  # [nodes] below node 0
        self._best: tuple[int, Subtree] | None = None  # with its budget, until the candidates change

    def __len__(self) -> int:
        return len(self.tokens)

    def copy(self) -> CandidateTree:
        """An independent copy."""
        copied = CandidateTree.__new__(CandidateTree)
        for name in (
            "tokens",
            "parents",
            "scores",
            "sources",
            "words",
            "doubted",
            "path",
            "looked",
            "listed",
            "_depths",
        ):
            setattr(copied, name, getattr(self, name).copy())
        copied._children = {node: children.copy() for node, children in self._children.items()}
        copied.root, copied._best, copied._pruned = self.root, self._best, self._pruned
        return copied

    def insert(
        self,
        parent: int,
        token: int,
        stated: float,
        source: str,
        *,
        judged: tuple[float, float] | None = None,
        knows: bool = False,
    ) -> int:
        """Adds a candidate, or finds the node it equals.

        Args:
            parent: its node.
            token: of the candidate.
            stated: log chance that the source states.
            source: who proposes it.
            judged: log chances to reckon with: its score, and that where it is doubted; None for what is stated.
            knows: whether the source has a model, so that its word counts more than that of those who have none.

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
        score, doubted = judged or (stated, stated)
        node = children.get(token)
        if node is None:
            node = children[token] = self._append(parent, token, source)
            self._say(node, source, stated, score, doubted)
        elif knows != (node in self.listed):
            if knows:  # the first that does
                self._say(node, source, stated, score, doubted)
        elif self.scores[node] < score:
            self._say(node, source, stated, score, max(doubted, self.doubted[node]))
        if knows:
            self.listed.add(node)
        return node

    def _say(self, node: int, source: str, stated: float, score: float, doubted: float) -> None:
        self.words[node], self.scores[node], self.doubted[node] = (source, stated), min(score, 0.0), doubted
        self._best = None

    def look(self, nodes: Collection[int]) -> None:
        """A drafter that knows has listed what may follow these nodes."""
        self.looked.update(nodes)
        self._best = None

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

    def first_child(self) -> int:
        """The likeliest child of the root, or `DEAD`."""
        return max(self._children.get(self.root, {}).values(), key=self._score, default=DEAD)

    def advance(self, token: int) -> bool:
        """Commits `token`: the root moves to it, and everything beside it is dead.

        Returns:
            Whether the token was in the cache (a hit).
        """
        node = self._children.get(self.root, {}).get(token)
        self.root = self._append(self.root, token, "") if node is None else node
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
        reached, node = 0.0, self.root
        while len(nodes) < budget:
            children = self._children.get(node, {}).values()
            reached += self._excess(children)
            for child in children:
                heapq.heappush(heap, (reached - self._score(child), child))
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
            node = max(children, key=self._score)
            reached += self._score(node) - self._excess(children)
            chosen.append(node)
            chances.append(math.exp(reached))
        return chosen, chances

    def is_doubted(self, node: int) -> bool:
        """Whether a drafter that knows has looked, and has not listed it."""
        return node not in self.listed and self.parents[node] in self.looked

    def _score(self, node: int) -> float:
        return min(self.scores[node], self.doubted[node]) if self.is_doubted(node) else self.scores[node]

    def _excess(self, siblings: Collection[int]) -> float:
        """Log of what drafters that disagree state together, where that is more than certain: they share one."""
        return math.log(max(1.0, sum(math.exp(self._score(node)) for node in siblings)))

    def covered(self, node: int) -> float:
        """The chance that what follows a node is among its children."""
        return sum(math.exp(self._score(child)) for child in self.children(node))

    def depth(self, node: int) -> int:
        """Of a living node below the root."""
        return self._depths[node] - self._depths[self.root]

    def living(self) -> list[int]:
        """The root and all that lies below it."""
        return [self.root, *(child for children in self._children.values() for child in children.values())]

    def sweep(self) -> dict[int, int]:
        """Forgets dead nodes.

        Returns:
            New number of every node that stays: the committed path and all that is alive.
        """
        self._prune()
        stay = [*self.path[:-1], *sorted(self.living())]
        new = {old: i for i, old in enumerate(stay)}
        self.parents = [new.get(self.parents[n], DEAD) for n in stay]
        for name in ("tokens", "scores", "sources", "words", "doubted", "_depths"):
            setattr(self, name, [getattr(self, name)[n] for n in stay])
        self._children = {
            new[node]: {token: new[child] for token, child in children.items()}
            for node, children in self._children.items()
        }
        self.root = new[self.root]
        self.path = [new[n] for n in self.path]
        self.looked, self.listed = ({new[n] for n in nodes if n in new} for nodes in (self.looked, self.listed))
        self._best = None
        return new

    def _append(self, parent: int, token: int, source: str) -> int:
        node, depth = len(self.tokens), self._depths[parent] + 1
        self.tokens.append(token)
        self.parents.append(parent)
        self.scores.append(0.0)
        self.sources.append(source)
        self.words.append((source, 0.0))
        self.doubted.append(0.0)
        self._depths.append(depth)
        self._best = None
        return node
