"""What speculation costs and gains here, learnt while decoding.

Questions are answered from measured step times, in the currency of the engine's own time per token: a step that takes
`t` seconds pays when it brings more than `t / seconds per token` tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from langchain_card.config import Limits, Schedule

DECAY = 0.9
"""Weight of the past against one new observation."""

ROW_COST = 0.05
"""Share of a target step that one more row is taken to cost where nothing was measured."""

NARROW_STEPS = 2
"""Draft steps after a miss that expand one node only."""


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


class CostModel:
    """Measured costs under one schedule, in seconds.

    Attributes:
        draft_step: a draft step.
        draft_hits: share of the target's tokens that were in the cache where a drafter had looked.
        per_token: time per token of the answer.
    """

    def __init__(self) -> None:
        self.draft_step = Mean()
        self.draft_hits = Mean(prior=0.9, weight=5)
        self.per_token = Mean()
        self._steps: dict[int, Mean] = {}

    def observe_target(self, rows: int, elapsed: float) -> None:
        """One target step over `rows` rows took `elapsed` seconds."""
        self._steps.setdefault(rows, Mean()).add(elapsed)

    def observe_round(self, tokens: int, elapsed: float) -> None:
        """One round, from commit to commit, gave `tokens` tokens in `elapsed` seconds."""
        self.per_token.add(elapsed / tokens, tokens)

    def target_step(self, rows: int = 1) -> float:
        """Seconds of a target step over `rows` rows: measured, or on the line between measured ones; 0 if unknown."""
        if rows in self._steps:
            return self._steps[rows].value
        below = max((n for n in self._steps if n < rows), default=None)
        above = min((n for n in self._steps if n > rows), default=None)
        if below is None:
            return self._steps[above].value if above is not None else 0.0
        base = self._steps[below].value
        slope = base * ROW_COST if above is None else (self._steps[above].value - base) / (above - below)
        return base + max(slope, 0.0) * (rows - below)

    def best_width(self, chances: Sequence[float]) -> int:
        """How many candidates to verify: each adds its chance of acceptance in tokens, and its row in time.

        Args:
            chances: of the candidates, likeliest first.
        """
        if not self.per_token.weight:
            return sum(chance > 0.2 for chance in chances)
        best, width, tokens = -self.target_step(1), 0, 0.0
        for count, chance in enumerate(chances, start=1):
            tokens += chance
            worth = tokens * self.per_token.value - self.target_step(count + 1)
            if worth > best:
                best, width = worth, count
        return width

    def draft_pays(self, expected_tokens: float) -> bool:
        """Whether one more draft step that adds `expected_tokens` to the round is worth its time."""
        if not self.draft_step.weight or not self.per_token.weight:
            return expected_tokens > 0  # measure it once
        row = ROW_COST * self.target_step(1)
        return expected_tokens * self.per_token.value > self.draft_step.value + row

    def patience_parallel(self) -> float:
        """Seconds that a target with an empty cache waits for the draft: nothing unless the draft is much faster."""
        step = self.draft_step.value
        return 2 * step if 4 * step < self.target_step() else 0.0

    def patience_sequential(self) -> float:
        """Seconds that a round waits for a granted draft step: far above its usual time, but bounded.

        It bounds the wait for a step that was lost or is taken elsewhere. One that is taken inline, on the target's own
        thread, has been taken before anybody could wait.
        """
        return 20 * self.draft_step.value if self.draft_step.weight else 60.0


class Policy(Protocol):
    """What the coordinator asks before it decides, and what it tells of what happened. Times in seconds."""

    def schedule(self, asked: Schedule, *, has_drafters: bool) -> Schedule:
        """The schedule that runs when `asked` is; never "auto"."""

    def widths(self, schedule: Schedule, *, hit: bool) -> tuple[int, ...]:
        """Nodes to expand in each of the draft steps that are granted with a correction.

        Args:
            schedule: in force.
            hit: whether the last committed token was in the cache.
        """

    def draft_pays(self, schedule: Schedule, chance: float) -> bool:
        """Whether one more draft step is worth its time, when the target gets where it would look with `chance`."""

    def window(self, schedule: Schedule, chances: Sequence[float]) -> int:
        """How many candidates to verify, of those with these chances, likeliest first."""

    def patience(self, schedule: Schedule) -> float:
        """How long a round may wait for its draft."""

    def saw_round(self, schedule: Schedule, tokens: int, elapsed: float) -> None:
        """A round, from commit to commit, gave `tokens` tokens."""

    def saw_target_step(self, schedule: Schedule, rows: int, elapsed: float) -> None:
        """The target verified `rows` rows."""

    def saw_draft_step(self, schedule: Schedule, elapsed: float) -> None:
        """A draft took a step."""

    def saw_token(self, schedule: Schedule, *, hit: bool) -> None:
        """A token was committed where a drafter had looked; `hit` if it was in the cache."""


class Controller:
    """The policy that learns: one cost model for each schedule, across requests.

    Args:
        shared_device: whether draft and target compete for one device, so that overlap gains nothing (docs/LOG.md).
        limits: bounds of leads and widths.
    """

    def __init__(self, *, shared_device: bool, limits: Limits | None = None) -> None:
        self.shared_device = shared_device
        self.limits = limits or Limits()
        self.costs: dict[Schedule, CostModel] = {name: CostModel() for name in ("plain", "sequential", "parallel")}

    def schedule(self, asked: Schedule, *, has_drafters: bool) -> Schedule:
        """The asked one; on one device `auto` means `sequential`."""
        if not has_drafters:
            return "plain"
        if asked == "auto":
            return "sequential" if self.shared_device else "parallel"
        return asked

    def widths(self, schedule: Schedule, *, hit: bool) -> tuple[int, ...]:
        """Under `parallel` the draft never stops: after a miss narrow steps, which bring candidates fast, then wide."""
        if schedule != "parallel":
            return ()
        narrow = 0 if hit else NARROW_STEPS
        return (1,) * narrow + (self.limits.max_draft_width,) * (self.limits.max_lead - narrow)

    def draft_pays(self, schedule: Schedule, chance: float) -> bool:
        """By measured times and hits."""
        costs = self.costs[schedule]
        return costs.draft_pays(chance * costs.draft_hits.value)

    def window(self, schedule: Schedule, chances: Sequence[float]) -> int:
        """By measured times."""
        return self.costs[schedule].best_width(chances)

    def patience(self, schedule: Schedule) -> float:
        """By measured times."""
        costs = self.costs[schedule]
        return costs.patience_parallel() if schedule == "parallel" else costs.patience_sequential()

    def saw_round(self, schedule: Schedule, tokens: int, elapsed: float) -> None:
        """Learns the time per token."""
        self.costs[schedule].observe_round(tokens, elapsed)

    def saw_target_step(self, schedule: Schedule, rows: int, elapsed: float) -> None:
        """Learns the time of a target step."""
        self.costs[schedule].observe_target(rows, elapsed)

    def saw_draft_step(self, schedule: Schedule, elapsed: float) -> None:
        """Learns the time of a draft step."""
        self.costs[schedule].draft_step.add(elapsed)

    def saw_token(self, schedule: Schedule, *, hit: bool) -> None:
        """Learns how often a drafter is right."""
        self.costs[schedule].draft_hits.add(hit)
