"""A text as a drafter sees it: what each token would have been to a draft that stands on the true prefix.

A path is drawn independently (`iid_path`) or comes from a recorded trace; every contender runs over either.
"""

from __future__ import annotations

import math
import random
from enum import Enum
from typing import NamedTuple, Protocol

DEEP = 1 << 40  # a reach that never ends


class Kind(Enum):
    """What the target's token is to a drafter on the true prefix."""

    TOP = "first choice of the draft"
    NEAR = "cached sibling, inside a tree window"
    FAR = "cached sibling, outside the window"
    MISS = "not in the cache"


class Token(NamedTuple):
    """One position of the target's text, as the drafter's tree sees it from its parent."""

    kind: Kind
    reach: int  # layers that survive below it before it becomes the root: DEEP under TOP, 0 under MISS


class Path(Protocol):
    """The target's text. A plain list of tokens will do; a trace may decode them lazily."""

    def __len__(self) -> int: ...

    def __getitem__(self, position: int, /) -> Token: ...


TOP, MISS = Token(Kind.TOP, DEEP), Token(Kind.MISS, 0)


def iid_path(
    rng: random.Random, length: int, alpha: float, beta: float, sigma: float = 0.85, phi: float = 0.7
) -> list[Token]:
    """Independent tokens.

    Args:
        rng: draws them.
        length: how many.
        alpha: chance of TOP.
        beta: chance that one that is not is a cached sibling.
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
    """A path as a drafter of one chain sees it: siblings are not cached."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __len__(self) -> int:
        return len(self._path)

    def __getitem__(self, position: int, /) -> Token:
        token = self._path[position]
        return token if token.kind is Kind.TOP else MISS
