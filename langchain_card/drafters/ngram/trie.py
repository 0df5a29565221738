"""What may come next, as a trie that grows where it is likeliest to be reached; and how likely that is, learnt.

A node costs a row of a verification, and the chance of reaching it is what it gains.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

from langchain_card.drafters.ngram.chances import Chances, Found
from langchain_card.drafters.ngram.frozen import SHARES, FrozenTable
from langchain_card.drafters.ngram.table import MAX_MATCH, Table

EXPAND = 0.3
"""Chance of being reached below which nobody looks what follows a node: it would not be worth its row."""

_LENGTHS = tuple(n.bit_length() for n in range(MAX_MATCH + 1))
_CLASSES = _LENGTHS[-1] + 1
_SURE = 12 * _LENGTHS[-1] + 1  # the longest match, alone, and where the text went on before
_KNOWN = 24  # classes of matches of two tokens and more
_FROZEN = 12 * _CLASSES


class Trie:
    """Nodes in the order in which they were found; node 0 is the root.

    Args:
        chances: of followers, by class; it learns what they are worth.
        place: of the root's token in the text that is followed; negative where none is.

    Attributes:
        tokens, parents, chances: [nodes] token, parent and chance of following it, the root's left out.
    """

    __slots__ = ("_children", "_found", "_learnt", "_place", "chances", "parents", "tokens")

    def __init__(self, chances: Chances, place: int = -1) -> None:
        self._learnt, self._place = chances, place
        self.tokens: list[int] = []
        self.parents: list[int] = []
        self.chances: list[float] = []
        self._found: dict[int, list[Found]] = {}  # what may follow a node
        self._children: dict[tuple[int, int], int] = {}  # by node and token

    def grow(
        self, table: Table, frozen: FrozenTable | None, tail: list[int], max_nodes: int, min_chance: float
    ) -> None:
        """Adds the likeliest node again and again, and what may follow it to those that are to be added.

        Args:
            table: of the text before.
            frozen: asked after it.
            tail: the last tokens of the text.
            max_nodes: of the trie.
            min_chance: of a node to be reached.
        """
        values, paths, kind, place = self._learnt.values, [tail], 0, self._place
        heap: list[tuple[float, int, int, int, int]] = []
        node, reached = 0, 1.0
        while True:
            if reached >= EXPAND:
                self._found[node] = found = self._look(table, frozen, paths[node], place, kind)
                for token, at, kind in found:
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

    def _look(self, table: Table, frozen: FrozenTable | None, path: list[int], place: int, kind: int) -> list[Found]:
        """What may follow a path whose last token is of a class; not long sought after a long match that went on."""
        goes_on = table.token_at(place + 1) if place >= 0 else -1
        if kind == _SURE and goes_on >= 0:
            return [(goes_on, place + 1, _SURE)]
        followers = table.followers(path)
        tied = 2 * (len(followers) > 1 and followers[0][2] == followers[1][2])
        found, rank = [], 0
        for token, at, match in followers:
            kind = 12 * _LENGTHS[match] + rank + tied
            if token == goes_on:
                kind, goes_on = kind + 1, -1
            found.append((token, at, kind))
            rank = 4 if rank == 0 else 8
        if goes_on >= 0:
            found.append((goes_on, place + 1, rank + tied + 1))
        return found if frozen is None else self._with(frozen, found, path)

    def _with(self, frozen: FrozenTable, found: list[Found], path: list[int]) -> list[Found]:
        """The same with what a frozen table says: of two answers for a token the one that is surer."""
        best = {token: (token, at, kind) for token, at, kind in found}
        known = 2 * SHARES * (bool(found) and found[0][2] >= _KNOWN)
        for token, share in frozen.followers(path):
            kind = _FROZEN + known + share
            if token not in best:
                best[token] = token, -1, kind
            elif self._learnt.values[kind] > self._learnt.values[best[token][2]]:
                best[token] = token, best[token][1], kind
        return [*best.values()]

    def learn(self, token_ids: Sequence[int]) -> int:
        """What came instead of it, or as it said.

        Returns:
            The place of the last token in the text that is followed. A token that stands elsewhere leads there; one
            that was not thought of takes the place of the one that was.
        """
        node: int | None = 0
        place = self._place
        for token in token_ids:
            found = self._found.get(node, ()) if node is not None else ()
            self._learnt.learn(found, token)
            place += place >= 0
            for other, at, _ in found:
                if other == token and at >= 0:
                    place = at
            node = None if node is None else self._children.get((node, token))
        return place
