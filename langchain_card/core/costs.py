"""Costs learned while steps run: the speed of a device, step times by size, and what a token takes."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate

DECAY = 0.9
"""Weight of the past against one new observation."""

SURPRISE_DECAY = 0.8
"""Weight of the past for the direction in which steps err: a device may change its speed at once."""

SIZE_DECAY = 0.98
"""Weight of the past for what hardly changes."""

EXACT_SIZES = 8
"""Step times of so many sizes are kept apart."""

STEP_NOISE, SPEED_CHANGE, SIZE_CHANGE = 0.01, 5e-4, 2e-6
"""Variances of logarithms: of a measured time, and what the speed of a device and the time of a size gain each step."""

GUESS = 0.02
"""Variance of the logarithm of a size's time that was measured under another load: one step outweighs it."""

GUESS_ERROR = 0.25
"""Share by which such a time may be too long: two standard deviations."""

OWN_SHARE = 0.3
"""Share of a change of speed, while a load did not run, that this load may not have in common with those that did."""

MAX_SURPRISE = 2.0
"""A step counts as at most this many times longer, or shorter, than expected."""

FIRST = 1.0 + 1e-6
"""Steps up to the end of the first, which may be reported in parts."""

SHORTEST = 1e-9
"""Seconds that a step takes at least."""

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
        self.value, self.weight, self._decay = prior, weight, decay

    def copy(self) -> Mean:
        """Return an independent copy."""
        return Mean(self.value, self.weight, self._decay)

    def add(self, value: float, weight: float = 1.0) -> None:
        """Add one observation; a `weight` below 1 adds a part of one."""
        decay = self._decay if weight >= 1.0 else self._decay**weight
        self.weight = total = self.weight * decay + weight
        self.value += (value - self.value) * weight / total


@dataclass(slots=True)
class Factor:
    """A factor of step times, as far as it is known.

    Attributes:
        value, variance: its likeliest value; the variance of its logarithm.
    """

    value: float = 1.0
    variance: float = 0.0


@dataclass(slots=True)
class Speed(Factor):
    """The speed of a device: the factor by which its steps take longer than at first.

    It may change at once, because another program runs or the processor is throttled. So it is uncertain while steps
    keep erring in one direction.

    Attributes:
        surprise: mean logarithm of measured over expected times.
        steps: number of steps that were measured.
    """

    surprise: Mean = field(default_factory=lambda: Mean(decay=SURPRISE_DECAY))
    steps: float = 0.0


class Pace:
    """The pace of one load on a device: the device's speed, and a factor of the load's own.

    What a busy machine makes of a schedule that does not run is not known. So the own factor becomes uncertain while
    other loads run, the more the speed changes meanwhile.

    Args:
        speed: of the device; all its loads share it.

    Attributes:
        own: the load's own factor.
    """

    def __init__(self, speed: Speed) -> None:
        self.speed, self.own = speed, Factor()
        self._steps, self._value = speed.steps, speed.value  # when the load ran last

    @property
    def value(self) -> float:
        """Factor by which steps take longer than at first."""
        return self.speed.value * self.own.value

    def resume(self) -> None:
        """Note that a step was measured, before it is learned."""
        own, elsewhere = self.own, OWN_SHARE * math.log(self.speed.value / self._value)
        own.variance += SIZE_CHANGE * (self.speed.steps - self._steps) + elsewhere**2

    def learn(self, size: Factor, surprise: float, weight: float) -> None:
        """Correct all factors of a step's time, each as far as it is uncertain: a Kalman filter over logarithms.

        Args:
            size: time of a step of that size, at the first pace.
            surprise: logarithm of measured over expected time.
            weight: share of a step that was measured.
        """
        speed = self.speed
        total = speed.variance + self.own.variance + size.variance + STEP_NOISE / weight
        for factor in (speed, self.own, size):
            factor.value *= math.exp(surprise * factor.variance / total)
            factor.variance -= factor.variance**2 / total
        speed.surprise.add(surprise, weight)
        speed.variance = max(speed.variance + SPEED_CHANGE * weight, speed.surprise.value**2)

    def end_step(self, weight: float) -> None:
        """Note that a step, or a share of one, was learned."""
        self.speed.steps += weight
        self._steps, self._value = self.speed.steps, self.speed.value


@dataclass(slots=True)
class SizeTime(Factor):
    """The time of a step of one size, in seconds at the first pace.

    Attributes:
        rows, steps: mean number of rows; number of measured steps.
        last: number of steps of the device at the last one.
    """

    rows: Mean = field(default_factory=lambda: Mean(decay=SIZE_DECAY))
    steps: float = 0.0
    last: float = 0.0


class StepTimes:
    """Measured seconds of a step by its number of rows.

    Sizes up to 8 are kept apart, and four per octave above. 17 to 20 rows share a time, but not with 16: kernels
    multiply in blocks of rows. A time is a product: the size's own, which hardly changes, and the pace of the load.

    The first step of a size may have been cold, so that the shorter of the first two counts.

    Args:
        pace: of the load on the device.

    Attributes:
        steps: number of measured steps.
    """

    def __init__(self, pace: Pace | None = None) -> None:
        self.pace, self.steps = pace or Pace(Speed()), 0.0
        self._sizes: dict[int, SizeTime] = {}  # ascending
        self._rows, self._seconds = list[float](), list[float]()  # [sizes] ascending; at the first pace

    def copy(self, pace: Pace) -> StepTimes:
        """Return the times as a first guess for another load on the same device."""
        copied, own = StepTimes(pace), self.pace.own.value
        copied.steps = self.steps
        copied._rows, copied._seconds = self._rows, [own * seconds for seconds in self._seconds]
        for about, size in self._sizes.items():
            variance = max(size.variance, GUESS)
            copied._sizes[about] = replace(size, value=own * size.value, variance=variance, rows=size.rows.copy())
        return copied

    def observe(self, rows: int, elapsed: float, weight: float = 1.0) -> None:
        """Add a step over `rows` rows that took `elapsed` seconds; `weight` is below 1 if it is reported in parts."""
        self.pace.resume()
        usual = self.at(rows) or elapsed
        elapsed = max(SHORTEST, min(elapsed, MAX_SURPRISE * usual))
        if (about := _size(rows)) not in self._sizes:
            self._sizes = dict(sorted([*self._sizes.items(), (about, SizeTime(last=self.pace.speed.steps))]))
        size = self._sizes[about]
        if size.steps + weight <= FIRST or (size.steps <= FIRST and elapsed < usual):
            size.value, size.variance = elapsed / self.pace.value, STEP_NOISE
        else:
            size.variance += SIZE_CHANGE * (self.pace.speed.steps - size.last)
            self.pace.learn(size, math.log(max(1 / MAX_SURPRISE, elapsed / usual)), weight)
        size.steps, self.steps = size.steps + weight, self.steps + weight
        self.pace.end_step(weight)
        size.last = self.pace.speed.steps
        size.rows.add(rows, weight)
        sizes = self._sizes.values()
        self._rows = [size.rows.value for size in sizes]
        seconds = accumulate([size.value for size in reversed(sizes)], min)
        self._seconds = [*seconds][::-1]  # more rows are never faster: the measurement was disturbed

    def at(self, rows: float = 1) -> float:
        """Return the seconds of a step over `rows` rows, interpolated between measured sizes; 0 without any.

        Rows become dearer with their number, at first because reading the weights takes longer than multiplying them.
        So below all measured sizes, a row saves at most what one more costs there. This much is expected: small steps
        are tried, and measured.
        """
        if not self._rows:
            return 0.0
        i = bisect_left(self._rows, rows) or 1
        few, low = self._rows[i - 1], self._seconds[i - 1]
        slope = (self._seconds[i] - low) / (self._rows[i] - few) if i < len(self._rows) else self._slope()
        seconds = low + slope * (rows - few)
        return self.pace.value * (seconds if rows >= few else max(seconds, low * (rows / few)))

    def knows(self, rows: int) -> bool:
        """Return whether steps of this size were measured under this load, and not too long ago."""
        size = self._sizes.get(_size(rows))
        return size is not None and size.variance + SIZE_CHANGE * (self.pace.speed.steps - size.last) < GUESS

    def row_cost(self, rows: int = 1) -> float:
        """Return the seconds that one more row adds to a step over `rows` rows, on the way to half as many more."""
        more = max(1, rows // 2)
        return (self.at(rows + more) - self.at(rows)) / more

    def _slope(self) -> float:
        few, many, low, high = self._rows[0], self._rows[-1], self._seconds[0], self._seconds[-1]
        return (high - low) / (many - few) if many > few else ROW_COST * low


def _size(rows: int) -> int:
    """Return the smallest of 1 to 8, 10, 12, 14, 16, 20, 24, 28, 32, 40, ... that is not below `rows`."""
    if rows <= EXACT_SIZES:
        return rows
    spacing = (1 << (rows - 1).bit_length()) // 8
    return -(-rows // spacing) * spacing


class Probe:
    """The schedule by which a choice that does not seem to pay is tried again: costs may have been disturbed.

    It is tried after `first` passes without it, then after twice as many, four times, ..., so that a choice that never
    pays costs little. For a schedule, answers take the place of passes.

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

    def count(self, *, seen: bool) -> None:
        """Count a pass with it, as a trial or because it pays, or one without it."""
        if seen:
            self._after = 2 * self._after if self.due else self._first
        self.passes = 0 if seen else self.passes + 1

    def paid(self) -> None:
        """Note that it pays: after it has stopped to pay, it is tried soon."""
        self.passes, self._after = 0, self._first


class CostModel:
    """Measured costs under one load, in seconds.

    Args:
        target, draft: speeds of their devices, which may be one.
        num_seqs: requests that run.
        alike: the model of a load with other requests; its times are taken over.

    Attributes:
        num_seqs: requests that ran when it was made.
        draft: times of a draft step, by nodes expanded.
        sharing: number of requests that share a draft step: nodes of all over nodes of one.
        target: times of a target pass, by rows verified.
        has_read: whether a draft has read before.
        per_token: time per token of all answers together.
        pace: tokens of an answer a pass.
        per_expected: measured time per token as a multiple of the expected one, over many texts that are drafted for.
        per_pass: time from pass to pass without a draft, as a multiple of the pass's own.
        draft_probe, read_probe, window_probe: when to try drafting, reading for it, and verifying candidates, although
            it does not seem to pay.
        plain_probe: when to verify no candidates, although they seem to pay: what a pass takes without them may be old.
    """

    def __init__(self, target: Speed, draft: Speed, num_seqs: int = 1, alike: CostModel | None = None) -> None:
        target_pace = Pace(target)
        draft_pace = target_pace if draft is target else Pace(draft)
        self.target: StepTimes = StepTimes(target_pace) if alike is None else alike.target.copy(target_pace)
        self.draft: StepTimes = StepTimes(draft_pace) if alike is None else alike.draft.copy(draft_pace)
        self.sharing = Mean(prior=float(num_seqs))
        self.num_seqs: int = num_seqs
        self._reading: Mean = Mean() if alike is None else alike._reading.copy()  # at the draft's first speed
        self.has_read: bool = alike is not None and alike.has_read
        self.per_token: Mean = Mean(prior=self.target.at(num_seqs) / num_seqs)
        self.pace: Mean = Mean(prior=1.0)
        self.per_expected, self.per_pass = (Mean(1.0, EXPECTED_WEIGHT, TEXT_DECAY) for _ in range(2))
        if alike is not None and alike.num_seqs.bit_length() == num_seqs.bit_length():
            self.per_token, self.per_expected = alike.per_token.copy(), alike.per_expected.copy()
        self.draft_probe, self.read_probe = (Probe(FIRST_PROBE * num_seqs) for _ in range(2))  # of as many texts
        self.window_probe, self.plain_probe = Probe(), Probe(4 * FIRST_PROBE)  # a plain pass brings the fewest tokens

    @property
    def read_cost(self) -> float:
        """Seconds in which a draft reads a token of a text; 0 before that was measured."""
        return self._reading.value * self.draft.pace.value

    @property
    def known(self) -> bool:
        """True when steps of draft and target were measured, and not only the draft's first."""
        return bool(self.draft.steps > FIRST and self.target.at(1))

    @property
    def comparable(self) -> bool:
        """True when a time per token follows: from the steps, or from the passes of a target whose draft only read."""
        return bool(self.target.at(1) and (self.draft.at(1) or self.read_cost))

    def draft_share(self, nodes: int) -> float:
        """Return one request's share, in seconds, of a draft step that expands `nodes` nodes for it."""
        return self.draft.at(round(self.sharing.value * nodes)) / self.sharing.value

    def observe_expected(self, ratio: float, tokens: int) -> None:
        """Learn the measured time of `tokens` tokens as a multiple of the expected one; one pass changes it little."""
        usual = self.per_expected.value
        self.per_expected.add(min(max(ratio, usual / MAX_SURPRISE), usual * MAX_SURPRISE), tokens)

    def observe_reading(self, per_token: float) -> None:
        """Learn the time in which a draft reads a token. The first time is left out: the draft may have been cold."""
        if self.has_read:
            at_first = per_token / self.draft.pace.value
            self._reading.add(min(at_first, (self._reading.value or at_first) * MAX_SURPRISE))
        self.has_read = True

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

        None, where the time of a pass without candidates is a guess and decides: so it is measured.

        Args:
            chances: [requests] chances of the candidates, likeliest first.
            prices: [requests] seconds that a token is worth.
        """
        rows, fewest = len(chances), self.target.at(len(chances))
        best, count = 0.0 if self.target.knows(rows) else GUESS_ERROR * fewest, 0
        order = sorted([(-chance * prices[request], request) for request, row in enumerate(chances) for chance in row])
        gains = [*accumulate(-negated for negated, _ in order)]
        for i, gained in enumerate(gains, 1):
            cost = self.target.at(rows + i) - fewest
            if gained - cost > best:
                best, count = gained - cost, i
            elif gains[-1] - cost <= best:
                break  # all that is left is not worth its rows
        taken = [request for _, request in order[:count]]
        return [taken.count(request) for request in range(rows)]
