"""Estimates learned while steps run: step times by size, and how far the chances of a drafter can be trusted."""

from __future__ import annotations

import bisect
import math
from collections import Counter
from collections.abc import Sequence

DECAY = 0.9
"""Weight of the past against one new observation."""

SPEED_DECAY = 0.8
"""The same for the speed of a device, which may change at once."""

SIZE_DECAY = 0.98
"""The same for how much longer one size of step takes than another, which hardly changes."""

MAX_SURPRISE = 2.0
"""A step that takes so many times longer than was expected, or more, counts as so many."""

FIRST_PROBE = 32
"""Passes after which what does not seem to pay is tried again."""

ROW_COST = 0.05
"""Share of a step that one more row is taken to cost where nothing was measured."""


class Mean:
    """A decaying mean: a new observation counts 1 - decay, the first ones more, a part of one its part.

    Attributes:
        value: the mean; at first the prior.
        weight: how many observations stand behind it; at first those that the prior is worth.
    """

    __slots__ = ("_decay", "value", "weight")

    def __init__(self, prior: float = 0.0, weight: float = 0.0, decay: float = DECAY) -> None:
        self.value = prior
        self.weight = weight
        self._decay = decay

    def copy(self) -> Mean:
        """An independent copy."""
        return Mean(self.value, self.weight, self._decay)

    def add(self, value: float, weight: float = 1.0) -> None:
        """Takes one observation in."""
        self.weight = self.weight * self._decay ** min(weight, 1.0) + weight
        self.value += (value - self.value) * weight / self.weight


class StepTimes:
    """Measured seconds of a step by its number of rows.

    Two sizes an octave are told apart. What they have in common, the speed, is followed at once: when the device slows
    down, every size is known to take longer, whether it was seen since or not.
    """

    def __init__(self) -> None:
        self._speed = 1.0
        self._sizes: dict[int, tuple[Mean, Mean]] = {}
        self._points: list[tuple[float, float]] = []

    def copy(self) -> StepTimes:
        """What is known so far, to be learnt on from here."""
        copied = StepTimes()
        copied._speed, copied._points = self._speed, self._points
        copied._sizes = {about: (size.copy(), seconds.copy()) for about, (size, seconds) in self._sizes.items()}
        return copied

    def observe(self, rows: int, elapsed: float, weight: float = 1.0) -> None:
        """A step over `rows` rows took `elapsed` seconds; `weight` is less than 1 where it is told in parts."""
        if (about := _size(rows)) not in self._sizes:
            self._sizes[about] = Mean(decay=SIZE_DECAY), Mean(decay=SIZE_DECAY)
        size, seconds = self._sizes[about]
        if (expected := self.at(rows)) > 0:
            surprise = min(max(elapsed / expected, 1 / MAX_SURPRISE), MAX_SURPRISE)
            elapsed = min(elapsed, MAX_SURPRISE * expected)
            if 0 < seconds.weight <= 1 and surprise < 1:
                seconds.weight = 0.0  # of the first two the shorter counts: one may have been cold
            elif seconds.weight:
                self._speed *= (1 + (surprise - 1) * (1 - SPEED_DECAY)) ** weight
        size.add(rows, weight)
        seconds.add(elapsed / self._speed, weight)
        self._points = sorted((size.value, seconds.value) for size, seconds in self._sizes.values())
        for i in reversed(range(len(self._points) - 1)):  # more rows are never faster: it was a bad moment
            self._points[i] = self._points[i][0], min(self._points[i][1], self._points[i + 1][1])

    def at(self, rows: int = 1) -> float:
        """Seconds over `rows` rows: on the line between or beyond measured sizes; 0 if nothing was measured."""
        points = self._points
        if not points or rows <= points[0][0]:
            return self._speed * points[0][1] if points else 0.0
        i = bisect.bisect_left(points, (rows, 0.0))
        (few, low), (many, high) = points[i - 1], points[min(i, len(points) - 1)]
        slope = (high - low) / (many - few) if many > few else self._slope()
        return self._speed * (low + max(slope, 0.0) * (rows - few))

    def row_cost(self) -> float:
        """Seconds that one more row adds: measured over the sizes that were tried, else a guess."""
        return self._speed * self._slope()

    def _slope(self) -> float:
        if not self._points:
            return 0.0
        (few, low), (many, high) = self._points[0], self._points[-1]
        return max(0.0, high - low) / (many - few) if many > few else ROW_COST * low


def _size(rows: int) -> int:
    """1, 2, 3, 4, 6, 8, 12, 16, 24, ...: the largest that is not above `rows`."""
    power = 1 << rows.bit_length() - 1
    return power + power // 2 if rows >= power + power // 2 else power


class Probe:
    """When to try once more what does not seem to pay: costs that were measured in a bad moment would stand.

    After 32 passes without it, then 64, 128, ...: where it never pays, it soon costs nothing.

    Args:
        first: passes before the first trial.
    """

    def __init__(self, first: int = FIRST_PROBE) -> None:
        self._passes, self._first, self._after = 0, first, first

    @property
    def due(self) -> bool:
        """Whether to try."""
        return self._passes >= self._after

    def missed(self) -> None:
        """A pass went by without it."""
        self._passes += 1

    def seen(self) -> None:
        """It was done: as a trial, or because it pays."""
        self._after = 2 * self._after if self.due else self._first
        self._passes = 0


class CostModel:
    """Measured costs under one load, in seconds.

    Args:
        num_seqs: requests that run.
        alike: of a load with other numbers of requests; what it says of steps is taken over.

    Attributes:
        draft: a draft step, by nodes expanded.
        sharing: how many requests share a draft step: all nodes over those of one.
        target: a pass of the target, by rows verified.
        per_token: time per token of all answers together.
        draft_probe, window_probe: when to draft, and to verify, what does not seem to pay.
    """

    def __init__(self, num_seqs: int = 1, alike: CostModel | None = None) -> None:
        self.draft: StepTimes = alike.draft.copy() if alike is not None else StepTimes()
        self.target: StepTimes = alike.target.copy() if alike is not None else StepTimes()
        self.sharing = Mean(prior=float(num_seqs))
        self.per_token = Mean(prior=self.target.at(num_seqs) / num_seqs)
        self.draft_probe, self.window_probe = (
            Probe(FIRST_PROBE * num_seqs),
            Probe(),
        )  # a draft has as many texts to read

    @property
    def known(self) -> bool:
        """Whether steps of both sides were measured."""
        return bool(self.draft.at(1) and self.target.at(1))

    def draft_share(self, nodes: int) -> float:
        """Seconds of a draft step that expands `nodes` nodes for one request, which shares it with others."""
        return self.draft.at(round(self.sharing.value * nodes)) / self.sharing.value

    def pays(self, tokens: float, seconds: float) -> bool:
        """Whether `tokens` more tokens are worth so much time."""
        return tokens * self.per_token.value > seconds

    def widths(self, chances: Sequence[Sequence[float]]) -> list[int]:
        """How many candidates of each request to verify: one adds its chance in tokens, and its row in time.

        Args:
            chances: by request, of its candidates, likeliest first.
        """
        fewest, price = self.target.at(len(chances)), self.per_token.value
        order = sorted((-chance, request) for request, of_it in enumerate(chances) for chance in of_it)
        tokens, best, count = 0.0, 0.0, 0
        for i, (negated, _) in enumerate(order, 1):
            tokens -= negated
            worth = tokens * price - (self.target.at(len(chances) + i) - fewest)
            if worth > best:
                best, count = worth, i
        widths = Counter(request for _, request in order[:count])
        return [widths[request] for request in range(len(chances))]


CHANCES = (0.005, 0.015, 0.05, 0.1, 0.2, 0.35, 0.5, 0.65, 0.8, 0.9, 0.96, 0.99, 1.0)
"""Stated chances up to each of these are judged together."""

PRIOR_WEIGHT = 20.0
CHANCE_DECAY = 0.995
MIN_CHANCE = 1e-6

_SCORES = tuple(map(math.log, CHANCES[:-1]))


class Calibration:
    """The chances that one drafter states, lowered to the share of them that came true.

    An overconfident drafter would fill the window and crowd out better ones. A modest drafter keeps its own chances,
    which are good enough to choose by (docs/LOG.md, 2026-11-23).

    Args:
        prior: share of what it states that is believed before anything was learnt.
    """

    def __init__(self, prior: float = 1.0) -> None:
        self._stated = [Mean(chance, PRIOR_WEIGHT, CHANCE_DECAY) for chance in CHANCES]
        self._true = [Mean(prior * chance, PRIOR_WEIGHT, CHANCE_DECAY) for chance in CHANCES]
        self._lower = [math.log(prior)] * len(CHANCES)

    def score(self, stated: float) -> float:
        """The log chance to reckon with, where the drafter states this one."""
        return stated + self._lower[bisect.bisect_left(_SCORES, stated)]

    def learn(self, stated: float, *, taken: bool) -> None:
        """The token after a candidate's parent was committed: the candidate, or not."""
        about = bisect.bisect_left(_SCORES, stated)
        self._stated[about].add(math.exp(stated))
        self._true[about].add(taken)
        true, believed = max(self._true[about].value, MIN_CHANCE), max(self._stated[about].value, MIN_CHANCE)
        self._lower[about] = min(0.0, math.log(true / believed))
