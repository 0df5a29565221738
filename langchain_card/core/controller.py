"""What speculation costs and gains here, learnt while decoding: `Controller`, the policy that measures.

Questions are answered in the currency of the engine's own time per token: a step or a row that takes `t` seconds pays
when it brings more than `t / seconds per token` tokens. Decisions depend on what was observed and on nothing else.
"""

from __future__ import annotations

import bisect
import heapq
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from langchain_card.config import Limits, Pins, Schedule

DECAY = 0.9
"""Weight of the past against one new observation."""

SPEED_DECAY = 0.8
"""The same for the speed of a device, which may change at once."""

SIZE_DECAY = 0.98
"""The same for how much longer one size of step takes than another, which hardly changes."""

MAX_SURPRISE = 2.0
"""A step that takes so many times longer than was expected, or more, counts as so many."""

ROW_COST = 0.05
"""Share of a step that one more row is taken to cost where nothing was measured."""

NARROW_STEPS = 2
"""Draft steps after a miss that expand one node only."""

WAIT_SHARE = 0.6
"""Share of a layer's tokens that waiting for it gains: the draft works on anyhow, and the next round has them."""

MIN_CHANCE = 0.002
"""Nodes that the target reaches with a smaller chance are never expanded."""

FIRST_CHANCE = 0.2
"""Candidates likelier than this are verified before anything was measured."""


class Load(NamedTuple):
    """What runs: costs are learnt apart for each."""

    schedule: Schedule
    num_seqs: int = 1


class Leave(NamedTuple):
    """Draft steps that may be taken.

    Attributes:
        widths: [steps] nodes that each expands at most.
        min_chance: of being reached, below which a node is not expanded.
    """

    widths: tuple[int, ...] = ()
    min_chance: float = 0.0


class Mean:
    """A decaying mean: a new observation counts 1 - decay, the first ones more.

    Attributes:
        value: the mean; at first the prior.
        weight: how many observations stand behind it; at first those that the prior is worth.
    """

    __slots__ = ("_decay", "value", "weight")

    def __init__(self, prior: float = 0.0, weight: float = 0.0, decay: float = DECAY) -> None:
        self.value = prior
        self.weight = weight
        self._decay = decay

    def add(self, value: float, weight: float = 1.0) -> None:
        """Takes one observation in."""
        self.weight = self.weight * self._decay + weight
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

    def observe(self, rows: int, elapsed: float) -> None:
        """A step over `rows` rows took `elapsed` seconds."""
        if _size(rows) in self._sizes and (expected := self.at(rows)) > 0:
            surprise = min(max(elapsed / expected, 1 / MAX_SURPRISE), MAX_SURPRISE)
            self._speed *= 1 + (surprise - 1) * (1 - SPEED_DECAY)
        size, seconds = self._sizes.setdefault(_size(rows), (Mean(decay=SIZE_DECAY), Mean(decay=SIZE_DECAY)))
        size.add(rows)
        seconds.add(elapsed / self._speed)
        self._points = sorted((size.value, seconds.value) for size, seconds in self._sizes.values())

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


class CostModel:
    """Measured costs under one load, in seconds.

    Attributes:
        draft: a draft step, by nodes expanded.
        target: a pass of the target, by rows verified.
        per_token: time per token of all answers together.
    """

    def __init__(self) -> None:
        self.draft = StepTimes()
        self.target = StepTimes()
        self.per_token = Mean()

    def pays(self, tokens: float, seconds: float) -> bool:
        """Whether `tokens` more tokens are worth so much time."""
        return tokens * self.per_token.value > seconds

    def widths(self, chances: Sequence[Sequence[float]]) -> list[int]:
        """How many candidates of each request to verify: one adds its chance in tokens, and its row in time.

        Args:
            chances: by request, of its candidates, likeliest first.
        """
        best, widths, tried = -self.target.at(len(chances)), [0] * len(chances), [0] * len(chances)
        tokens, rows = 0.0, len(chances)
        for chance, request in heapq.merge(*([(-c, i) for c in cs] for i, cs in enumerate(chances))):
            tokens, rows = tokens - chance, rows + 1
            tried[request] += 1
            worth = tokens * self.per_token.value - self.target.at(rows)
            if worth > best:
                best, widths = worth, tried.copy()
        return widths


class Policy(Protocol):
    """What the coordinator asks before it decides, and what it tells of what happened. Times in seconds."""

    def schedule(self, asked: Schedule, *, has_drafters: bool) -> Schedule:
        """The schedule that runs when `asked` is; never "auto"."""

    def leave(self, load: Load, *, hit: bool) -> Leave:
        """Under `parallel` the draft steps that come with a correction; under `sequential` one, granted when it pays.

        Args:
            load: what runs.
            hit: whether the last committed token was in the cache.
        """

    def draft_pays(self, load: Load, chances: Sequence[float], lead: int) -> bool:
        """Whether a round should have one more draft step before it verifies.

        Args:
            load: what runs.
            chances: that the target gets to each of the nodes where the draft would look.
            lead: depth of the candidates.
        """

    def windows(self, load: Load, chances: Sequence[Sequence[float]]) -> list[int]:
        """How many candidates of each request to verify, of those with these chances, likeliest first."""

    def patience(self, load: Load) -> float:
        """How long a round may wait for its draft."""

    def saw_pass(self, load: Load, rows: int, tokens: int, elapsed: float, since_last: float | None) -> None:
        """The target verified `rows` rows in all and `tokens` tokens came of them.

        Args:
            load: what ran.
            rows: of all requests.
            tokens: of all requests.
            elapsed: seconds of the pass.
            since_last: from the end of the pass before to the end of this one; None when something else came between.
        """

    def saw_draft_step(self, load: Load, nodes: int, elapsed: float) -> None:
        """A draft expanded `nodes` nodes of one request."""

    def saw_token(self, *, hit: bool) -> None:
        """A token was committed where a drafter had looked; `hit` if it was in the cache."""


@dataclass
class Controller:
    """The policy that learns: one cost model for each load, across requests.

    Args:
        shared_device: whether draft and target compete for one device, so that overlap gains nothing (docs/LOG.md).
        limits: bounds of leads and widths.
        pins: choices that are not left to it.
    """

    shared_device: bool
    limits: Limits = field(default_factory=Limits)
    pins: Pins = field(default_factory=Pins)

    def __post_init__(self) -> None:
        self.costs: dict[tuple[Schedule, int], CostModel] = {}
        self.draft_hits = Mean(prior=0.9, weight=5)

    def schedule(self, asked: Schedule, *, has_drafters: bool) -> Schedule:
        """The asked one; on one device `auto` means `sequential`."""
        if not has_drafters:
            return "plain"
        if asked == "auto":
            return "sequential" if self.shared_device else "parallel"
        return asked

    def leave(self, load: Load, *, hit: bool) -> Leave:
        """Under `parallel` the draft never stops: after a miss narrow steps, which bring candidates fast, then wide.

        A node is expanded when that costs less than it saves: a whole draft step, if the target goes there and nobody
        has looked; where steps are granted singly, the tokens that it brings.
        """
        costs, width = self.costs_of(load), self.pins.draft_width or self.limits.max_draft_width
        parallel = load.schedule == "parallel"
        saves = costs.draft.at(1) if parallel else costs.per_token.value
        row = costs.draft.row_cost() + (0.0 if parallel else costs.target.row_cost())
        min_chance = max(MIN_CHANCE, min(1.0, row / saves if saves else ROW_COST))
        narrow = NARROW_STEPS if parallel and not hit else 0
        steps = self.limits.max_lead if parallel else 1
        return Leave((1,) * narrow + (width,) * (steps - narrow), min_chance)

    def draft_pays(self, load: Load, chances: Sequence[float], lead: int) -> bool:
        """By measured times and hits.

        Under `parallel` the draft works on while the target does. A lead that grows by more than a round takes off it
        is deep enough: the draft is the slower of the two, and to wait for it would not make it faster.
        """
        if self.pins.lead is not None:
            return lead < self.pins.lead
        costs = self.costs_of(load)
        step = costs.draft.at(len(chances))
        if not step or not costs.per_token.weight:
            return not lead  # measure it
        row = costs.target.row_cost() / costs.per_token.value  # in tokens: candidates below it are not verified
        tokens = sum(max(0.0, chance * self.draft_hits.value - row) for chance in chances)
        if load.schedule == "parallel":
            if (lead + 1) * step * load.num_seqs >= costs.target.at(load.num_seqs):
                return False
            tokens *= WAIT_SHARE
        return costs.pays(tokens, step)

    def windows(self, load: Load, chances: Sequence[Sequence[float]]) -> list[int]:
        """By measured times."""
        if self.pins.window is not None:
            return [min(self.pins.window - 1, len(candidates)) for candidates in chances]
        costs = self.costs_of(load)
        if not costs.per_token.weight:
            return [sum(chance > FIRST_CHANCE for chance in candidates) for candidates in chances]
        return costs.widths(chances)

    def patience(self, load: Load) -> float:
        """A few usual steps: it bounds the wait for one that was lost, or that takes much longer than it used to.

        Under `sequential` a step is taken inline, on the target's own thread, before anybody could wait.
        """
        step = self.costs_of(load).draft.at(1)
        if load.schedule == "parallel":
            return 2 * step * load.num_seqs
        return 20 * step if step else 60.0

    def saw_pass(self, load: Load, rows: int, tokens: int, elapsed: float, since_last: float | None) -> None:
        """Learns the time of a pass and the time per token."""
        costs = self.costs_of(load)
        costs.target.observe(rows, elapsed)
        if since_last is not None:
            costs.per_token.add(since_last / tokens, tokens)

    def saw_draft_step(self, load: Load, nodes: int, elapsed: float) -> None:
        """Learns the time of a draft step."""
        self.costs_of(load).draft.observe(nodes, elapsed)

    def saw_token(self, *, hit: bool) -> None:
        """Learns how often a drafter is right."""
        self.draft_hits.add(hit)

    def costs_of(self, load: Load) -> CostModel:
        """Loads of about the same size share what they learn."""
        return self.costs.setdefault((load.schedule, load.num_seqs.bit_length()), CostModel())
