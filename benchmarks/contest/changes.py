"""Runs with a sudden change in the middle, which show how fast the controller adapts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from benchmarks.contest.contest import GPU_LIMITS, GPU_SLOTS, Library, card, controller, joined
from benchmarks.contest.devices import costs_of
from benchmarks.contest.traces import Trace
from langchain_card.bench.step_times import Device
from langchain_card.core.controller import Controller
from langchain_card.core.policy import Load, TextStats
from langchain_card.core.request import Request, SamplingParams
from tests.simulation.simulated import Simulation
from tests.simulation.toy import ToyDrafter, ToyTarget

HALF = 500
"""Tokens before and after a change."""

RATIO = 16.0
"""Target pass / draft step of the runs."""

SLOWER = 4.0
"""Factor by which a target pass takes longer after a change of its step time."""


@dataclass(frozen=True)
class Round:
    """A round of the target, and the controller's estimates after it.

    Attributes:
        at: tokens of the answer at its end.
        ended: time of its end.
        rows: of its window.
        waited: seconds that it waited for the draft.
        believed: estimated seconds of a pass over one row.
        per_token: estimated seconds per token.
    """

    at: int
    ended: float
    rows: int
    waited: float
    believed: float
    per_token: float


class RecordingController(Controller):
    """A controller that records its rounds."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.rounds: list[Round] = []
        self.tokens, self._now = 1, 0.0

    def observe_pass(
        self,
        load: Load,
        texts: Sequence[TextStats],
        rows: int,
        tokens: int,
        elapsed: float,
        since_last: float | None,
    ) -> None:
        """Learn from a pass and record it."""
        super().observe_pass(load, texts, rows, tokens, elapsed, since_last)
        if since_last is not None:
            costs = self.costs_of(load)
            self.tokens, self._now = self.tokens + tokens, self._now + since_last
            waited, believed = since_last - elapsed, costs.target.at(1)
            self.rounds.append(Round(self.tokens, self._now, rows, waited, believed, costs.per_token.value))


@dataclass(frozen=True)
class Change:
    """A run whose second half differs from its first.

    Attributes:
        name: of the change.
        index: of the first round that ends after the change.
        rounds: all rounds of the run.
        true_pass: seconds of a pass over one row after the change.
        fresh: seconds per token of an engine that starts with the second half and has learnt nothing.
    """

    name: str
    index: int
    rounds: list[Round]
    true_pass: float
    fresh: float

    def per_token(self, first: int, last: int | None = None) -> float:
        """Return seconds per token between the ends of rounds `first` and `last`, which are counted from the change."""
        start, stop = self.rounds[self.index + first], self.rounds[-1 if last is None else self.index + last]
        return (stop.ended - start.ended) / (stop.at - start.at)


def change(name: str, before: Sequence[Trace], after: Sequence[Trace], device: Device, slower: float = 1.0) -> Change:
    """Run one answer that changes at token `HALF`.

    Args:
        name: of the change.
        before: texts of the first half.
        after: texts of the second half.
        device: step times.
        slower: factor by which a pass takes longer in the second half.
    """
    first, second = joined(before, HALF), joined(after, HALF)
    text, costs = joined([first, second]), costs_of(device, RATIO)
    policy, library = RecordingController(shared_device=False, limits=GPU_LIMITS), Library([text])
    half = len(first.token_ids)
    target = ToyTarget(library, lambda rows: costs.target(rows) * (slower if policy.tokens > half else 1.0))
    drafter = ToyDrafter(library, step_time=costs.draft, num_slots=GPU_SLOTS)
    params = SamplingParams(max_tokens=len(text.token_ids), schedule="parallel")
    Simulation(target, drafter, policy, GPU_LIMITS).run([Request(0, library.traces[0].prompt_ids, params)])
    index = next(i for i, done in enumerate(policy.rounds) if done.at > half)
    slow = replace(costs, target=lambda rows: slower * costs.target(rows))
    fresh = 1 / card([second], slow, "parallel", controller())
    return Change(name, index, policy.rounds, costs.target(1) * slower, fresh)


def changes(kinds: Mapping[str, Sequence[Trace]], device: Device) -> list[Change]:
    """Run three changes: acceptance falls, acceptance rises, the target slows down."""
    worst, *_, best = sorted(kinds, key=lambda kind: _share_of_firsts(kinds[kind]))
    hard, easy = kinds[worst], kinds[best]
    return [
        change(f"{best}, then {worst}", easy, hard, device),
        change(f"{worst}, then {best}", hard, easy, device),
        change(f"{best}, the target {SLOWER:g} times slower", easy, easy, device, SLOWER),
    ]


def _share_of_firsts(traces: Sequence[Trace]) -> float:
    ranks = [trace.rank(position) for trace in traces for position in range(len(trace.token_ids))]
    return ranks.count(0) / len(ranks)
