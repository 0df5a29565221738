"""What speculation costs and gains here, learnt while decoding: `Controller`, the policy that measures.

Questions are answered in the currency of the engine's own time per token: a step or a row that takes `t` seconds pays
when it brings more than `t / seconds per token` tokens. Decisions depend on what was observed and on nothing else.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

from langchain_card.config import Limits, Pins, Schedule
from langchain_card.core.costs import ROW_COST, SIZE_DECAY, Calibration, CostModel, Mean, Probe
from langchain_card.core.frontier import Frontier
from langchain_card.core.policy import Leave, Load

NARROW_STEPS = 2
"""Draft steps after a miss that expand one node only."""

WAIT_SHARE = 0.6
"""Share of a layer's tokens that waiting for it gains: the draft works on anyhow, and the next round has them."""

MIN_CHANCE = 0.002
"""Nodes that the target reaches with a smaller chance are never expanded."""

STAY = 0.85
"""Another schedule must be expected to take less than this share of the time before requests that run change to it."""

DOUBT = 0.2
"""Share of what a drafter states that is believed at first where one with a model did not list it (docs/LOG.md)."""

FIRST_CHANCE = 0.2
"""Candidates likelier than this are verified where nothing was measured, or shall be again."""


@dataclass
class Controller:
    """The policy that learns: one cost model for each load, across requests.

    Args:
        shared_device: whether draft and target compete for one device, so that overlap gains nothing (docs/LOG.md).
        limits: bounds of leads and widths.
        pins: choices that are not left to it.
        overlaps: whether overlap may gain on a shared device all the same, as on a CPU's cores: `auto` measures it.
    """

    shared_device: bool
    limits: Limits = field(default_factory=Limits)
    pins: Pins = field(default_factory=Pins)
    overlaps: bool = False

    def __post_init__(self) -> None:
        self.costs: dict[tuple[Schedule, int], CostModel] = {}
        self.draft_hits = Mean(prior=0.9, weight=5)
        self.layers = Mean(prior=1.0, weight=1, decay=SIZE_DECAY)
        self.first_hits = Mean(prior=0.8, weight=5, decay=SIZE_DECAY)
        self.usual_hits = Mean(prior=0.9, weight=5, decay=SIZE_DECAY)
        self.trials: dict[Schedule, Probe] = {"parallel": Probe(), "sequential": Probe()}
        self._num_seqs_before = 0
        self._beliefs: defaultdict[str, Calibration] = defaultdict(Calibration)
        self._doubts: defaultdict[str, Calibration] = defaultdict(lambda: Calibration(DOUBT))

    def auto(self, num_seqs: int, current: Schedule | None) -> Schedule:
        """`parallel`; on one device `sequential`; and where both may be best the one that is the faster for so many.

        A request that begins alone may be a trial: both schedules are measured first, and the slower one again after
        32 requests, 64, 128, ... Several that begin where nothing is known have all cores for each pass.
        """
        before, self._num_seqs_before = self._num_seqs_before, num_seqs
        if not (self.shared_device and self.overlaps):
            return "sequential" if self.shared_device else "parallel"
        if num_seqs == 1 and current is None:
            return self._try()
        if num_seqs == before == 1 and current is not None:
            return current  # a trial lasts as long as its answer
        expected = {schedule: self.seconds_a_token(schedule, num_seqs) for schedule in self.trials}
        if not all(expected.values()):
            return "sequential" if num_seqs > 1 or current is None else current
        if current in expected:
            expected[current] *= STAY
        return min(self.trials, key=expected.__getitem__)

    def _try(self) -> Schedule:
        chosen = min(self.trials, key=lambda schedule: (not self.trials[schedule].due, self.seconds_a_token(schedule)))
        for schedule, trial in self.trials.items():
            trial.seen() if schedule == chosen else trial.missed()
        return chosen

    def seconds_a_token(self, schedule: Schedule, num_seqs: int = 1) -> float:
        """Of so many answers, expected from the times of steps alone; 0 where they were never measured.

        Texts differ more than schedules do, so that the speeds of two answers say little. A chain of `lead` candidates,
        each right as often as drafts usually are, is verified in a pass; drafting it takes time of its own, or the
        passes' time. A miss costs `parallel` what was drafted meanwhile.
        """
        load, right = Load(schedule, num_seqs), min(self.usual_hits.value, 0.99)
        costs = self.costs.get(_key(load)) or self._new_costs(load)
        if not costs.known:
            return 0.0
        step = costs.draft.at(num_seqs)
        found = []
        for lead in range(1 if schedule == "parallel" else 0, self.limits.max_lead + 1):
            tokens = (1 - right ** (lead + 1)) / (1 - right)
            elapsed = costs.target.at(num_seqs * (lead + 1))
            if schedule == "parallel":
                found.append(max(elapsed, lead * step) / (1 + right * (tokens - 1)))
            else:
                found.append((elapsed + lead * step) / tokens)
        return min(found) / num_seqs

    def leave(self, load: Load, *, hit: bool) -> Leave:
        """Under `parallel` the draft never stops: after a miss narrow steps, which bring candidates fast, then wide.

        A node is expanded when that costs less than it saves: a whole draft step, if the target goes there and nobody
        has looked; where steps are granted singly, the tokens that it brings.
        """
        costs, width = self.costs_of(load), self.pins.draft_width or self.limits.max_draft_width
        parallel = load.schedule == "parallel"
        saves = costs.draft_share(1) if parallel else costs.per_token.value
        row = costs.draft.row_cost() + (0.0 if parallel else costs.target.row_cost())
        min_chance = max(MIN_CHANCE, min(1.0, row / saves if saves else ROW_COST))
        if self.pins.lead is not None and not parallel:
            min_chance = MIN_CHANCE  # how deep to look was said, and is not measured
        narrow = NARROW_STEPS if parallel and not hit and self.pins.draft_width is None else 0
        steps = math.ceil(self.limits.max_lead / self.layers.value) if parallel else 1
        return Leave((1,) * narrow + (width,) * (steps - narrow), min_chance)

    def draft_pays(self, load: Load, frontier: Frontier, lead: int) -> bool:
        """By measured times and hits.

        Under `parallel` the draft works on while the target does. A lead that grows by more than a round takes off it
        is deep enough: the draft is the slower of the two, and to wait for it would not make it faster. Else a step may
        pay that only leads up to where others' candidates end, by those that follow it.
        """
        if self.pins.lead is not None:
            return lead < self.pins.lead
        costs = self.costs_of(load)
        step = costs.draft_share(len(frontier.chances))
        if not step or not costs.per_token.value:
            return not lead  # measure it
        if costs.draft_probe.due and load.schedule == "sequential" and not lead:
            return True
        row = costs.target.row_cost() / costs.per_token.value  # in tokens: candidates below it are not verified
        tokens = sum(max(0.0, chance * self.draft_hits.value - row) for chance in frontier.chances)
        if load.schedule == "parallel":
            if (lead + 1) * step * load.num_seqs >= costs.target.at(load.num_seqs):
                return False
            return costs.pays(tokens * WAIT_SHARE, step)
        return costs.pays(tokens, step) or self._leads_on(costs, frontier, row, self.limits.max_lead - lead)

    def _leads_on(self, costs: CostModel, frontier: Frontier, row: float, most: int) -> bool:
        """Whether several layers pay together: a chain in the place of what others propose there already."""
        step, tokens = costs.draft_share(1), -sum(max(0.0, chance - row) for chance in frontier.others)
        for layers in range(1, most + 1):
            tokens += frontier.reach * self.first_hits.value**layers - row
            if costs.pays(tokens, max(1.0, layers / self.layers.value) * step):
                return True
        return False

    def windows(self, load: Load, chances: Sequence[Sequence[float]]) -> list[int]:
        """By measured times."""
        if self.pins.window is not None:
            return [min(self.pins.window - 1, len(candidates)) for candidates in chances]
        costs = self.costs_of(load)
        if not costs.per_token.value or costs.window_probe.due:
            return [sum(chance > FIRST_CHANCE for chance in candidates) for candidates in chances]
        return costs.widths(chances)

    def patience(self, load: Load) -> float:
        """A few usual steps: it bounds the wait for one that was lost, or that takes much longer than it used to.

        Under `sequential` a step is taken inline, on the target's own thread, before anybody could wait.
        """
        step = self.costs_of(load).draft_share(1)
        if load.schedule == "parallel":
            return 2 * step * load.num_seqs
        return 20 * step if step else 60.0

    def saw_pass(
        self, load: Load, requests: int, rows: int, tokens: int, elapsed: float, since_last: float | None
    ) -> None:
        """Learns the time of a pass, and the time per token."""
        costs = self.costs_of(load)
        costs.target.observe(rows, elapsed)
        costs.draft_probe.missed()
        costs.window_probe.seen() if rows > requests else costs.window_probe.missed()
        if since_last is not None:
            costs.per_token.add(since_last / tokens, tokens)

    def saw_draft_step(self, load: Load, nodes: int, together: int, elapsed: float, layers: int) -> None:
        """Learns the time of a draft step, how deep it goes, and how requests share it."""
        costs = self.costs_of(load)
        costs.draft.observe(together, elapsed * together / nodes, nodes / together)
        costs.sharing.add(together / nodes, nodes)
        costs.draft_probe.seen()
        self.layers.add(layers)

    def saw_candidate(self, source: str, stated: float, *, taken: bool, doubted: bool) -> None:
        """Learns how far this drafter is to be believed."""
        (self._doubts if doubted else self._beliefs)[source].learn(stated, taken=taken)

    def judge(self, source: str, stated: float) -> tuple[float, float]:
        """As far as the drafter is to be believed."""
        return self._beliefs[source].score(stated), self._doubts[source].score(stated)

    def saw_token(self, *, hit: bool, first: bool) -> None:
        """Learns how often a drafter is right."""
        self.first_hits.add(first)
        self.draft_hits.add(hit)
        self.usual_hits.add(hit)

    def costs_of(self, load: Load) -> CostModel:
        """Loads of about the same size share what they learn."""
        if (key := _key(load)) not in self.costs:
            self.costs[key] = self._new_costs(load)
        return self.costs[key]

    def _new_costs(self, load: Load) -> CostModel:
        """For a load that was never there: it begins with the step times of the one most like it."""
        size = _key(load)[1]
        alike = [key for key, costs in self.costs.items() if key[0] == load.schedule and costs.known]
        nearest = min(alike, key=lambda key: abs(key[1] - size), default=None)
        return CostModel(load.num_seqs, None if nearest is None else self.costs[nearest])


def _key(load: Load) -> tuple[Schedule, int]:
    return load.schedule, load.num_seqs.bit_length()
