"""The schedule that "auto" stands for: what step times let expect of each, and trials of the one that does not run."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import cast

from langchain_card.config import Schedule
from langchain_card.core.costs import CostModel, Probe, Slowness
from langchain_card.core.policy import Load, LoadKey, TextStats

FIRST_TRIAL = 8
"""Requests after which the slower schedule is measured again; then twice as many, and so on."""

TRIAL_AFTER, TRIAL_ROUNDS = 12, 4
"""Rounds of an answer before a trial, and rounds of a trial: its price is bounded, however slow that schedule is."""

STAY = 0.95
"""Running requests change their schedule if another one is expected to take less than this share of the time."""

CHANGED = 1.5
"""The other schedule is measured again after steps have become so many times longer, or shorter."""


class ScheduleChoice:
    """The choice between `sequential` and `parallel` where either may be faster, as on the cores of a CPU.

    Several requests run `sequential`: they share draft steps, and their passes want all cores. So do the first answers
    that are written alone. Such an answer is also a trial: for a few rounds it runs the other schedule, in the first
    answer, then again after 8, 16, 32, ... answers, and when the speed of the machine has changed.

    Args:
        costs: measured costs, by load.
        seconds_a_token: returns the expected time per token of a load, by the share of hits and the costs.
        slowness: of the target's device.
    """

    def __init__(
        self,
        costs: Mapping[LoadKey, CostModel],
        seconds_a_token: Callable[[Load, float, CostModel | None], float],
        slowness: Slowness,
    ) -> None:
        self.costs = costs
        self.trials: dict[Schedule, Probe] = {"sequential": Probe(FIRST_TRIAL), "parallel": Probe(FIRST_TRIAL)}
        self._seconds_a_token = seconds_a_token
        self._slowness, self._tried_at = slowness, slowness.value
        self._rounds = 0  # of the answer
        self._usual = cast("Schedule | None", None)  # what ran before a trial

    def count_round(self) -> None:
        """Note that a round has ended."""
        self._rounds += 1

    def choose(self, texts: Sequence[TextStats], current: Schedule | None, positions: int) -> Schedule:
        """Choose for requests that run `current`, or are about to begin. See `Policy.auto`."""
        if current is None or len(texts) > 1:
            self._rounds, self._usual = 0, None
        elif self._usual is not None and self._rounds <= TRIAL_AFTER + TRIAL_ROUNDS:
            return current
        if len(texts) > 1:
            return "sequential"
        self._notice_change()
        expected = self._expected(texts[0], positions)
        usual = self._usual or current
        best: Schedule = usual or "sequential"
        if known := all(expected.values()):
            if usual in expected:
                expected[usual] *= STAY
            best = min(self.trials, key=expected.__getitem__)
        self._usual = None
        return self._try(best, known) if self._rounds == TRIAL_AFTER else best

    def _notice_change(self) -> None:
        """Make a trial due after the speed of the machine has changed much."""
        changed = self._slowness.value / self._tried_at
        if max(changed, 1 / changed) > CHANGED:
            self._tried_at, self._rounds = self._slowness.value, min(self._rounds, TRIAL_AFTER)
            for probe in self.trials.values():
                probe.reset()

    def _try(self, best: Schedule, known: bool) -> Schedule:
        """Return the other schedule if it is due, or was never measured; else the best."""
        other = next(schedule for schedule in self.trials if schedule != best)
        tried = other if self.trials[other].due or not known else best
        for schedule, probe in self.trials.items():
            probe.seen() if schedule in (best, tried) else probe.missed()
        self._usual = best if tried != best else None
        self._rounds += 1
        return tried

    def _expected(self, text: TextStats, positions: int) -> dict[Schedule, float]:
        """Return the expected time per token under both schedules, by step times of one load that both have run.

        The step times of a short text under one schedule say nothing about those of a long text under the other.
        """
        loads = [Load(schedule, 1, positions) for schedule in self.trials]
        comparable = [key for key, costs in self.costs.items() if costs.comparable]
        common = set.intersection(*({key[1:] for key in comparable if key[0] == load.schedule} for load in loads))
        nearest = min(common, key=lambda size: loads[0].distance(("plain", *size)), default=None)
        costs = [None if nearest is None else self.costs[load.schedule, nearest[0], nearest[1]] for load in loads]
        hits = text.hits.value
        return {load.schedule: self._seconds_a_token(load, hits, own) for load, own in zip(loads, costs, strict=True)}


MAX_HITS = 0.99
"""A draft's first guess is expected to be right at most so often."""


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
    hits = min(hits, MAX_HITS)
    if not costs.comparable:
        return 0.0
    if not (step := costs.draft.at(num_seqs)):
        return costs.target.at(num_seqs) / num_seqs
    times = []
    for lead in range(parallel, max_lead + 1):
        tokens = tokens_of_chain(hits, lead)
        elapsed = costs.target.at(num_seqs * (lead + 1))
        if parallel:
            times.append(max(elapsed, lead * step) / (1 + hits * (tokens - 1)))
        else:
            times.append((elapsed + lead * step) / tokens)
    return min(times) / num_seqs


def with_a_chain(costs: CostModel, num_seqs: int, hits: float, max_lead: int) -> float:
    """Return the time per token of one answer, as its share of all of them, if it drafts a chain under `sequential`.

    The chain adds its rows to a pass, and its draft steps before it. Either all requests share these steps, or this one
    has them alone. The arguments are those of `seconds_by_model`.
    """
    plain, hits, best = costs.target.at(num_seqs), min(hits, MAX_HITS), math.inf
    for sharing in {1, num_seqs}:
        step, last = costs.draft.at(sharing), math.inf
        for lead in range(1, max_lead + 1):
            more = costs.target.at(num_seqs + sharing * lead) - plain + lead * step
            time = (plain / num_seqs + more / sharing) / tokens_of_chain(hits, lead)
            if time > last:
                break  # longer chains only take longer
            best, last = min(best, time), time
    return best


def tokens_of_chain(hits: float, lead: int) -> float:
    """Return the tokens that a pass yields over a chain of `lead` candidates (Leviathan et al., arXiv 2211.17192)."""
    return (1 - hits ** (lead + 1)) / (1 - hits)
