"""How likely it is that a token comes next, by class: a prior, and what came true since. Numbers without text."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import TypeAlias

RATE = 0.01
"""Weight of an observation, once there were many."""

FIRST_RATE = 0.05
"""That of the first: a prior is worth 20."""

PRIOR = (
    0.05, 0.09, 0.05, 0.09, 0.02, 0.03, 0.02, 0.05, 0.02, 0.03, 0.02, 0.08,
    0.38, 0.73, 0.20, 0.58, 0.02, 0.42, 0.10, 0.43, 0.02, 0.34, 0.05, 0.35,
    0.45, 0.76, 0.16, 0.44, 0.09, 0.27, 0.11, 0.59, 0.04, 0.23, 0.06, 0.34,
    0.58, 0.79, 0.20, 0.35, 0.09, 0.20, 0.17, 0.47, 0.04, 0.23, 0.08, 0.28,
    0.83, 0.94, 0.27, 0.41, 0.20, 0.25, 0.21, 0.47, 0.05, 0.20, 0.13, 0.28,
    0.01, 0.04, 0.07, 0.08, 0.11, 0.15, 0.24, 0.36, 0.02, 0.05, 0.12, 0.14, 0.17, 0.22, 0.41, 0.56,
    0.01, 0.01, 0.01, 0.02, 0.02, 0.02, 0.05, 0.12, 0.01, 0.01, 0.02, 0.04, 0.05, 0.06, 0.15, 0.33,
)  # fmt: skip
"""By class, from recorded answers (docs/LOG.md): a row for each length of a match; then what frozen tables say."""

Found: TypeAlias = tuple[int, int, int]
"""A token that may come next, its place in the log (negative: in no log), and the class of its chance."""


class Chances:
    """How often a token of a class came next.

    In a class are tokens of one length of the match before them (0, 1, 2-3, 4-7, 8 and more) and one rank among the
    followers (0, 1, 2 and more); it tells, too, whether the two longest matches are equally long, and whether the token
    is where the text goes on that was followed so far. What frozen tables say is in classes of its own.

    Attributes:
        values: by class.
    """

    def __init__(self) -> None:
        self.values = array("d", PRIOR)
        self._rates = array("d", [FIRST_RATE]) * len(PRIOR)

    def learn(self, found: Sequence[Found], actual: int) -> None:
        """One of the tokens came, or none of them."""
        values, rates = self.values, self._rates
        for token, _, kind in found:
            rate = rates[kind]
            values[kind] += ((token == actual) - values[kind]) * rate
            if rate > RATE:
                rates[kind] = rate / (1 + rate)
