"""What speculation costs and gains here, learnt while decoding.

Questions are answered from measured step times, in the currency of the engine's own time per token: a step that takes
`t` seconds pays when it brings more than `t / seconds per token` tokens.
"""

from __future__ import annotations

from langchain_card.config import Schedule

DECAY = 0.9
"""Weight of the past against one new observation."""


class Mean:
    """A decaying mean: a new observation counts 1 - DECAY, the first ones more.

    Attributes:
        value: the mean; the given prior until something was observed.
        weight: 0 until something was observed.
    """

    __slots__ = ("value", "weight")

    def __init__(self, prior: float = 0.0) -> None:
        self.value = prior
        self.weight = 0.0

    def add(self, value: float, weight: float = 1.0) -> None:
        """Takes one observation in."""
        self.weight = self.weight * DECAY + weight
        self.value += (value - self.value) * weight / self.weight


class CostModel:
    """Measured costs under one schedule, in seconds.

    Attributes:
        target_step: a target step of typical width.
        draft_step: a draft step.
        draft_hits: share of the target's tokens that were in the cache where a drafter had looked.
        per_token: time per token of the answer.
    """

    def __init__(self) -> None:
        self.target_step = Mean()
        self.draft_step = Mean()
        self.draft_hits = Mean(prior=1.0)
        self.per_token = Mean()
        self._rows, self._rows_squared, self._rows_step = Mean(), Mean(), Mean()

    def observe_target(self, rows: int, elapsed: float) -> None:
        """One target step over `rows` rows took `elapsed` seconds."""
        self.target_step.add(elapsed)
        self._rows.add(rows)
        self._rows_squared.add(rows * rows)
        self._rows_step.add(rows * elapsed)

    def observe_round(self, tokens: int, elapsed: float) -> None:
        """One round, from commit to commit, gave `tokens` tokens in `elapsed` seconds."""
        self.per_token.add(elapsed / tokens, tokens)

    @property
    def row_cost(self) -> float:
        """Seconds that one more row adds to a target step: the slope of a decaying least-squares line.

        A tenth of a step while too few different row counts were seen.
        """
        spread = self._rows_squared.value - self._rows.value**2
        if spread < 1.0:
            return self.target_step.value / 10
        slope = (self._rows_step.value - self._rows.value * self.target_step.value) / spread
        return min(max(slope, self.target_step.value / 50), self.target_step.value / 4)

    def min_chance(self) -> float:
        """Smallest chance of acceptance at which a candidate's row still pays."""
        return min(0.9, self.row_cost / self.per_token.value) if self.per_token.weight else 0.05

    def draft_pays(self, expected_tokens: float) -> bool:
        """Whether one more draft step that adds `expected_tokens` to the round is worth its time."""
        if not self.draft_step.weight or not self.per_token.weight:
            return expected_tokens > 0  # measure it once
        return expected_tokens * self.per_token.value > self.draft_step.value + self.row_cost

    def patience_parallel(self) -> float:
        """Seconds that a target with an empty cache waits for the draft: nothing unless the draft is much faster."""
        step = self.draft_step.value
        return 2 * step if 4 * step < self.target_step.value else 0.0

    def patience_sequential(self) -> float:
        """Seconds that a round waits for a granted draft step: far above its usual time, but bounded."""
        return 20 * self.draft_step.value if self.draft_step.weight else 60.0


class Controller:
    """Chooses the schedule, and keeps one cost model for each.

    Args:
        shared_device: whether draft and target compete for one device, so that overlap gains nothing (docs/LOG.md).
    """

    def __init__(self, *, shared_device: bool) -> None:
        self.shared_device = shared_device
        self.costs: dict[Schedule, CostModel] = {name: CostModel() for name in ("plain", "sequential", "parallel")}

    def schedule(self, asked: Schedule, *, has_drafters: bool) -> Schedule:
        """The schedule that runs when `asked` is."""
        if not has_drafters:
            return "plain"
        if asked == "auto":
            return "sequential" if self.shared_device else "parallel"
        return asked
