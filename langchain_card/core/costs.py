"""Estimates learned while steps run: step times by size, and how far the chances of a drafter can be trusted."""

from __future__ import annotations

import bisect
import math
from collections import Counter
from collections.abc import Sequence

DECAY = 0.9
"""Weight of the past against one new observation."""

SPEED_DECAY = 0.8
"""Weight of the past for the speed of a device, which may change at once."""

SIZE_DECAY = 0.98
"""Weight of the past for the ratio of step times between sizes, which hardly changes."""

EXACT_SIZES = 8
"""Step times of so many sizes are kept apart: kernels multiply in blocks of rows, and a row more may begin another."""

MAX_SURPRISE = 2.0
"""A step counts as at most this many times longer, or shorter, than expected."""

FIRST_PROBE = 32
"""Passes after which a step that does not seem to pay is tried again."""

EXPECTED_WEIGHT = 8.0
"""Tokens that the expectation is worth before it was compared with what was measured."""

TEXT_DECAY = 0.999
"""Weight of the past against a pass, for averages over many texts: single ones differ much."""

ROW_COST = 0.05
"""Assumed cost of one more row, as a share of a step, before it was measured."""


class Mean:
    """A decaying mean: a new observation weighs 1 - decay, the first ones more.

    Attributes:
        value: the mean; at first the prior.
        weight: number of observations behind it; at first the number that the prior is worth.
    """

    __slots__ = ("_decay", "value", "weight")

    def __init__(self, prior: float = 0.0, weight: float = 0.0, decay: float = DECAY) -> None:
        self.value = prior
        self.weight = weight
        self._decay = decay

    def copy(self) -> Mean:
        """Return an independent copy."""
        return Mean(self.value, self.weight, self._decay)

    def add(self, value: float, weight: float = 1.0) -> None:
        """Add one observation; a `weight` below 1 adds a part of one."""
        self.weight = self.weight * self._decay ** min(weight, 1.0) + weight
        self.value += (value - self.value) * weight / self.weight


class StepTimes:
    """Measured seconds of a step by its number of rows.

    Sizes up to 8 are kept apart, and two per octave above. Their common factor, the speed of the device, is followed
    at once: when the device slows down, the times of all sizes rise, even of those that were not observed since.
    """

    def __init__(self) -> None:
        self._speed = 1.0
        self._sizes: dict[int, tuple[Mean, Mean]] = {}
        self._points: list[tuple[float, float]] = []

    def copy(self) -> StepTimes:
        """Return a copy, which learns independently from here on."""
        copied = StepTimes()
        copied._speed, copied._points = self._speed, self._points
        copied._sizes = {about: (size.copy(), seconds.copy()) for about, (size, seconds) in self._sizes.items()}
        return copied

    def observe(self, rows: int, elapsed: float, weight: float = 1.0) -> None:
        """Add a step over `rows` rows that took `elapsed` seconds; `weight` is below 1 if it is reported in parts."""
        if (about := _size(rows)) not in self._sizes:
            self._sizes[about] = Mean(decay=SIZE_DECAY), Mean(decay=SIZE_DECAY)
        size, seconds = self._sizes[about]
        if (expected := self.at(rows)) > 0:
            surprise = min(max(elapsed / expected, 1 / MAX_SURPRISE), MAX_SURPRISE)
            elapsed = min(elapsed, MAX_SURPRISE * expected)
            if 0 < seconds.weight <= 1 and surprise < 1:
                seconds.weight = 0.0  # of the first two the shorter counts: the first may have been cold
            elif seconds.weight:
                self._speed *= (1 + (surprise - 1) * (1 - SPEED_DECAY)) ** weight
        size.add(rows, weight)
        seconds.add(elapsed / self._speed, weight)
        self._points = sorted((size.value, seconds.value) for size, seconds in self._sizes.values())
        for i in reversed(range(len(self._points) - 1)):  # more rows are never faster: the measurement was disturbed
            self._points[i] = self._points[i][0], min(self._points[i][1], self._points[i + 1][1])

    def slow_down(self, factor: float) -> None:
        """Expect all steps to take so many times as long: the device was slower, or faster, when others ran."""
        self._speed *= factor

    def at(self, rows: int = 1) -> float:
        """Return the seconds of a step over `rows` rows, interpolated between measured sizes; 0 without any."""
        points = self._points
        if not points or rows <= points[0][0]:
            return self._speed * points[0][1] if points else 0.0
        i = bisect.bisect_left(points, (rows, 0.0))
        (few, low), (many, high) = points[i - 1], points[min(i, len(points) - 1)]
        slope = (high - low) / (many - few) if many > few else self._slope()
        return self._speed * (low + max(slope, 0.0) * (rows - few))

    def row_cost(self, rows: int = 1) -> float:
        """Return the seconds that one more row adds to a step over `rows` rows, on the way to half as many more."""
        more = max(1, rows // 2)
        return (self.at(rows + more) - self.at(rows)) / more

    def _slope(self) -> float:
        if not self._points:
            return 0.0
        (few, low), (many, high) = self._points[0], self._points[-1]
        return max(0.0, high - low) / (many - few) if many > few else ROW_COST * low


def _size(rows: int) -> int:
    """Return the largest of 1 to 8, 12, 16, 24, ... that is not above `rows`."""
    if rows <= EXACT_SIZES:
        return rows
    power = 1 << rows.bit_length() - 1
    return power + power // 2 if rows >= power + power // 2 else power


class Probe:
    """The schedule by which a choice that does not seem to pay is tried again: its costs may have been disturbed.

    It is tried after 32 passes without it, then after 64, 128, ..., so that a choice that never pays costs little.

    Args:
        first: passes before the first trial.

    Attributes:
        passes: passes since it was tried.
    """

    def __init__(self, first: int = FIRST_PROBE) -> None:
        self.passes, self._first, self._after = 0, first, first

    @property
    def due(self) -> bool:
        """True when it is to be tried."""
        return self.passes >= self._after

    def missed(self) -> None:
        """Note a pass without it."""
        self.passes += 1

    def seen(self) -> None:
        """Note a pass with it, as a trial or because it pays."""
        self._after = 2 * self._after if self.due else self._first
        self.passes = 0


class CostModel:
    """Measured costs under one load, in seconds.

    Args:
        num_seqs: requests that run.
        alike: the model of a load with other requests; its times are taken over.

    Attributes:
        num_seqs: requests that ran when it was made.
        draft: times of a draft step, by nodes expanded.
        sharing: number of requests that share a draft step: nodes of all over nodes of one.
        target: times of a target pass, by rows verified.
        read_cost: time in which a draft reads a token of a text.
        has_read: whether a draft has read before.
        per_token: time per token of all answers together.
        pace: tokens of an answer a pass.
        per_expected: measured time per token as a multiple of the expected one, over many texts.
        draft_probe, window_probe: when to try drafting, and verifying candidates, although it does not seem to pay.
    """

    def __init__(self, num_seqs: int = 1, alike: CostModel | None = None) -> None:
        self.draft: StepTimes = alike.draft.copy() if alike is not None else StepTimes()
        self.target: StepTimes = alike.target.copy() if alike is not None else StepTimes()
        self.sharing = Mean(prior=float(num_seqs))
        self.num_seqs: int = num_seqs
        self.read_cost: Mean = Mean() if alike is None else alike.read_cost.copy()
        self.has_read: bool = alike is not None and alike.has_read
        self.per_token: Mean = Mean(prior=self.target.at(num_seqs) / num_seqs)
        self.pace: Mean = Mean(prior=1.0)
        self.per_expected: Mean = Mean(1.0, EXPECTED_WEIGHT, TEXT_DECAY)
        if alike is not None and alike.num_seqs.bit_length() == num_seqs.bit_length():
            self.per_token, self.per_expected = alike.per_token.copy(), alike.per_expected.copy()
        self.draft_probe = Probe(FIRST_PROBE * num_seqs)  # a draft has as many texts to read
        self.window_probe = Probe()

    @property
    def known(self) -> bool:
        """True when steps of draft and target were measured."""
        return bool(self.draft.at(1) and self.target.at(1))

    @property
    def comparable(self) -> bool:
        """True when a time per token follows: from the steps, or from the passes of a target whose draft only read."""
        return bool(self.target.at(1) and (self.draft.at(1) or self.read_cost.value))

    def slow_down(self, factor: float) -> None:
        """Expect all steps to take so many times as long."""
        self.draft.slow_down(factor)
        self.target.slow_down(factor)

    def draft_share(self, nodes: int) -> float:
        """Return one request's share, in seconds, of a draft step that expands `nodes` nodes for it."""
        return self.draft.at(round(self.sharing.value * nodes)) / self.sharing.value

    def observe_expected(self, ratio: float, tokens: int) -> None:
        """Learn the measured time of `tokens` tokens as a multiple of the expected one; one pass changes it little."""
        usual = self.per_expected.value
        self.per_expected.add(min(max(ratio, usual / MAX_SURPRISE), usual * MAX_SURPRISE), tokens)

    def takers(self, worth: Sequence[float], nodes: Sequence[int]) -> set[int]:
        """Return the requests that take a draft step together, so that they gain the most.

        Args:
            worth: [requests] seconds that the step saves each.
            nodes: [requests] nodes that it expands for each.
        """
        gained, total, best, count = 0.0, 0, 0.0, 0
        order = sorted(range(len(worth)), key=worth.__getitem__, reverse=True)
        for i, request in enumerate(order, 1):
            gained, total = gained + worth[request], total + nodes[request]
            if gained - self.draft.at(total) > best:
                best, count = gained - self.draft.at(total), i
        return set(order[:count])

    def widths(self, chances: Sequence[Sequence[float]], prices: Sequence[float]) -> list[int]:
        """Return how many candidates of each request to verify: each adds its chance in tokens, and its row in time.

        Args:
            chances: [requests] chances of the candidates, likeliest first.
            prices: [requests] seconds that a token is worth.
        """
        fewest, gained, best, count = self.target.at(len(chances)), 0.0, 0.0, 0
        order = sorted((-chance * prices[request], request) for request, row in enumerate(chances) for chance in row)
        for i, (negated, _) in enumerate(order, 1):
            gained -= negated
            worth = gained - (self.target.at(len(chances) + i) - fewest)
            if worth > best:
                best, count = worth, i
        widths = Counter(request for _, request in order[:count])
        return [widths[request] for request in range(len(chances))]


CHANCES = (0.005, 0.015, 0.05, 0.1, 0.2, 0.35, 0.5, 0.65, 0.8, 0.9, 0.96, 0.99, 1.0)
"""Upper ends of the classes of stated chances; a class is calibrated as one."""

PRIOR_WEIGHT = 20.0
CHANCE_DECAY = 0.995
MIN_CHANCE = 1e-6

_SCORES = tuple(map(math.log, CHANCES[:-1]))


class Calibration:
    """The chances that one drafter states, lowered to the share of them that came true.

    An overconfident drafter would fill the window and crowd out better ones. A modest drafter keeps its own chances,
    which are good enough to choose by (docs/LOG.md, 2026-11-23).

    Args:
        prior: share of a stated chance that is trusted before anything was learned.
    """

    def __init__(self, prior: float = 1.0) -> None:
        self._stated = [Mean(chance, PRIOR_WEIGHT, CHANCE_DECAY) for chance in CHANCES]
        self._true = [Mean(prior * chance, PRIOR_WEIGHT, CHANCE_DECAY) for chance in CHANCES]
        self._lower = [math.log(prior)] * len(CHANCES)

    def score(self, stated: float) -> float:
        """Return the log chance to use in place of the stated one."""
        return stated + self._lower[bisect.bisect_left(_SCORES, stated)]

    def learn(self, stated: float, *, taken: bool) -> None:
        """Learn whether a candidate was `taken`, when the token after its parent was committed."""
        about = bisect.bisect_left(_SCORES, stated)
        self._stated[about].add(math.exp(stated))
        self._true[about].add(taken)
        true, believed = max(self._true[about].value, MIN_CHANCE), max(self._stated[about].value, MIN_CHANCE)
        self._lower[about] = min(0.0, math.log(true / believed))
