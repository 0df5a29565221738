"""`CandidateTree`: the shared cache of one request.

A trie over the answer: node 0 stands for the last prompt token, the committed tokens form one path below it, and the
candidates hang below the last committed token, the *root*. Arrays are append-only: after a correction the nodes of a
rejected branch lose their children but keep their numbers. Dead nodes are swept out when they outnumber the bound.

Scores come from several drafters. A candidate that a language model has listed keeps the score of the model; otherwise
the highest score counts. A candidate that a model did not list, although it has expanded the parent, is *unlisted*, and
its chance is lower.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Sequence
from collections.abc import Set as AbstractSet
from heapq import heappop, heappush
from typing import NamedTuple, TypeAlias

DEAD = -1
"""Node number under a branch that is no longer possible."""

_PER_NODE = ("tokens", "scores", "sources", "origins", "unlisted_logps", "_depths")

Subtree: TypeAlias = tuple[list[int], list[float]]
"""Nodes, and the chance of each to be accepted."""


class CandidateTree:
    """The committed path and the candidates of one request.

    Attributes:
        tokens: [nodes] token ids.
        parents: [nodes] parent node; smaller than the node itself.
        scores: [nodes] log of the estimated chance that the target picks this token after its parent.
        sources: [nodes] the drafter that proposed it first, or "".
        origins: [nodes] the drafter whose score counts, and the log chance that it stated.
        unlisted_logps: [nodes] the score that counts while the node is unlisted.
        expanded_by_model: nodes whose children a model has listed.
        listed_by_model: nodes that a model has listed.
        root: node of the last committed token.
        path: nodes of the committed tokens; `path[n]` is the node after n output tokens.
    """

    __slots__ = (
        "_best", "_children", "_depths", "_pruned", "expanded_by_model", "listed_by_model",
        "origins", "parents", "path", "root", "scores", "sources", "tokens", "unlisted_logps",
    )  # fmt: skip

    def __init__(self, last_prompt_token: int) -> None:
        self.tokens = [last_prompt_token]
        self.parents = [DEAD]
        self.scores = [0.0]
        self.sources = [""]
        self.origins = [("", 0.0)]
        self.unlisted_logps = [0.0]
        self.expanded_by_model: set[int] = set()
        self.listed_by_model: set[int] = set()
        self.root = 0
        self.path = [0]
        self._children: dict[int, dict[int, int]] = {}  # node -> token -> child
        self._pruned = True  # whether only living nodes have children
        self._depths = [0]  # [nodes] below node 0
        self._best: tuple[int, Subtree] | None = None  # with its budget, until the candidates change

    def __len__(self) -> int:
        return len(self.tokens)

    def copy(self) -> CandidateTree:
        """Return an independent copy."""
        copied = CandidateTree.__new__(CandidateTree)
        for name in (*_PER_NODE, "parents", "path", "expanded_by_model", "listed_by_model"):
            setattr(copied, name, getattr(self, name).copy())
        copied._children = {node: children.copy() for node, children in self._children.items()}
        copied.root, copied._best, copied._pruned = self.root, self._best, self._pruned
        return copied

    def insert(
        self,
        parent: int,
        token: int,
        stated_logp: float,
        source: str,
        trusted_logps: tuple[float, float] | None = None,
        *,
        from_model: bool = False,
    ) -> int:
        """Add a candidate, or find the node that it equals.

        Args:
            parent: node of the token before it.
            token: the candidate's token.
            stated_logp: log chance that the drafter states.
            source: name of the drafter.
            trusted_logps: its score, and its score while unlisted; None takes the stated one for both.
            from_model: whether the score is a language model's, which counts more than other scores.

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
        score, unlisted_logp = trusted_logps or (stated_logp, stated_logp)
        node = children.get(token)
        if node is None:
            node = children[token] = self._append(parent, token, source, stated_logp, score, unlisted_logp)
        elif from_model != (node in self.listed_by_model):
            if from_model:  # the first model that lists it
                self._set_score(node, source, stated_logp, score, unlisted_logp)
        elif self.scores[node] < score:
            self._set_score(node, source, stated_logp, score, max(unlisted_logp, self.unlisted_logps[node]))
        if from_model:
            self.listed_by_model.add(node)
        return node

    def _set_score(self, node: int, source: str, stated_logp: float, score: float, unlisted_logp: float) -> None:
        self.origins[node] = source, stated_logp
        self.scores[node], self.unlisted_logps[node] = min(score, 0.0), unlisted_logp
        self._best = None

    def mark_expanded(self, nodes: Collection[int]) -> None:
        """Note that a model has listed the children of these nodes."""
        self.expanded_by_model.update(nodes)
        self._best = None

    def is_alive(self, node: int) -> bool:
        """Return whether `node` is the root or lies below it."""
        if not self._pruned:
            self._prune()
        return node == self.root or self.parents[node] in self._children

    def _prune(self) -> None:
        """Remove the children of all nodes that are neither the root nor below it."""
        before = self._children
        living = [self.root] if self.root in before else []  # and with children
        for node in living:
            living += filter(before.__contains__, before[node].values())
        self._children = {node: before[node] for node in living}
        self._pruned = True

    def _committed(self, parent: int, token: int) -> int:
        """Return the node of `token` if it was committed after `parent`, else `DEAD`."""
        depth = self._depths[parent]
        if self.path[depth : depth + 1] != [parent] or depth + 1 == len(self.path):
            return DEAD
        node = self.path[depth + 1]
        return node if self.tokens[node] == token else DEAD

    def children(self, node: int) -> list[int]:
        """Return all children of `node`, oldest first."""
        return list(self._children.get(node, {}).values())

    def first_child(self) -> int:
        """Return the likeliest child of the root, or `DEAD`."""
        scores, children = self._scores(self.root), self.children(self.root)
        return children[scores.index(max(scores))] if children else DEAD

    def advance(self, token: int) -> bool:
        """Commit `token`: the root moves to it, and everything beside it is dead.

        Returns:
            Whether the token was in the cache (a hit).
        """
        node = self._children.get(self.root, {}).get(token)
        self.root = self._append(self.root, token, "") if node is None else node
        self._pruned, self._best = False, None
        self.path.append(self.root)
        return node is not None

    def best_subtree(self, budget: int) -> Subtree:
        """Return the connected subtree below the root with the largest expected number of accepted tokens.

        Args:
            budget: nodes at most, the root not counted.

        Returns:
            Nodes, likeliest first, so that every parent comes before its children; and the chance of each.
        """
        if self._best is None or self._best[0] != budget:
            self._best = budget, self._likeliest(budget)
        return self._best[1]

    def _likeliest(self, budget: int) -> Subtree:
        nodes: list[int] = []
        logs: list[float] = []  # negated
        heap: list[tuple[float, int]] = []
        reached, node = 0.0, self.root
        while len(nodes) < budget:
            if children := self._children.get(node):
                scores = self._scores(node)
                reached += _excess(scores)
                for child, score in zip(children.values(), scores):  # noqa: B905
                    heappush(heap, (reached - score, child))
            if not heap:
                break
            reached, node = heappop(heap)
            nodes.append(node)
            logs.append(reached)
        return nodes, [math.exp(-log) for log in logs]

    def best_chain(self, budget: int) -> tuple[list[int], list[float]]:
        """Return the chain of likeliest children below the root, at most `budget` nodes, and the chance of each."""
        chosen: list[int] = []
        chances: list[float] = []
        reached, node = 0.0, self.root
        while len(chosen) < budget and (children := self.children(node)):
            scores = self._scores(node)
            best = max(scores)
            node = children[scores.index(best)]
            reached += best - _excess(scores)
            chosen.append(node)
            chances.append(math.exp(reached))
        return chosen, chances

    def is_unlisted(self, node: int) -> bool:
        """Return whether a model has expanded the parent and has not listed the node."""
        return node not in self.listed_by_model and self.parents[node] in self.expanded_by_model

    def _scores(self, node: int) -> list[float]:
        """Return the scores of the children of a node, oldest first."""
        children, scores = self._children.get(node, {}).values(), self.scores
        if node not in self.expanded_by_model:
            return [scores[child] for child in children]
        listed, unlisted = self.listed_by_model, self.unlisted_logps
        return [scores[child] if child in listed else min(scores[child], unlisted[child]) for child in children]

    def covered(self, node: int) -> float:
        """Return the chance that the token after a node is among its children."""
        return sum(map(math.exp, self._scores(node)))

    def depth(self, node: int) -> int:
        """Return the depth of a living node below the root."""
        return self._depths[node] - self._depths[self.root]

    def deepest(self, nodes: Iterable[int]) -> int:
        """Return the deepest of some nodes, the first of several; the root if there are none."""
        return max(nodes, key=self._depths.__getitem__, default=self.root)

    def living(self) -> list[int]:
        """Return the root and all nodes below it."""
        return [self.root, *(child for children in self._children.values() for child in children.values())]

    def sweep(self) -> list[int]:
        """Forget all nodes but the committed path and what is alive.

        Returns:
            New number of every node, `DEAD` for those that are forgotten, and at the end for `DEAD` itself.
        """
        self._prune()
        stay = [*self.path[:-1], *sorted(self.living())]
        new = [DEAD] * (len(self) + 1)
        for i, old in enumerate(stay):
            new[old] = i
        self.parents = [new[self.parents[n]] for n in stay]
        for name in _PER_NODE:
            values = getattr(self, name)
            setattr(self, name, [values[n] for n in stay])
        self._children = {
            new[node]: {token: new[child] for token, child in children.items()}
            for node, children in self._children.items()
        }
        self.root = new[self.root]
        self.path = [new[n] for n in self.path]
        for name in ("expanded_by_model", "listed_by_model"):
            setattr(self, name, {new[n] for n in getattr(self, name)} - {DEAD})
        self._best = None
        return new

    def _append(
        self,
        parent: int,
        token: int,
        source: str,
        stated_logp: float = 0.0,
        score: float = 0.0,
        unlisted_logp: float = 0.0,
    ) -> int:
        self.tokens.append(token)
        self.parents.append(parent)
        self.scores.append(min(score, 0.0))
        self.sources.append(source)
        self.origins.append((source, stated_logp))
        self.unlisted_logps.append(unlisted_logp)
        self._depths.append(self._depths[parent] + 1)
        self._best = None
        return len(self.tokens) - 1


def _excess(scores: Sequence[float]) -> float:
    """Return the log of the children's total chance where it exceeds 1: drafters that disagree share it."""
    total = sum(map(math.exp, scores))
    return math.log(total) if total > 1.0 else 0.0


class Frontier(NamedTuple):
    """The nodes that a drafter would expand next.

    Attributes:
        chances: [nodes] chance that the answer passes through the node and continues with none of its known children.
        reach: chance that the answer passes through the best of them.
        others: chances of the candidates that other drafters propose below the best of them.
        lead: depth of the drafter's candidates.
    """

    chances: Sequence[float]
    reach: float = 0.0
    others: Sequence[float] = ()
    lead: int = 0


def frontier(
    tree: CandidateTree,
    published: AbstractSet[int],
    expanded: AbstractSet[int],
    budget: int,
    width: int = 1,
    min_chance: float = 0.0,
) -> Frontier:
    """Return the nodes that a drafter would expand next: the root, or the best of its own, outside `expanded`.

    Args:
        tree: the request's candidates.
        published: nodes that the drafter has published.
        expanded: nodes whose children it has published.
        budget: only the root and the best subtree of so many nodes are searched.
        width: nodes at most.
        min_chance: nodes that the answer reaches with a smaller chance are left out.
    """
    nodes, chances = tree.best_subtree(budget)
    chosen = list[tuple[int, float]]()
    for node, chance in zip((tree.root, *nodes), (1.0, *chances)):  # noqa: B905
        if chance < min_chance or len(chosen) == width:
            break
        if node not in expanded and (node in published or node == tree.root):
            chosen.append((node, chance))
    if not chosen:
        return Frontier([])
    first, reach = chosen[0]
    below, others = {first}, list[float]()
    for node, chance in zip(nodes, chances):  # noqa: B905
        if tree.parents[node] in below:
            below.add(node)
            others.append(chance)
    return Frontier([chance * max(0.0, 1.0 - tree.covered(node)) for node, chance in chosen], reach, others)
