"""`Controller`: the policy that learns, while decoding, what speculation costs and gains on this machine.

Its currency is the engine's own time per token: a step or a row that takes `t` seconds pays when it brings more than
`t / seconds per token` tokens. Decisions depend on observations and on nothing else.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

from langchain_card.config import Schedule
from langchain_card.core.candidates import Frontier
from langchain_card.core.costs import MAX_SURPRISE, ROW_COST, SHORTEST, SIZE_DECAY, CostModel, Mean, Speed
from langchain_card.core.drafter_state import Calibration
from langchain_card.core.policy import DraftGrant, Load, LoadKey, TextStats
from langchain_card.core.schedules import ScheduleChoice, seconds_by_model, with_a_chain
from langchain_card.limits import Limits, Pins

ANSWER_PRIOR = 128.0
"""Tokens of an answer, before any was measured."""

FIRST_READ = 32
"""Tokens of a text that a draft reads at a time before its speed was measured."""

LEAST_READ = 16
"""Tokens that a draft reads at a time at least: a step has a price of its own, and one token at a time never ends."""

READ_STEPS = 0.5
"""Longest time that a draft reads at a time, in plain steps: so much later the next token comes. `LEAST_READ` may take
longer."""

SAVED_PRIOR = 0.3
"""Share of a token's time that a draft is expected to save before that was measured, and when it is measured again."""

CAUTION = 1.2
"""Times that a token of a batch must be worth its cost: most gains are small there, and estimates err."""

ROWS_A_LAYER = 1.5
"""Candidates that a window holds in each of its layers, about."""

WINDOW_ROWS = 9
"""Candidates of a window, about, before they are known."""

NARROW_STEPS = 2
"""Draft steps after a miss that expand one node only."""

WAIT_SHARE = 0.6
"""Share of a layer's tokens gained by waiting for it: without the wait, the next round has them anyway."""

MIN_CHANCE = 0.002
"""Nodes that the target reaches with a smaller chance are never expanded."""

HITS_WEIGHT = 10.0
"""Tokens of a new text that the hits of all texts are worth."""

PACE_WEIGHT = 4.0
"""Passes of a new text that one token a pass is worth."""

ALL_DECAY = 0.998
"""Weight of the past for the hits of all texts."""

UNLISTED_PRIOR = 0.2
"""Share of a stated chance that an unlisted candidate has at first (docs/LOG.md, 2026-11-23)."""

FIRST_CHANCE = 0.2
"""Candidates likelier than this are verified before anything was measured, and when it is measured again."""

TRIAL_ROWS = 4
"""Candidates of all requests together that a trial verifies, the first one too: a few rows tell what a row costs."""


@dataclass
class Controller:
    """The policy that learns: one cost model for each load, across requests.

    Args:
        shared_device: whether draft and target compete for one device, so that overlap gains nothing.
        limits: bounds on leads and widths.
        pins: choices that the user has fixed.
        overlaps: whether overlap may gain even on a shared device, as on the cores of a CPU: `auto` measures it.
    """

    shared_device: bool
    limits: Limits = field(default_factory=Limits)
    pins: Pins = field(default_factory=Pins)
    overlaps: bool = False

    def __post_init__(self) -> None:
        self.costs: dict[LoadKey, CostModel] = {}
        self.target_speed = Speed()
        self.draft_speed = self.target_speed if self.shared_device else Speed()
        self.answers = Mean(prior=ANSWER_PRIOR, weight=2)
        self.draft_hits = Mean(prior=0.9, weight=5)
        self.layers = Mean(prior=1.0, weight=1, decay=SIZE_DECAY)
        self.usual_hits = Mean(prior=0.8, weight=5, decay=ALL_DECAY)
        self.choice = ScheduleChoice(self.costs, self.target_speed, self.seconds_a_token)
        self._listed: defaultdict[str, Calibration] = defaultdict(Calibration)
        self._unlisted: defaultdict[str, Calibration] = defaultdict(lambda: Calibration(UNLISTED_PRIOR))

    def new_text(self) -> TextStats:
        """Expect of a new text what texts usually are like, until its own tokens outweigh that."""
        hits = Mean(self.usual_hits.value, HITS_WEIGHT, SIZE_DECAY)
        rows, pace = (Mean(1.0, PACE_WEIGHT, SIZE_DECAY) for _ in range(2))
        return TextStats(hits, Mean(1.0, PACE_WEIGHT), rows, pace)

    def auto(self, texts: Sequence[TextStats], current: Schedule | None, positions: int = 0) -> Schedule:
        """Choose `parallel` on two devices, `sequential` on one, and by measurement where either may be faster."""
        if not (self.shared_device and self.overlaps):
            return "sequential" if self.shared_device else "parallel"
        return self.choice.choose(texts, current, positions)

    def seconds_a_token(self, load: Load, text: TextStats | None = None, costs: CostModel | None = None) -> float:
        """Return the expected time per token of all answers; 0 before steps were measured.

        Under `sequential` steps of the draft that do not pay are not taken. Texts differ more than schedules do, so the
        speeds of two answers cannot be compared. Speeds are compared with what step times and hits let expect of their
        own text, over many passes.

        Args:
            load: the load that runs.
            text: the answer's; None for the usual one.
            costs: of the load, or of one like it.
        """
        text, costs = text or self.new_text(), costs or self.costs.get(load.key) or self._new_costs(load)
        drafted = self._seconds_drafted(load, text, costs)
        if load.schedule == "parallel" or not drafted:
            return drafted
        return min(drafted, self._seconds_undrafted(load, text, costs))

    def _seconds_drafted(self, load: Load, text: TextStats, costs: CostModel) -> float:
        """Return the expected time per token of all answers if all have a draft."""
        return self._by_model(load, text.hits.value, costs) * costs.per_expected.value

    def _seconds_undrafted(self, load: Load, text: TextStats, costs: CostModel) -> float:
        """Return the expected time per token of all answers if this one has only drafters whose steps cost no time."""
        count = load.num_seqs
        own_rows = costs.target.at(count - 1 + text.free_rows.value) - costs.target.at(count)
        return (costs.target.at(count) / count + own_rows) / text.free_pace.value * costs.per_pass.value

    def _by_model(self, load: Load, hits: float, costs: CostModel) -> float:
        parallel = load.schedule == "parallel"
        return seconds_by_model(costs, load.num_seqs, hits, self.limits.max_lead, parallel=parallel)

    def _price(self, load: Load, text: TextStats, costs: CostModel) -> float:
        """Return the seconds that one more token of a text is worth: as many as all answers take to write one.

        With several requests, a token is worth more the slower its own answer is written. So a pass serves all of them
        alike: what it gains for one, relative to that one's speed, it does not lose for the others. There, a token is
        never worth more than without a draft, where each takes its share of a pass.
        """
        price, count = costs.per_token.value, load.num_seqs
        if count == 1:
            return price
        return min(price, costs.target.at(count) / count) * costs.pace.value / text.pace.value / CAUTION

    def grant(self, load: Load, *, hit: bool) -> DraftGrant:
        """Grant steps without a pause under `parallel`, after a miss narrow ones first; else grant a single step.

        The first steps of all are narrow under `sequential`. They may be cold, and would make each further node dear.

        A node is expanded when that costs less than it saves. Under `parallel` it saves a whole draft step, if the
        target arrives there; under `sequential` it saves the time of the tokens that it brings.
        """
        costs, width = self.costs_of(load), self.pins.draft_width or self.limits.max_draft_width
        parallel = load.schedule == "parallel"
        saves = costs.draft_share(1) if parallel else costs.per_token.value
        row = costs.draft.row_cost(load.num_seqs)
        row += 0.0 if parallel else costs.target.row_cost(load.num_seqs + WINDOW_ROWS)
        min_chance = max(MIN_CHANCE, min(1.0, row / saves if saves else ROW_COST))
        if self.pins.lead is not None and not parallel:
            min_chance = MIN_CHANCE  # the depth is pinned, not measured
        steps = math.ceil(self.limits.max_lead / self.layers.value) if parallel else 1
        narrow = NARROW_STEPS * (not hit) if parallel else int(not costs.known)
        narrow = 0 if self.pins.draft_width is not None else narrow
        return DraftGrant((1,) * narrow + (width,) * (steps - narrow), min_chance)

    def read_budget(self, load: Load, text: TextStats, unread: int, written: int, left: int) -> int:
        """Let a draft with a device of its own read at once; else as much as the next token can wait for, if it pays.

        The answer is expected to become as long as answers usually are, and beyond that twice as long as it is.
        """
        if not self.shared_device or self.pins.lead is not None:
            return self.limits.max_step_rows
        costs = self.costs_of(load)
        plain, price = self._undrafted(load).target.at(load.num_seqs), costs.read_cost
        if not written or not unread or not plain:
            return 0
        if not price:
            return FIRST_READ
        expected = min(left, max(self.answers.value - written, written))
        most = expected / (unread * price * (1.0 if load.num_seqs == 1 else CAUTION))
        if not self._reading_pays(load, text, costs, most):
            return 0
        budget = max(LEAST_READ, int(READ_STEPS * plain / (price * load.num_seqs)))
        text.tried &= budget < unread
        return budget

    def _reading_pays(self, load: Load, text: TextStats, costs: CostModel, most: float) -> bool:
        """Return whether a text is read that pays where each token takes 1 / `most` seconds less with a draft.

        Where it does not seem to pay, one text is read now and then to find out.
        """
        prior = SAVED_PRIOR * self._undrafted(load).target.at(load.num_seqs) / load.num_seqs
        if not costs.known:
            return prior / load.num_seqs * most > 1  # each text of a batch expects a share, so that one pays for it
        if self._saved(load, text, costs) * most > 1:
            costs.read_probe.paid()
            return True
        if costs.read_probe.due and prior * most > 1:
            costs.read_probe.count(seen=True)
            text.tried = True
        return text.tried

    def max_readers(self, load: Load) -> int:
        """Let one request of a batch find out what reading costs; then as many as the next token can wait for."""
        if not self.shared_device or self.pins.lead is not None:
            return load.num_seqs
        plain, price = self._undrafted(load).target.at(load.num_seqs), self.costs_of(load).read_cost
        return min(load.num_seqs, max(1, int(READ_STEPS * plain / (price * LEAST_READ)))) if price else 1

    def _saved(self, load: Load, text: TextStats, costs: CostModel) -> float:
        """Return the seconds that each token of a text takes less if the draft works for it."""
        if load.schedule == "parallel":
            drafted = self._seconds_drafted(load, text, costs)
        else:
            chain = with_a_chain(costs, load.num_seqs, text.hits.value, self.limits.max_lead)
            drafted = chain * costs.per_expected.value
        return self._seconds_undrafted(load, text, self._undrafted(load)) - drafted

    def may_wait(self, load: Load, lead: int) -> bool:
        """Return False if drafting the lead takes as long as a round: waiting for a slower draft gains nothing."""
        if not lead or self.pins.lead is not None:
            return True
        costs = self.costs_of(load)
        return (lead + 1) * costs.draft_share(1) < costs.target.at(load.num_seqs) / load.num_seqs

    def draft_pays(self, load: Load, texts: Sequence[TextStats], frontiers: Sequence[Frontier]) -> list[bool]:
        """Weigh a draft step by measured times and hits.

        Under `parallel` the draft works while the target does, and must be the faster of the two. Under `sequential`
        requests share a step: those for which it is worth most take it, as long as all of them gain more than the step
        takes.
        """
        if self.pins.lead is not None:
            return [at.lead < self.pins.lead for at in frontiers]
        costs, parallel = self.costs_of(load), load.schedule == "parallel"
        prices = [self._price(load, text, costs) for text in texts]
        if not costs.known or not all(prices):
            return [not at.lead for at in frontiers]  # measure it
        row = costs.target.row_cost(load.num_seqs + round(ROWS_A_LAYER * sum(at.lead for at in frontiers)))
        worth = [self._worth(at, price, row) for at, price in zip(frontiers, prices, strict=True)]
        if parallel:
            steps = [costs.draft_share(len(at.chances)) for at in frontiers]
            time = costs.target.at(load.num_seqs) / load.num_seqs
            ahead = [(at.lead + 1) * step < time for at, step in zip(frontiers, steps, strict=True)]
            return [a and gain * WAIT_SHARE > step for a, gain, step in zip(ahead, worth, steps, strict=True)]
        step = costs.draft.at(len(texts)) / max(1, len(texts))
        for i, (text, at, price) in enumerate(zip(texts, frontiers, prices, strict=True)):
            worth[i] = max(worth[i], self._worth_of_chain(text.hits.value, at, price, row, step))
        pays = costs.takers(worth, [len(at.chances) for at in frontiers])
        return [i in pays or (costs.draft_probe.due and not at.lead) for i, at in enumerate(frontiers)]

    def _worth(self, at: Frontier, price: float, row: float) -> float:
        """Return the seconds that one draft step saves, where a token is worth `price` and a row takes `row`.

        Candidates that are not worth their row are not verified.
        """
        return sum(max(0.0, chance * self.draft_hits.value * price - row) for chance in at.chances)

    def _worth_of_chain(self, right: float, at: Frontier, price: float, row: float, step: float) -> float:
        """Return the seconds that the first of several draft steps saves, less the steps that follow it.

        The steps make a chain in place of the candidates of other drafters. Each layer is right as often as the draft's
        first guess is.
        """
        best, chance = 0.0, at.reach
        saved = -sum(max(0.0, other * price - row) for other in at.others)
        for layers in range(1, self.limits.max_lead - at.lead + 1):
            chance *= right
            if chance * price <= row:
                break
            saved += chance * price - row
            best = max(best, saved - max(0.0, layers / self.layers.value - 1) * step)
        return best

    def windows(self, load: Load, texts: Sequence[TextStats], chances: Sequence[Sequence[float]]) -> list[int]:
        """Choose window sizes by measured times."""
        if self.pins.window is not None:
            return [min(self.pins.window - 1, len(candidates)) for candidates in chances]
        costs = self.costs_of(load)
        if not costs.per_token.value or costs.window_probe.due:
            most = max(1, TRIAL_ROWS // len(texts))
            return [sum(chance > FIRST_CHANCE for chance in candidates[:most]) for candidates in chances]
        if costs.plain_probe.due:
            return [0] * len(texts)
        return costs.widths(chances, [self._price(load, text, costs) for text in texts])

    def patience(self, load: Load) -> float:
        """Return the time of a few draft steps: it bounds the wait for a step that was lost or has become slow.

        Under `sequential` the steps run inline, on the target's own thread, so that a wait is rare.
        """
        step = self.costs_of(load).draft_share(1)
        if load.schedule == "parallel":
            return 2 * step * load.num_seqs
        return 20 * step if step else 60.0

    def observe_pass(
        self,
        load: Load,
        texts: Sequence[TextStats],
        rows: int,
        tokens: int,
        elapsed: float,
        since_last: float | None,
    ) -> None:
        """Learn the time of a pass, and the time per token."""
        costs, drafted = self.costs_of(load), [text.drafted for text in texts]
        self.choice.observe_round(self._measured_as(load))
        costs.target.observe(rows, elapsed)
        costs.pace.add(tokens / len(texts))
        probes = costs if load.drafting else self.costs_of(load._replace(drafting=True))
        probes.draft_probe.count(seen=any(drafted))
        probes.read_probe.count(seen=False)
        costs.window_probe.count(seen=rows > len(texts))
        costs.plain_probe.count(seen=rows == len(texts))
        for text in texts:
            text.drafted = False
        if since_last is None:
            return
        costs.per_token.add(since_last / tokens, tokens)
        if not any(drafted):
            costs.per_pass.add(min(max(since_last / max(elapsed, SHORTEST), 1.0), MAX_SURPRISE))
        elif all(drafted) and costs.known:
            hits = math.fsum(text.hits.value for text in texts) / len(texts)
            if expected := self._by_model(load, hits, costs):
                costs.observe_expected(since_last / tokens / expected, tokens)

    def observe_draft_step(
        self, load: Load, text: TextStats, nodes: int, together: int, elapsed: float, layers: int
    ) -> None:
        """Learn the time of a draft step, its depth, and how requests share it."""
        costs = self.costs_of(load)
        costs.draft.observe(together, elapsed * together / nodes, nodes / together)
        costs.sharing.add(together / nodes, nodes)
        text.drafted = True
        self.layers.add(layers)

    def observe_reading(self, load: Load, tokens: int, elapsed: float) -> None:
        """Learn the time in which a draft reads a token."""
        self.costs_of(load).observe_reading(elapsed / tokens)

    def observe_answer(self, tokens: int) -> None:
        """Learn how long answers are."""
        self.answers.add(tokens)

    def observe_candidate(self, source: str, stated_logp: float, *, taken: bool, unlisted: bool) -> None:
        """Learn how often this drafter's stated chances come true."""
        (self._unlisted if unlisted else self._listed)[source].learn(stated_logp, taken=taken)

    def trust(self, source: str, stated_logp: float) -> tuple[float, float]:
        """Return the calibrated log chances of a listed and of an unlisted candidate."""
        return self._listed[source].score(stated_logp), self._unlisted[source].score(stated_logp)

    def observe_token(self, text: TextStats, *, hit: bool, first: bool) -> None:
        """Learn how often the cache is right."""
        text.hits.add(first)
        self.draft_hits.add(hit)
        self.usual_hits.add(first)

    def costs_of(self, load: Load) -> CostModel:
        """Return the cost model of a load; loads of about the same size share one."""
        load = self._measured_as(load)
        if (key := load.key) not in self.costs:
            self.costs[key] = self._new_costs(load)
        return self.costs[key]

    def _measured_as(self, load: Load) -> Load:
        """Return the load whose costs a load has: on a shared device, `parallel` without a draft is `sequential`."""
        overlaps = load.drafting or not self.shared_device
        return load if overlaps or load.schedule != "parallel" else load._replace(schedule="sequential")

    def _undrafted(self, load: Load) -> CostModel:
        """Return the cost model of the same load while no draft works."""
        load = self._measured_as(load._replace(drafting=False))
        return self.costs.get(load.key) or self._new_costs(load)

    def _new_costs(self, load: Load) -> CostModel:
        """Make the cost model of a new load, with the step times of the load that is most like it."""
        nearest = min(self._measured(load.schedule), key=lambda key: load.distance(key[1:]), default=None)
        alike = None if nearest is None else self.costs[nearest]
        return CostModel(self.target_speed, self.draft_speed, load.num_seqs, alike)

    def _measured(self, schedule: Schedule) -> list[LoadKey]:
        """Return the keys of the loads whose steps were measured under a schedule."""
        return [key for key, costs in self.costs.items() if key[0] == schedule and costs.known]
