"""`Guide`: a grammar over the rows of one answer, with an ending that fits the answer's budget.

Each row follows tokens of its own, so each has its own state of the grammar and its own mask. An answer with a budget
can always be ended within it: after every token an ending is known that fits. If the model's choice would leave none,
the known ending is written instead. Masks and endings depend on the tokens before a row alone, so that a constrained
answer, too, is the same under every schedule.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias, TypeVar

import numpy as np
import torch
from torch import Tensor

from langchain_card.core.messages import NO_TOKEN
from langchain_card.ports import Constraint


@dataclass(frozen=True, slots=True)
class _Place:
    """The grammar's state after some tokens (None if it failed), and tokens that end the text."""

    constraint: Constraint | None
    ending: tuple[int, ...] = ()


_Way: TypeAlias = tuple[int, ...]  # tokens that follow the last committed one
_T = TypeVar("_T")


class Guide:
    """The grammar of one answer.

    Args:
        constraint: the grammar's state before the answer.
        eos_ids: tokens that end an answer.
        max_tokens: the answer's budget; None for masks alone.
    """

    def __init__(self, constraint: Constraint, eos_ids: Sequence[int], max_tokens: int | None = None) -> None:
        self._eos_ids, self._left = eos_ids, max_tokens
        ending = constraint.closing(max_tokens) if max_tokens is not None else ()
        self._here = _Place(constraint, ending or ())
        self._states: dict[_Way, Constraint | None] = {}  # None if the tokens are forbidden
        self._walked: dict[_Way, _Place | None] = {}  # with endings, which only the walk needs

    def commit(self, token_ids: Sequence[int]) -> None:
        """Advance by committed tokens of the answer."""
        for token in token_ids:
            place = self._behind((token,))
            self._states, self._walked = _moved(self._states, token), _moved(self._walked, token)
            self._here = place or _Place(None)
            if self._left is not None:
                self._left -= 1

    def forbidden(self, ways: Sequence[tuple[int, ...]], width: int) -> Tensor:
        """Return the tokens that must not come next.

        Args:
            ways: [rows] tokens between the last committed one and the token to be chosen.
            width: size of the vocabulary.

        Returns:
            bool [rows, width], on the CPU. Rows where the grammar failed, or outside the walk, forbid nothing.
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
        """Return the tokens of a window's rows; on the walk's path, tokens are replaced where the answer must end.

        Args:
            target_ids: [rows] the model's choice after each row.
            ways: [rows] as in `forbidden`.

        Returns:
            [rows] tokens, and whether any was replaced.
        """
        settled, replaced = list(target_ids), False
        rows = {way: row for row, way in enumerate(ways)}
        way: _Way = ()
        while (row := rows.get(way)) is not None:
            token, place = settled[row], self._behind(way)
            if place is None or token == NO_TOKEN or (token in self._eos_ids and _allows(place, token)):
                break
            if self._behind((*way, token)) is None:
                settled[row] = token = place.ending[0] if place.ending else self._eos_ids[0]
                replaced = True
            way = (*way, token)
        return tuple(settled), replaced

    def _state(self, way: _Way) -> Constraint | None:
        """Return the grammar's state after tokens that follow the last committed one."""
        if not way:
            return self._here.constraint
        if way not in self._states:
            before = self._state(way[:-1])
            self._states[way] = None if before is None or way[-1] in self._eos_ids else _accepted(before, way[-1])
        return self._states[way]

    def _behind(self, way: _Way) -> _Place | None:
        """Return the place after tokens that follow the last committed one."""
        if not way:
            return self._here
        if way not in self._walked:
            before = self._behind(way[:-1])
            self._walked[way] = None if before is None else self._next(before, way[-1], len(way))
        return self._walked[way]

    def _next(self, place: _Place, token: int, depth: int) -> _Place | None:
        """Return the place after a token; None if it is forbidden, or if no ending that fits is known after it."""
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
    """Return the grammar's state after one more token; None if it is forbidden."""
    behind = before.fork()
    return behind if behind.accept(token) else None


def _moved(by_way: dict[_Way, _T], token: int) -> dict[_Way, _T]:
    """Keep the entries whose tokens begin with a committed one, and remove it from their keys."""
    return {way[1:]: known for way, known in by_way.items() if len(way) > 1 and way[0] == token}


def _allows(place: _Place, token: int) -> bool:
    """Return whether the grammar's mask has a token. A grammar that failed masks nothing, and allows no end."""
    return place.constraint is not None and bool(place.constraint.allowed()[token >> 3] >> (token & 7) & 1)
