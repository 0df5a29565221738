"""A sudden change in the middle of a run, and how fast the controller follows it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from benchmarks.contest.contest import GPU_LIMITS, GPU_SLOTS, Library, card, controller, joined
from benchmarks.contest.devices import costs_of
from benchmarks.contest.traces import Trace
from langchain_card.bench.step_times import Device
from langchain_card.core.controller import Controller
from langchain_card.core.policy import Load
from langchain_card.core.request import Request, SamplingParams
from tests.simulation.simulated import Simulation
from tests.simulation.toy import ToyDrafter, ToyTarget

HALF = 500
"""Tokens before a change, and after it."""

RATIO = 16.0
"""Target pass / draft step where changes are shown."""

SLOWER = 4.0
"""How much longer a pass of the target takes after a change of its step time."""


@dataclass(frozen=True)
class Round:
    """One round.

    Attributes:
        at: tokens of the answer when it ended.
        ended: when.
        rows: of its window.
        waited: seconds that it waited for its draft.
        believed: seconds that the controller now takes a pass over one row for.
        per_token: seconds that it now takes a token to cost.
    """

    at: int
    ended: float
    rows: int
    waited: float
    believed: float
    per_token: float


class Watched(Controller):
    """A controller whose rounds are written down."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.rounds: list[Round] = []
        self.tokens, self._now = 1, 0.0

    def saw_pass(
        self, load: Load, requests: int, rows: int, tokens: int, elapsed: float, since_last: float | None
    ) -> None:
        """Learns from it, and writes it down."""
        super().saw_pass(load, requests, rows, tokens, elapsed, since_last)
        if since_last is not None:
            costs = self.costs_of(load)
            self.tokens, self._now = self.tokens + tokens, self._now + since_last
            waited, believed = since_last - elapsed, costs.target.at(1)
            self.rounds.append(Round(self.tokens, self._now, rows, waited, believed, costs.per_token.value))


@dataclass(frozen=True)
class Change:
    """A run whose second half differs from its first.

    Attributes:
        name: what changes.
        index: of the first round that ends behind the change.
        rounds: all of them.
        true_pass: seconds of a pass over one row after the change.
        fresh: seconds per token of an engine that begins with the second half and knows nothing.
    """

    name: str
    index: int
    rounds: list[Round]
    true_pass: float
    fresh: float

    def per_token(self, first: int, last: int | None = None) -> float:
        """Seconds per token from the end of round `first` to that of round `last`, counted from the change."""
        start, stop = self.rounds[self.index + first], self.rounds[-1 if last is None else self.index + last]
        return (stop.ended - start.ended) / (stop.at - start.at)


def change(name: str, before: Sequence[Trace], after: Sequence[Trace], device: Device, slower: float = 1.0) -> Change:
    """One answer that changes at token `HALF`.

    Args:
        name: what changes.
        before: texts of its first half.
        after: texts of its second half.
        device: step times.
        slower: how much longer a pass takes in the second half.
    """
    first, second = joined(before, HALF), joined(after, HALF)
    text, costs = joined([first, second]), costs_of(device, RATIO)
    policy, library = Watched(shared_device=False, limits=GPU_LIMITS), Library([text])
    half = len(first.token_ids)
    target = ToyTarget(library, lambda rows: costs.target(rows) * (slower if policy.tokens > half else 1.0))
    drafter = ToyDrafter(library, step_time=costs.draft, num_slots=GPU_SLOTS)
    params = SamplingParams(max_tokens=len(text.token_ids), schedule="parallel")
    Simulation(target, drafter, policy, GPU_LIMITS).run([Request(0, library.traces[0].prompt_ids, params)])
    index = next(i for i, one in enumerate(policy.rounds) if one.at > half)
    slow = replace(costs, target=lambda rows: slower * costs.target(rows))
    fresh = 1 / card([second], slow, "parallel", controller())
    return Change(name, index, policy.rounds, costs.target(1) * slower, fresh)


def changes(kinds: Mapping[str, Sequence[Trace]], device: Device) -> list[Change]:
    """Acceptance that falls, and rises; a target that slows down."""
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
