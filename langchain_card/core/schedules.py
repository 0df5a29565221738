"""The schedule that "auto" stands for: what step times let expect of each, and trials of the one that does not run."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import cast

from langchain_card.config import Schedule
from langchain_card.core.costs import CostModel, Probe, Speed
from langchain_card.core.policy import Load, LoadKey, TextStats

FIRST_TRIAL = 8
"""Answers after which the slower schedule is measured again; then twice as many, and so on."""

TRIAL_AFTER, TRIAL_ROUNDS = 12, 8
"""Rounds of an answer before a trial, and rounds of a trial: its price is bounded, however slow that schedule is."""

STAY = 0.95
"""Running requests change their schedule if another one is expected to take less than this share of the time."""

CHANGE, CHANGE_ROUNDS = 1.5, 200
"""The other schedule is also measured when passes have become so many times longer, or shorter, since it ran; but no
more than once in so many rounds."""


TRIAL_WEIGHT = 100.0
"""Tokens that what was measured before a trial is worth at most, against those of the trial."""

MAX_HITS = 0.99
"""A draft's first guess is expected to be right at most so often."""


class ScheduleChoice:
    """The choice between `sequential` and `parallel` where either may be faster, as on the cores of a CPU.

    Several requests run `sequential`: they share draft steps, and their passes want all cores. So do the first answers
    that are written alone. Such an answer is also a trial: for a few rounds it runs the other schedule, in the first
    answer, then again after 8, 16, 32, ... answers, and when the machine has become slower or faster.

    Args:
        costs: measured costs, by load.
        speed: of the machine.
        seconds_a_token: returns the expected time per token of a load, by the text and the costs.
    """

    def __init__(
        self,
        costs: Mapping[LoadKey, CostModel],
        speed: Speed,
        seconds_a_token: Callable[[Load, TextStats, CostModel], float],
    ) -> None:
        self.costs = costs
        self.trials: dict[Schedule, Probe] = {"sequential": Probe(FIRST_TRIAL), "parallel": Probe(FIRST_TRIAL)}
        self._seconds_a_token = seconds_a_token
        self._rounds = 0  # of the answer
        self._before_trial = cast("Schedule | None", None)
        self._since_trial = 0  # rounds
        self._speed = speed
        self._speed_at: dict[LoadKey, float] = {}  # when the load ran last

    def observe_round(self, load: Load) -> None:
        """Note that a round has ended, before its pass is observed."""
        self._rounds, self._since_trial = self._rounds + 1, self._since_trial + 1
        self._speed_at[load.key] = self._speed.value

    def _change(self, key: LoadKey) -> float:
        """Return by how much the machine's speed has changed since the load ran: a factor of at least 1."""
        factor = self._speed.value / self._speed_at.get(key, self._speed.value)
        return max(factor, 1 / factor)

    def choose(self, texts: Sequence[TextStats], current: Schedule | None, positions: int) -> Schedule:
        """Choose for requests that run `current`, or are about to begin. See `Policy.auto`."""
        if current is None or len(texts) > 1:
            self._rounds, self._before_trial = 0, None
        elif self._before_trial is not None and self._rounds <= TRIAL_AFTER + TRIAL_ROUNDS:
            return current
        if len(texts) > 1:
            return "sequential"
        expected, change = self._expected(texts[0], positions)
        usual = self._before_trial or current
        best: Schedule = usual or "sequential"
        if known := all(expected.values()):
            if usual in expected:
                expected[usual] *= STAY
            best = min(self.trials, key=expected.__getitem__)
        self._before_trial = None
        changed = change > CHANGE and self._since_trial > CHANGE_ROUNDS
        if changed:
            self._rounds = min(self._rounds, TRIAL_AFTER)
        return self._try(best, due=changed or not known) if self._rounds == TRIAL_AFTER else best

    def _try(self, best: Schedule, *, due: bool) -> Schedule:
        """Return the other schedule if a trial of it is due; else the best."""
        other = next(schedule for schedule in self.trials if schedule != best)
        tried = other if due or self.trials[other].due else best
        for schedule, probe in self.trials.items():
            probe.count(seen=schedule in (best, tried))
        self._rounds += 1
        if tried != best:
            self._before_trial, self._since_trial = best, 0
            for measured in (costs.per_expected for key, costs in self.costs.items() if key[0] == tried):
                measured.weight = min(measured.weight, TRIAL_WEIGHT)
        return tried

    def _expected(self, text: TextStats, positions: int) -> tuple[dict[Schedule, float], float]:
        """Return the expected time per token under both schedules, and by how much the speed changed since one ran.

        Step times are those of one load that both have run. Those of a short text under one schedule are not compared
        with those of a long text under the other.
        """
        loads = [Load(schedule, 1, positions) for schedule in self.trials]
        comparable = [key for key, costs in self.costs.items() if costs.comparable]
        common = set.intersection(*({key[1:] for key in comparable if key[0] == load.schedule} for load in loads))
        if not common:
            return dict.fromkeys(self.trials, 0.0), 1.0
        size, length = min(common, key=loads[0].distance)
        keys: dict[Schedule, LoadKey] = {schedule: (schedule, size, length) for schedule in self.trials}
        expected = {at.schedule: self._seconds_a_token(at, text, self.costs[keys[at.schedule]]) for at in loads}
        return expected, max(map(self._change, keys.values()))


def seconds_by_model(costs: CostModel, num_seqs: int, hits: float, max_lead: int, *, parallel: bool) -> float:
    """Return the expected time per token of all answers, by step times and hits alone; 0 before steps were measured.

    Each answer drafts a chain of candidates, which are right as often as the draft's first guess is. Drafting takes
    time of its own under `sequential`, and overlaps the passes under `parallel`, where a miss wastes it. A draft whose
    reading does not pay drafts nothing: the target decodes alone.

    Args:
        costs: of the load, or of one like it.
        num_seqs: requests that run.
        hits: share of tokens that are the draft's first guess.
        max_lead: longest chain.
        parallel: whether draft and target work at once.
    """
    if not costs.comparable:
        return 0.0
    plain, step, hits = costs.target.at(num_seqs) / num_seqs, costs.draft.at(num_seqs), min(hits, MAX_HITS)
    if not step:
        return plain
    if not parallel:
        return min(plain, _with_a_chain(costs, num_seqs, hits, max_lead, num_seqs))
    best, most = math.inf, 1 + hits * (1 / (1 - hits) - 1)  # tokens of an endless chain
    for lead in range(1, max_lead + 1):
        if lead * step / most >= best:
            break  # longer chains only take longer
        elapsed = max(costs.target.at(num_seqs * (lead + 1)), lead * step)
        best = min(best, elapsed / (1 + hits * (tokens_of_chain(hits, lead) - 1)))
    return best / num_seqs


def with_a_chain(costs: CostModel, num_seqs: int, hits: float, max_lead: int) -> float:
    """Return the time per token of one answer, as its share of all of them, if it drafts a chain under `sequential`.

    The chain adds its rows to a pass, and its draft steps before it. Either all requests share these steps, or this one
    has them alone. The arguments are those of `seconds_by_model`.
    """
    hits = min(hits, MAX_HITS)
    return min(_with_a_chain(costs, num_seqs, hits, max_lead, sharing) for sharing in {1, num_seqs})


def _with_a_chain(costs: CostModel, num_seqs: int, hits: float, max_lead: int, sharing: int) -> float:
    """Return the time per token of one answer if `sharing` requests draft chains together."""
    plain, step, best = costs.target.at(num_seqs), costs.draft.at(sharing), math.inf
    for lead in range(1, max_lead + 1):
        more = costs.target.at(num_seqs + sharing * lead) - plain + lead * step
        time = (plain / num_seqs + more / sharing) / tokens_of_chain(hits, lead)
        if time > best:
            break  # longer chains only take longer
        best = time
    return best


def tokens_of_chain(hits: float, lead: int) -> float:
    """Return the tokens that a pass yields over a chain of `lead` candidates (Leviathan et al., arXiv 2211.17192)."""
    return (1 - hits ** (lead + 1)) / (1 - hits)
