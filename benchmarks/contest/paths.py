"""Texts as paths: for each token, its kind to a draft whose root is the token before it.

A path is drawn at random (`iid_path`) or converted from a recorded trace. Every contender runs over both.
"""

from __future__ import annotations

import math
import random
from enum import Enum
from typing import NamedTuple, Protocol

DEEP = 1 << 40  # a reach that never ends


class Kind(Enum):
    """The kinds of a target token to a draft whose root is the token before it."""

    TOP = "first choice of the draft"
    NEAR = "cached sibling, inside a tree window"
    FAR = "cached sibling, outside the window"
    MISS = "not in the cache"


class Token(NamedTuple):
    """A token of the target's text and its place in the draft's tree."""

    kind: Kind
    reach: int  # layers that survive below it before it becomes the root: DEEP under TOP, 0 under MISS


class Path(Protocol):
    """The target's text as a sequence of tokens, such as a list."""

    def __len__(self) -> int: ...

    def __getitem__(self, position: int, /) -> Token: ...


TOP, MISS = Token(Kind.TOP, DEEP), Token(Kind.MISS, 0)


def iid_path(
    rng: random.Random, length: int, alpha: float, beta: float, sigma: float = 0.85, phi: float = 0.7
) -> list[Token]:
    """Return a path of independent tokens.

    Args:
        rng: draws them.
        length: number of tokens.
        alpha: chance of TOP.
        beta: chance that another token is a cached sibling.
        sigma: chance that a sibling's subtree survives a further layer.
        phi: chance that a sibling is NEAR.
    """

    def reach() -> int:
        return DEEP if sigma >= 1 else int(math.log(1.0 - rng.random()) / math.log(sigma))

    def token() -> Token:
        if rng.random() < alpha:
            return TOP
        if rng.random() >= beta:
            return MISS
        return Token(Kind.NEAR if rng.random() < phi else Kind.FAR, reach())

    return [token() for _ in range(length)]


class Linear:
    """A path for a draft of one chain, which caches no siblings."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __len__(self) -> int:
        return len(self._path)

    def __getitem__(self, position: int, /) -> Token:
        token = self._path[position]
        return token if token.kind is Kind.TOP else MISS
