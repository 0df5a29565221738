"""How far the chances that a drafter states are to be believed: learnt from every token that is committed.

A drafter that boasts would fill the window and crowd out those that know better. Its chances are lowered to what came
true of the like; a modest one keeps its own, which are good enough to choose by (docs/LOG.md).
"""

from __future__ import annotations

import bisect
import math

from langchain_card.core.costs import Mean

CHANCES = (0.005, 0.015, 0.05, 0.1, 0.2, 0.35, 0.5, 0.65, 0.8, 0.9, 0.96, 0.99, 1.0)
"""Stated chances up to each of these are judged together."""

PRIOR_WEIGHT = 20.0
DECAY = 0.995
LEAST = 1e-6

_SCORES = tuple(map(math.log, CHANCES[:-1]))


class Calibration:
    """Of one drafter.

    Args:
        prior: share of what it states that is believed before anything was learnt.
    """

    def __init__(self, prior: float = 1.0) -> None:
        self._stated = [Mean(chance, PRIOR_WEIGHT, DECAY) for chance in CHANCES]
        self._true = [Mean(prior * chance, PRIOR_WEIGHT, DECAY) for chance in CHANCES]
        self._lower = [math.log(prior)] * len(CHANCES)

    def score(self, stated: float) -> float:
        """The log chance to reckon with, where the drafter states this one."""
        return stated + self._lower[bisect.bisect_left(_SCORES, stated)]

    def learn(self, stated: float, *, taken: bool) -> None:
        """The token after a candidate's parent was committed: the candidate, or not."""
        about = bisect.bisect_left(_SCORES, stated)
        self._stated[about].add(math.exp(stated))
        self._true[about].add(taken)
        true, believed = max(self._true[about].value, LEAST), max(self._stated[about].value, LEAST)
        self._lower[about] = min(0.0, math.log(true / believed))
