"""The contest on a virtual clock: this engine, which learns as it goes, against others with their best settings."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from langchain_card.bench.beams import trace_path
from langchain_card.bench.contenders import CONTENDERS, Costs, total, tune
from langchain_card.bench.traces import Trace, TraceScript
from langchain_card.config import Limits, Schedule
from langchain_card.core.controller import Controller, Policy
from langchain_card.core.request import Request, SamplingParams
from langchain_card.testing.simulated import simulate
from langchain_card.testing.toy import ToyDrafter, ToyTarget

OTHERS = ("plain", "chain", "tree", "card-synchronous", "linear-asynchronous", "outcome-cache")
WIDTH, BRANCH = 64, 4


@dataclass(frozen=True)
class Row:
    """One figure.

    Attributes:
        trace: kind of text.
        c: target step / draft step.
        method: who.
        setting: of a contender: its draft length, ratio or wait.
        speedup: over plain decoding.
        ceiling: about what no schedule passes with this draft: a token a draft step, and in one call of the target all
            that a tree of 64 layers holds.
    """

    trace: str
    c: float
    method: str
    setting: int
    speedup: float
    ceiling: float


def card(traces: Sequence[Trace], costs: Costs, schedule: Schedule, policy: Policy, limits: Limits) -> float:
    """Speed-up of this engine over plain decoding, one text after the other, learning included."""
    seconds, tokens = 0.0, 0
    for trace in traces:
        script = TraceScript(trace, traces)
        params = SamplingParams(max_tokens=len(trace.token_ids), schedule=schedule)
        target = ToyTarget(script, costs.target)
        drafter = ToyDrafter(script, step_time=costs.draft)
        token_ids, stats = simulate(Request(0, trace.prompt_ids, params), target, drafter, policy, limits)
        assert tuple(token_ids) == trace.token_ids, "a simulated answer is not the recorded one"
        seconds, tokens = seconds + stats.ended - stats.submitted, tokens + len(token_ids)
    return tokens * costs.target(1) / seconds


def contest(name: str, traces: Sequence[Trace], ratios: Sequence[float], limits: Limits) -> Iterator[Row]:
    """All cells of one kind of text."""
    paths = [trace_path(trace, traces, WIDTH, BRANCH) for trace in traces]
    for c in ratios:
        costs = Costs.constant(c)
        boundless = total(CONTENDERS["tree"][0], paths, Costs.constant(1e6), 64)
        ceiling = min(c, boundless.tokens / boundless.calls)
        for method in OTHERS:
            contender, settings = CONTENDERS[method]
            setting = tune(contender, paths, costs, settings)
            yield Row(name, c, method, setting, total(contender, paths, costs, setting).speedup(costs), ceiling)
        policy = Controller(shared_device=False, limits=limits)
        yield Row(name, c, "card", 0, card(traces, costs, "auto", policy, limits), ceiling)
