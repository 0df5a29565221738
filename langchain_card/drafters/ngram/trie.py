"""`Trie`: the candidates of the n-gram drafter. It grows where a node is likeliest to be reached.

A node costs a row of a verification, and gains as much as its chance of being reached.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

from langchain_card.drafters.ngram.frozen import SHARES, FrozenTable
from langchain_card.drafters.ngram.table import MAX_MATCH, Chances, Successor, Table

EXPAND = 0.3
"""Chance of being reached below which a node gets no successors: they would not be worth their rows."""

_LENGTHS = tuple(n.bit_length() for n in range(MAX_MATCH + 1))
_CLASSES = _LENGTHS[-1] + 1
_SURE = 12 * _LENGTHS[-1] + 1  # the longest match, alone, and where the text went on before
_KNOWN = 24  # classes of matches of two tokens and more
_FROZEN = 12 * _CLASSES


class Trie:
    """Candidates in the order in which they were added; node 0 is the root.

    Args:
        chances: chances of successors by class; `learn` updates them.
        place: of the root's token in the text that is followed; negative if none is.

    Attributes:
        tokens: [nodes] tokens, without the root's.
        parents: [nodes] parents.
        chances: [nodes] chances that a node follows its parent.
    """

    __slots__ = ("_children", "_learnt", "_place", "_successors", "chances", "parents", "tokens")

    def __init__(self, chances: Chances, place: int = -1) -> None:
        self._learnt, self._place = chances, place
        self.tokens: list[int] = []
        self.parents: list[int] = []
        self.chances: list[float] = []
        self._successors: dict[int, list[Successor]] = {}  # by node
        self._children: dict[tuple[int, int], int] = {}  # by node and token

    def grow(
        self, table: Table, frozen: FrozenTable | None, tail: list[int], max_nodes: int, min_chance: float
    ) -> None:
        """Add the likeliest nodes, one after the other, and look up the successors of each.

        Args:
            table: the tenant's.
            frozen: a frozen table, if there is one.
            tail: last tokens of the text.
            max_nodes: nodes of the trie at most.
            min_chance: nodes with a smaller chance of being reached are not added.
        """
        values, paths, kind, place = self._learnt.values, [tail], 0, self._place
        heap: list[tuple[float, int, int, int, int]] = []
        node, reached = 0, 1.0
        while True:
            if reached >= EXPAND:
                self._successors[node] = successors = self._look_up(table, frozen, paths[node], place, kind)
                for token, at, kind in successors:
                    if (chance := reached * values[kind]) >= min_chance:
                        heapq.heappush(heap, (-chance, node, token, at, kind))
            if not heap or len(self.tokens) == max_nodes:
                return
            negated, parent, token, place, kind = heapq.heappop(heap)
            reached = -negated
            self.tokens.append(token)
            self.parents.append(parent)
            self.chances.append(values[kind])
            node = self._children[parent, token] = len(self.tokens)
            paths.append([*paths[parent][1 - MAX_MATCH :], token])

    def _look_up(
        self, table: Table, frozen: FrozenTable | None, path: list[int], place: int, kind: int
    ) -> list[Successor]:
        """Return the successors of a path; after a token of the surest class, only the one that continues its text."""
        goes_on = table.token_at(place + 1) if place >= 0 else -1
        if kind == _SURE and goes_on >= 0:
            return [(goes_on, place + 1, _SURE)]
        followers = table.followers(path)
        tied = 2 * (len(followers) > 1 and followers[0][2] == followers[1][2])
        successors, rank = [], 0
        for token, at, match in followers:
            kind = 12 * _LENGTHS[match] + rank + tied
            if token == goes_on:
                kind, goes_on = kind + 1, -1
            successors.append((token, at, kind))
            rank = 4 if rank == 0 else 8
        if goes_on >= 0:
            successors.append((goes_on, place + 1, rank + tied + 1))
        return successors if frozen is None else self._with_frozen(frozen, successors, path)

    def _with_frozen(self, frozen: FrozenTable, successors: list[Successor], path: list[int]) -> list[Successor]:
        """Add the successors of a frozen table; a token that has a place already keeps it, and the likelier class."""
        best = {token: (token, at, kind) for token, at, kind in successors}
        known = 2 * SHARES * (bool(successors) and successors[0][2] >= _KNOWN)
        for token, share in frozen.followers(path):
            kind = _FROZEN + known + share
            if token not in best:
                best[token] = token, -1, kind
            elif self._learnt.values[kind] > self._learnt.values[best[token][2]]:
                best[token] = token, best[token][1], kind
        return [*best.values()]

    def learn(self, token_ids: Sequence[int]) -> int:
        """Learn the tokens that came.

        Returns:
            The place of the last token in the text that is followed. A successor that came moves it to its own place;
            a token that is no successor moves it on by one.
        """
        node: int | None = 0
        place = self._place
        for token in token_ids:
            successors = self._successors.get(node, ()) if node is not None else ()
            self._learnt.learn(successors, token)
            place += place >= 0
            for other, at, _ in successors:
                if other == token and at >= 0:
                    place = at
            node = None if node is None else self._children.get((node, token))
        return place
