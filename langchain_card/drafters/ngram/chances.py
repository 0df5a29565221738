"""`Chances`: chances that a follower comes true, by class: a prior, updated by what came true. It holds no text."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
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
