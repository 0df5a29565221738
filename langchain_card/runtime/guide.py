"""`Guide`: a grammar over the rows of one answer, and the end that it can still be given.

Each row stands after tokens of its own, so each has its own state of the grammar and its own mask. An answer with a
budget is never led to where it could not be ended within it: behind every token an end is known that fits, and where
the model's choice leaves none, the known one is written instead. Both depend on the tokens before and on nothing else,
so that a constrained answer, too, is the same under every schedule.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias, TypeVar

import numpy as np
import torch
from torch import Tensor

from langchain_card.ports import Constraint


@dataclass(frozen=True, slots=True)
class _Place:
    """After some tokens: the grammar's state, None where it failed, and tokens that end the text."""

    constraint: Constraint | None
    ending: tuple[int, ...] = ()


_Way: TypeAlias = tuple[int, ...]
_T = TypeVar("_T")


class Guide:
    """One answer's.

    Args:
        constraint: before the answer.
        eos_ids: tokens that end an answer.
        max_tokens: of the answer; None for masks alone.
    """

    def __init__(self, constraint: Constraint, eos_ids: Sequence[int], max_tokens: int | None = None) -> None:
        self._eos_ids, self._left = eos_ids, max_tokens
        ending = constraint.closing(max_tokens) if max_tokens is not None else ()
        self._here = _Place(constraint, ending or ())
        self._states: dict[_Way, Constraint | None] = {}  # by tokens behind here; None where they are forbidden
        self._walked: dict[_Way, _Place | None] = {}  # the same with ends, which are looked for on the walk alone

    def commit(self, token_ids: Sequence[int]) -> None:
        """Goes on behind tokens of the answer."""
        for token in token_ids:
            place = self._behind((token,))
            self._states, self._walked = _moved(self._states, token), _moved(self._walked, token)
            self._here = place or _Place(None)
            if self._left is not None:
                self._left -= 1

    def forbidden(self, ways: Sequence[tuple[int, ...]], width: int) -> Tensor:
        """What may not come next.

        Args:
            ways: [rows] tokens between the last committed one and the token to be chosen.
            width: of the vocabulary.

        Returns:
            bool [rows, width], on the CPU. Nothing is forbidden where the grammar failed or the walk never comes.
        """
        masks = np.zeros((len(ways), width), dtype=np.bool_)
        for mask, way in zip(masks, ways, strict=True):
            state = self._state(way)
            if state is not None:
                bits = np.frombuffer(state.allowed(), dtype=np.uint8)
                allowed = np.unpackbits(bits, count=min(width, 8 * len(bits)), bitorder="little")
                if allowed.any():
                    mask[:] = True
                    mask[: len(allowed)] = allowed == 0
        return torch.from_numpy(masks)

    def settle(self, target_ids: Sequence[int], ways: Sequence[tuple[int, ...]]) -> tuple[tuple[int, ...], bool]:
        """The tokens of a window's rows, those on the way of the walk replaced where the answer must come to its end.

        Args:
            target_ids: [rows] what the model chose behind each row.
            ways: [rows] as for `forbidden`.

        Returns:
            [rows] tokens, and whether one was replaced.
        """
        settled, replaced = list(target_ids), False
        rows = {way: row for row, way in enumerate(ways)}
        way: _Way = ()
        while (row := rows.get(way)) is not None:
            token, place = settled[row], self._behind(way)
            if place is None or (token in self._eos_ids and _may_say(place, token)):
                break
            if self._behind((*way, token)) is None:
                settled[row] = token = place.ending[0] if place.ending else self._eos_ids[0]
                replaced = True
            way = (*way, token)
        return tuple(settled), replaced

    def _state(self, way: _Way) -> Constraint | None:
        """The grammar behind tokens that follow the last committed one."""
        if not way:
            return self._here.constraint
        if way not in self._states:
            before = self._state(way[:-1])
            self._states[way] = None if before is None or way[-1] in self._eos_ids else _accepted(before, way[-1])
        return self._states[way]

    def _behind(self, way: _Way) -> _Place | None:
        """The place behind these tokens."""
        if not way:
            return self._here
        if way not in self._walked:
            before = self._behind(way[:-1])
            self._walked[way] = None if before is None else self._next(before, way[-1], len(way))
        return self._walked[way]

    def _next(self, place: _Place, token: int, depth: int) -> _Place | None:
        """The place behind a token; None where it is forbidden, or where no end that fits is known behind it."""
        follows = place.ending[:1] == (token,)
        before = place.constraint if token not in self._eos_ids else None
        constraint = None if before is None else _accepted(before, token)
        if self._left is None:
            return None if constraint is None else _Place(constraint)
        if follows:
            return _Place(constraint, place.ending[1:])
        if constraint is None:
            return None
        left = self._left - depth
        ending = constraint.closing(left)
        return None if ending is None or len(ending) > left else _Place(constraint, ending)


def _accepted(before: Constraint, token: int) -> Constraint | None:
    """The grammar behind one more token; None where it is forbidden."""
    behind = before.fork()
    return behind if behind.accept(token) else None


def _moved(by_way: dict[_Way, _T], token: int) -> dict[_Way, _T]:
    """What is known of the ways that go on behind a token."""
    return {way[1:]: known for way, known in by_way.items() if len(way) > 1 and way[0] == token}


def _may_say(place: _Place, token: int) -> bool:
    """Whether the grammar's mask has it; where the grammar failed, it masks nothing and allows no end."""
    return place.constraint is not None and bool(place.constraint.allowed()[token >> 3] >> (token & 7) & 1)
