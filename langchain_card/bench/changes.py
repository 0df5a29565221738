"""A sudden change in the middle of a run, and how fast the controller follows it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from langchain_card.bench.contest import GPU_LIMITS, GPU_SLOTS, Library, joined
from langchain_card.bench.devices import Device
from langchain_card.bench.traces import Trace
from langchain_card.core.controller import Controller, Load
from langchain_card.core.request import Request, SamplingParams
from langchain_card.testing.simulated import Simulation
from langchain_card.testing.toy import ToyDrafter, ToyTarget

HALF = 500
"""Tokens before a change, and after it."""

CHANGE_RATIO = 16.0
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

    def saw_pass(self, load: Load, rows: int, tokens: int, elapsed: float, since_last: float | None) -> None:
        """Learns from it, and writes it down."""
        super().saw_pass(load, rows, tokens, elapsed, since_last)
        if since_last is not None:
            costs = self.costs_of(load)
            self.tokens, self._now = self.tokens + tokens, self._now + since_last
            waited, believed = since_last - elapsed, costs.target.at(1)
            self.rounds.append(Round(self.tokens, self._now, rows, waited, believed, costs.per_token.value))


def change(before: Sequence[Trace], after: Sequence[Trace], device: Device, c: float, slower: float) -> list[Round]:
    """Rounds of one answer that changes at token `HALF`.

    Args:
        before: texts of its first half.
        after: texts of its second half.
        device: step times.
        c: target pass / draft step.
        slower: how much longer a pass takes in the second half.
    """
    text, costs = joined([joined(before, HALF), joined(after, HALF)]), device.costs(c)
    policy, library = Watched(shared_device=False, limits=GPU_LIMITS), Library([text])
    target = ToyTarget(library, lambda rows: costs.target(rows) * (slower if policy.tokens > HALF else 1.0))
    drafter = ToyDrafter(library, step_time=costs.draft, num_slots=GPU_SLOTS)
    params = SamplingParams(max_tokens=len(text.token_ids), schedule="parallel")
    Simulation(target, drafter, policy, GPU_LIMITS).run([Request(0, library.traces[0].prompt_ids, params)])
    return policy.rounds


def changes(kinds: dict[str, list[Trace]], device: Device, c: float) -> dict[str, list[Round]]:
    """By name: acceptance that falls, and rises; a target that slows down."""
    first, last = kinds["code"], kinds["chat"]
    return {
        "code, then chat": change(first, last, device, c, 1.0),
        "chat, then code": change(last, first, device, c, 1.0),
        f"code, a target {SLOWER:g} times slower": change(first, first, device, c, SLOWER),
    }


def seconds_between(rounds: Sequence[Round], first: int, last: int) -> float:
    """Per token, from the first round that ends past token `first` to the first one past `last`."""
    start = next(r for r in rounds if r.at >= first)
    stop = next((r for r in rounds if r.at >= last), rounds[-1])
    return (stop.ended - start.ended) / (stop.at - start.at)
