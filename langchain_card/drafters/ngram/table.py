"""`Table`: an index from the last tokens of a text to what followed them before, in bounded memory.

Cacheback (arXiv 2511.21699, section 3) keeps tables of leader -> followers that drop the least recently used entries at
both levels. Here a follower is a place in a log of all text, so matches and continuations may be longer than an entry.
A table has rows of places in a plain array; the hash of a leader selects its row, as in a set-associative cache. A full
row drops its oldest place, a full log its oldest page. A place is used only if the leader is before it in the log:
leaders that share a row, and pages that are overwritten, do no harm.
"""

from __future__ import annotations

import sys
from array import array
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import TypeAlias

RATE = 0.01
"""Weight of an observation after many others; chosen so that about the last hundred count."""

FIRST_RATE = 0.05
"""Weight of the first observation; chosen so that a prior is worth 20 observations."""

PRIOR = (
    0.05, 0.09, 0.05, 0.09, 0.02, 0.03, 0.02, 0.05, 0.02, 0.03, 0.02, 0.08,
    0.38, 0.73, 0.20, 0.58, 0.02, 0.42, 0.10, 0.43, 0.02, 0.34, 0.05, 0.35,
    0.45, 0.76, 0.16, 0.44, 0.09, 0.27, 0.11, 0.59, 0.04, 0.23, 0.06, 0.34,
    0.58, 0.79, 0.20, 0.35, 0.09, 0.20, 0.17, 0.47, 0.04, 0.23, 0.08, 0.28,
    0.83, 0.94, 0.27, 0.41, 0.20, 0.25, 0.21, 0.47, 0.05, 0.20, 0.13, 0.28,
    0.01, 0.04, 0.07, 0.08, 0.11, 0.15, 0.24, 0.36, 0.02, 0.05, 0.12, 0.14, 0.17, 0.22, 0.41, 0.56,
    0.01, 0.01, 0.01, 0.02, 0.02, 0.02, 0.05, 0.12, 0.01, 0.01, 0.02, 0.04, 0.05, 0.06, 0.15, 0.33,
)  # fmt: skip
"""Chances by class, from recorded answers (docs/LOG.md, 2026-11-23): a row a length of match, then frozen tables."""

Successor: TypeAlias = tuple[int, int, int]
"""A token that may come next, its place in the log (negative if it is in no log), and the class of its chance."""


class Chances:
    """The share of successors of a class that came next.

    A class stands for a length of the match before a token (0, 1, 2-3, 4-7, 8 and more), a rank among the followers (0,
    1, 2 and more), whether the two longest matches are equally long, and whether the token continues the text that was
    followed so far. Tokens of frozen tables have classes of their own.

    Attributes:
        values: chances by class.
    """

    def __init__(self) -> None:
        self.values = array("d", PRIOR)
        self._rates = array("d", [FIRST_RATE]) * len(PRIOR)

    def learn(self, successors: Sequence[Successor], actual: int) -> None:
        """Learn which of the successors came next, if any."""
        values, rates = self.values, self._rates
        for token, _, kind in successors:
            rate = rates[kind]
            values[kind] += ((token == actual) - values[kind]) * rate
            if rate > RATE:
                rates[kind] = rate / (1 + rate)


LEADERS = (3, 1)
"""Tokens of a leader, by table; the longer leaders come first (docs/LOG.md, 2026-11-23)."""

WAYS = 4
"""Followers in a row; a leader shares its row only with leaders of the same hash."""

PAGE = 512
"""Tokens of the log that a text takes at once: a copy of its last tokens, then its new ones, then an end mark."""

MAX_MATCH = 8
"""Tokens before a place that are compared, at most."""

_END = -1
_EMPTY = array("i", [_END]) * PAGE
_FIRST_ROWS = 512
_OBJECTS = 6144  # `Chances` among them
_PAGE_BYTES = PAGE * 4 + 512  # with its text's tail
_ROW_BYTES = WAYS * 4 * len(LEADERS)

Follower: TypeAlias = tuple[int, int, int]
"""A token, its place in the log, and how many tokens before it are the same, `MAX_MATCH` at most."""


class TextCursor:
    """The position in the log at which a request's text continues.

    Attributes:
        tail: last tokens of the text, at most `MAX_MATCH`.
        place: where the next token goes.
        end: of the page.
    """

    __slots__ = ("end", "place", "tail")

    def __init__(self) -> None:
        self.tail: list[int] = []
        self.place = self.end = 0


_NO_TEXT = TextCursor()


class Table:
    """The log of one tenant's text, and the places of followers in it.

    Args:
        max_bytes: of everything, at least 65,536.
        make_room: called with the number of bytes before they are allocated.

    Attributes:
        chances: chances of followers, learnt from the tenant's requests.
        num_bytes: bytes allocated.
    """

    def __init__(self, max_bytes: int, make_room: Callable[[int], None] = lambda _: None) -> None:
        self._make_room, self.chances = make_room, Chances()
        share = max_bytes * 15 // 16 - _OBJECTS  # arrays that grow take a sixteenth in advance
        self._max_pages = max(2, share // (_PAGE_BYTES + PAGE // WAYS * _ROW_BYTES))
        self._max_rows = self._rows = self._max_pages * PAGE // WAYS
        while self._rows >= 2 * _FIRST_ROWS:
            self._rows //= 2
        make_room(_OBJECTS + _PAGE_BYTES + self._rows * _ROW_BYTES)
        self._log, self._owners, self._next = array("i", _EMPTY), [_NO_TEXT], 0
        self._tables = [(n, array("i", [0]) * (WAYS * self._rows)) for n in LEADERS]
        self.num_bytes = self._measured()
        make_room(self.num_bytes)

    def write(self, text: TextCursor, token_ids: Sequence[int]) -> None:
        """Append to a text, and enter each token as the latest follower of its leaders."""
        page = text.place // PAGE
        if page >= len(self._owners) or self._owners[page] is not text:
            text.end = text.place  # the text has no page yet, or lost it
        (long, longs), (short, shorts) = self._tables
        log, place, rows, turned = self._log, text.place, self._rows, 0
        for i, token in enumerate(token_ids):
            if place == text.end:
                text.tail = [*text.tail, *token_ids[max(turned, i - MAX_MATCH) : i]][-MAX_MATCH:]
                self._turn(text)
                place, rows, turned = text.place, self._rows, i
            for n, table in ((long, longs), (short, shorts)):
                row = hash(tuple(log[place - n : place])) % rows * WAYS
                if log[table[row]] != token:
                    _move_up(log, table, row, token)
                table[row] = place
            log[place] = token
            place += 1
        text.place = place
        text.tail = [*text.tail, *token_ids[max(turned, len(token_ids) - MAX_MATCH) :]][-MAX_MATCH:]

    def followers(self, tail: list[int]) -> list[Follower]:
        """Return what followed the last tokens of a text: the longest match first, then the latest."""
        followers: dict[int, Follower] = {}
        log, back = self._log, tail[::-1]
        for n, table in self._tables:
            row = hash(tuple(tail[-n:])) % self._rows * WAYS
            for place in table[row : row + WAYS]:
                token = log[place]
                if token in followers or token < 0:
                    continue
                before = place - 1
                for same in back:
                    if log[before] != same:  # an end mark never matches
                        break
                    before -= 1
                if place - before > n:
                    followers[token] = token, place, place - before - 1
        return sorted(followers.values(), key=_by_match) if len(followers) > 1 else [*followers.values()]

    def token_at(self, place: int) -> int:
        """Return the token at a place; negative where a text ends."""
        return self._log[place] if 0 <= place < len(self._log) else _END

    def _turn(self, text: TextCursor) -> None:
        """Give a text the next page, or else the oldest one, and copy the text's last tokens to its beginning."""
        if self._next == len(self._owners) < self._max_pages:
            self._grow()
        self._next %= len(self._owners)
        first, tail = self._next * PAGE, array("i", text.tail)
        self._log[first : first + PAGE] = _EMPTY
        self._log[first + MAX_MATCH - len(tail) : first + MAX_MATCH] = tail
        self._owners[self._next] = text
        text.place, text.end = first + MAX_MATCH, first + PAGE - 1
        self._next += 1

    def _grow(self) -> None:
        """Add a page, and double the rows if they are few: both halves are equal, so all leaders keep their rows."""
        more = self._rows * WAYS < 2 * len(self._log) and 2 * self._rows <= self._max_rows
        self._make_room((_PAGE_BYTES + more * self._rows * _ROW_BYTES) * 17 // 16)
        self._log.extend(_EMPTY)
        self._owners.append(_NO_TEXT)
        if more:
            self._rows *= 2
            for _, table in self._tables:
                table.extend(table)
        self.num_bytes = self._measured()
        self._make_room(0)  # arrays allocate more than they need

    def _measured(self) -> int:
        arrays = [self._log, *(table for _, table in self._tables)]
        return _OBJECTS + (_PAGE_BYTES - PAGE * 4) * len(self._owners) + sum(map(sys.getsizeof, arrays))


def _move_up(log: array[int], table: array[int], row: int, token: int) -> None:
    """Free the first place of a row: drop the place of the same token, or else the oldest place."""
    a, b, c, _ = table[row : row + WAYS]
    if log[b] == token:
        table[row + 1] = a
    elif log[c] == token:
        table[row + 1], table[row + 2] = a, b
    else:
        table[row + 1], table[row + 2], table[row + 3] = a, b, c


def _by_match(follower: Follower) -> int:
    return -follower[2]


class Tenants:
    """A table for each tenant, all within one bound; the least recently used one is dropped first.

    Args:
        max_bytes: of all of them together.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._tables: OrderedDict[str, Table] = OrderedDict()

    def table(self, tenant: str) -> Table:
        """Return a tenant's table, empty at first."""
        table = self._tables.pop(tenant, None) or Table(self._max_bytes, self._make_room)
        self._tables[tenant] = table
        return table

    @property
    def num_bytes(self) -> int:
        """Bytes of all tables."""
        return sum(table.num_bytes for table in self._tables.values())

    def clear(self) -> None:
        """Drop all tables."""
        self._tables.clear()

    def _make_room(self, num_bytes: int) -> None:
        """Drop the least recently used tables; never the calling one, which has the same bound of its own."""
        taken = self.num_bytes
        while self._tables and taken + num_bytes > self._max_bytes:
            taken -= self._tables.popitem(last=False)[1].num_bytes
