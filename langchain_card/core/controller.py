"""What speculation costs and gains here, learnt while decoding: `Controller`, the policy that measures.

Questions are answered in the currency of the engine's own time per token: a step or a row that takes `t` seconds pays
when it brings more than `t / seconds per token` tokens. Decisions depend on what was observed and on nothing else.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from langchain_card.config import Limits, Pins, Schedule

DECAY = 0.9
"""Weight of the past against one new observation."""

ROW_COST = 0.05
"""Share of a step that one more row is taken to cost where nothing was measured."""

NARROW_STEPS = 2
"""Draft steps after a miss that expand one node only."""

WAIT_SHARE = 0.85
"""Share of a layer's tokens that waiting for it gains: the draft works on anyhow, and the next round has them."""

MIN_CHANCE = 0.01
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
    """A decaying mean: a new observation counts 1 - DECAY, the first ones more.

    Attributes:
        value: the mean; at first the prior.
        weight: how many observations stand behind it; at first those that the prior is worth.
    """

    __slots__ = ("value", "weight")

    def __init__(self, prior: float = 0.0, weight: float = 0.0) -> None:
        self.value = prior
        self.weight = weight

    def add(self, value: float, weight: float = 1.0) -> None:
        """Takes one observation in."""
        self.weight = self.weight * DECAY + weight
        self.value += (value - self.value) * weight / self.weight


class StepTimes:
    """Measured seconds of a step by its number of rows."""

    def __init__(self) -> None:
        self._means: dict[int, Mean] = {}

    def observe(self, rows: int, elapsed: float) -> None:
        """A step over `rows` rows took `elapsed` seconds."""
        self._means.setdefault(rows, Mean()).add(elapsed)

    def at(self, rows: int = 1) -> float:
        """Seconds over `rows` rows: measured, or on the line between or beyond measured ones; 0 if nothing was."""
        if rows in self._means:
            return self._means[rows].value
        below = max((n for n in self._means if n < rows), default=None)
        above = min((n for n in self._means if n > rows), default=None)
        if below is None:
            return self._means[above].value if above is not None else 0.0
        base = self._means[below].value
        slope = self.row_cost() if above is None else (self._means[above].value - base) / (above - below)
        return base + max(slope, 0.0) * (rows - below)

    def row_cost(self) -> float:
        """Seconds that one more row adds: measured over the sizes that were tried, else a guess."""
        few, many = min(self._means, default=1), max(self._means, default=1)
        if few == many:
            return ROW_COST * self.at(few)
        return max(0.0, self._means[many].value - self._means[few].value) / (many - few)


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
        costs, width = self._costs(load), self.pins.draft_width or self.limits.max_draft_width
        parallel = load.schedule == "parallel"
        saves = costs.draft.at(1) if parallel else costs.per_token.value
        min_chance = max(MIN_CHANCE, min(1.0, costs.draft.row_cost() / saves if saves else ROW_COST))
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
        costs = self._costs(load)
        step = costs.draft.at(len(chances))
        if not step or not costs.per_token.weight:
            return not lead  # measure it
        tokens = sum(chances) * self.draft_hits.value
        if load.schedule == "parallel":
            if (lead + 1) * step * load.num_seqs >= costs.target.at(load.num_seqs):
                return False
            tokens *= WAIT_SHARE
        return costs.pays(tokens, step + costs.target.row_cost())

    def windows(self, load: Load, chances: Sequence[Sequence[float]]) -> list[int]:
        """By measured times."""
        if self.pins.window is not None:
            return [min(self.pins.window - 1, len(candidates)) for candidates in chances]
        costs = self._costs(load)
        if not costs.per_token.weight:
            return [sum(chance > FIRST_CHANCE for chance in candidates) for candidates in chances]
        return costs.widths(chances)

    def patience(self, load: Load) -> float:
        """A few usual steps: it bounds the wait for one that was lost, or that takes much longer than it used to.

        Under `sequential` a step is taken inline, on the target's own thread, before anybody could wait.
        """
        step = self._costs(load).draft.at(1)
        if load.schedule == "parallel":
            return 2 * step * load.num_seqs
        return 20 * step if step else 60.0

    def saw_pass(self, load: Load, rows: int, tokens: int, elapsed: float, since_last: float | None) -> None:
        """Learns the time of a pass and the time per token."""
        costs = self._costs(load)
        costs.target.observe(rows, elapsed)
        if since_last is not None:
            costs.per_token.add(since_last / tokens, tokens)

    def saw_draft_step(self, load: Load, nodes: int, elapsed: float) -> None:
        """Learns the time of a draft step."""
        self._costs(load).draft.observe(nodes, elapsed)

    def saw_token(self, *, hit: bool) -> None:
        """Learns how often a drafter is right."""
        self.draft_hits.add(hit)

    def _costs(self, load: Load) -> CostModel:
        """Loads of about the same size share what they learn."""
        return self.costs.setdefault((load.schedule, load.num_seqs.bit_length()), CostModel())
