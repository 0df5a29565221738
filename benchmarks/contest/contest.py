"""The contest on a virtual clock: this engine, which learns while it runs, and others with their best settings."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from itertools import product
from multiprocessing import get_context

from benchmarks.contest.beams import trace_path
from benchmarks.contest.contenders import CONTENDERS, Costs, total, tune
from benchmarks.contest.devices import costs_of
from benchmarks.contest.traces import Candidates, Trace, TraceScript
from benchmarks.contest.trees import TreeRun, tree_runs
from langchain_card.bench.step_times import Device
from langchain_card.config import Schedule
from langchain_card.core.controller import Controller
from langchain_card.core.policy import Policy
from langchain_card.core.request import Request, SamplingParams
from langchain_card.limits import Limits, Pins
from langchain_card.runtime.threads import num_cores
from tests.simulation.simulated import SimulatedAnswer, Simulation
from tests.simulation.toy import ToyDrafter, ToyTarget

TOKENS = 1000
"""Tokens of a text of the contest."""

RATIOS = (1, 2, 4, 8, 16, 32, 64)
"""Target pass / draft step."""

BATCHES = (1, 4, 16, 64)
"""Numbers of concurrent requests."""

OTHERS = ("plain", "chain", "card-synchronous", "linear-asynchronous", "outcome-cache")
WIDTH, BRANCH = 64, 4

GPU_LIMITS = Limits(max_window=64, max_lead=64, max_draft_width=64, max_tree_nodes=16384, max_num_seqs=max(BATCHES))
GPU_SLOTS, CPU_SLOTS = 4096, 64
"""Nodes whose KV a draft can hold on its own GPU, and beside its target (`engine.drafter_hosts.SCRATCH`)."""

GRID = [
    *(("parallel", Pins(*pins)) for pins in product((8, 64), (64,), (0, 2, 4, 8, 12, 16))),
    *(("parallel", Pins(*pins)) for pins in product((64,), (16,), (0, 4, 8))),
    *(("sequential", Pins(*pins)) for pins in product((64,), (64,), (2, 4, 8, 16))),
]
"""Fixed settings of this engine that are tried in hindsight: schedule and pins (width, window, lead)."""

CPU_GRID = [
    ("plain", Pins()),
    *(("sequential", Pins(1, lead + 1, lead)) for lead in (1, 2, 3, 4, 6, 8)),
    *(("sequential", Pins(4, 16, lead)) for lead in (2, 4)),
    *(("parallel", Pins(1, lead + 1, 0)) for lead in (2, 4, 8)),
]
"""The same where both models share the cores of a CPU."""

CPU_CELLS = [
    *((count, 128, False) for count in (1, 2, 4, 8, 16)),
    *((1, tokens, False) for tokens in (32, 512)),
    *((count, 128, True) for count in (1, 4)),
]
"""Cells on a CPU: requests at once, tokens of an answer, and whether the host has other work."""

ANSWERS = 16
"""Answers of a cell on a CPU, at least; twice as many as requests at once."""

SLOW, BURST, STARTS = 2.0, 40, (0, 20, 40, 60)
"""Factor by which steps take longer on a slow host, passes before it changes, and passes before the first answer. A
cell's speed is the mean over these starts, because chance makes differences of 4 % between them."""


@dataclass(frozen=True)
class Row:
    """The speed-up of one method in one cell of the contest.

    Attributes:
        trace: kind of text.
        c: target pass / draft step.
        method: name of the method.
        setting: the best one, for methods that are tuned.
        speedup: over plain decoding.
        ceiling: approximate limit of any schedule with this draft: one token per draft step, and per target pass all
            tokens that a tree of 64 layers holds.
    """

    trace: str
    c: float
    method: str
    setting: str
    speedup: float
    ceiling: float


class Library:
    """The scripts of several texts, selected by the first token."""

    def __init__(self, traces: Sequence[Trace]) -> None:
        self.traces = [replace(trace, prompt_ids=(number,)) for number, trace in enumerate(traces)]
        self._scripts = [TraceScript(trace, traces) for trace in self.traces]

    def target_token(self, prefix: tuple[int, ...]) -> int:
        """Return the target's token after `prefix`."""
        return self._scripts[prefix[0]].target_token(prefix)

    def candidates(self, prefix: tuple[int, ...], source: int = 1) -> Candidates:
        """Return the draft's candidates after `prefix`."""
        return self._scripts[prefix[0]].candidates(prefix, source)


def joined(traces: Sequence[Trace], tokens: int = TOKENS) -> Trace:
    """Return several texts as one, cut at `tokens`."""
    fields = (
        (x for trace in traces for x in getattr(trace, name)) for name in ("token_ids", "draft_ids", "draft_logs")
    )
    ids, draft_ids, draft_logs = (tuple(field)[:tokens] for field in fields)
    return Trace((0,), ids, draft_ids, draft_logs)


def card(
    traces: Sequence[Trace],
    costs: Costs,
    schedule: Schedule,
    policy: Policy,
    *,
    limits: Limits = GPU_LIMITS,
    num_slots: int = GPU_SLOTS,
    slowdown: tuple[float, float] = (1.0, 1.0),
) -> float:
    """Return the tokens per second of this engine over concurrent texts, learning included."""
    library = Library(traces)
    target = ToyTarget(library, costs.target)
    drafter = ToyDrafter(library, step_time=costs.draft, num_slots=num_slots)
    requests = [
        Request(i, trace.prompt_ids, SamplingParams(max_tokens=len(trace.token_ids), schedule=schedule))
        for i, trace in enumerate(library.traces)
    ]
    simulation = Simulation(target, drafter, policy, limits, slowdown)
    answers: list[SimulatedAnswer] = simulation.run(requests)
    for answer, trace in zip(answers, traces, strict=True):
        assert tuple(answer.token_ids) == trace.token_ids, "a simulated answer is not the recorded one"
    return sum(len(trace.token_ids) for trace in traces) / simulation.now


def controller(pins: Pins | None = None, *, shared_device: bool = False, limits: Limits = GPU_LIMITS) -> Controller:
    """Return a controller that has learnt nothing."""
    return Controller(shared_device=shared_device, limits=limits, pins=pins or Pins())


def cell(name: str, traces: Sequence[Trace], trees: Sequence[TreeRun], device: Device, c: float) -> list[Row]:
    """Run all methods over one kind of text at one ratio, with a device for each model."""
    costs, text = costs_of(device, c), joined(traces)
    path = [trace_path(text, traces, WIDTH, BRANCH)]
    boundless = total(CONTENDERS["tree"][0], path, Costs.constant(1e6), 64)
    ceiling = min(c, boundless.tokens / boundless.calls)
    results: list[tuple[str, str, float]] = []
    for method in OTHERS:
        contender, settings = CONTENDERS[method]
        setting = tune(contender, path, costs, settings)
        results.append((method, str(setting), total(contender, path, costs, setting).speedup(costs)))
    tree = max(trees, key=lambda run: run.speedup(costs))
    results.append(("tree", "depth {}, width {}, window {}".format(*tree.setting), tree.speedup(costs)))
    plain = costs.target(1)
    fixed = [(plain * card([text], costs, s, controller(p)), s, p) for s, p in GRID]  # type: ignore[arg-type]
    best, schedule, pins = max(fixed, key=lambda entry: entry[0])
    results.append(("card-fixed", f"{schedule}, width {pins.draft_width}, {pins.window} rows, lead {pins.lead}", best))
    results.append(("card", "", plain * card([text], costs, "auto", controller())))
    limits = Limits()
    smaller = card([text], costs, "auto", controller(limits=limits), limits=limits, num_slots=CPU_SLOTS)
    results.append(("card-default", "", plain * smaller))
    return [Row(name, c, method, setting, speedup, ceiling) for method, setting, speedup in results]


def shared_cell(name: str, traces: Sequence[Trace], device: Device) -> list[Row]:
    """Run this engine's schedules with both models on one device, which each slows down for the other."""
    costs, text, limits = costs_of(device), joined(traces), Limits()

    def run(schedule: Schedule) -> float:
        policy = controller(shared_device=True, limits=limits)
        return costs.target(1) * card(
            [text], costs, schedule, policy, limits=limits, num_slots=CPU_SLOTS, slowdown=device.slowdown
        )

    schedules: tuple[Schedule, ...] = ("plain", "sequential", "parallel", "auto")
    methods = ("plain", "sequential", "parallel", "card")
    return [
        Row(f"{name}, one {device.name}", device.ratio, method, "", run(schedule), device.ratio + 1)
        for method, schedule in zip(methods, schedules, strict=True)
    ]


def slow_host(costs: Costs, start: int) -> Costs:
    """Return step times on a host whose other work comes and goes: `BURST` passes, then as many that take longer.

    Args:
        costs: without other work.
        start: number of passes before the first.
    """
    passes = itertools.count(start)
    factor = 1.0

    def target(rows: int) -> float:
        nonlocal factor
        factor = SLOW if next(passes) // BURST % 2 else 1.0
        return factor * costs.target(rows)

    return Costs(draft=lambda rows: factor * costs.draft(rows), target=target)


def cpu_cell(name: str, traces: Sequence[Trace], device: Device, count: int, tokens: int, slow: bool) -> list[Row]:
    """Run answers of so many tokens on a CPU, `count` at once, the next one when an answer ends."""
    tokens = min(tokens, sum(len(trace.token_ids) for trace in traces))
    text = joined(traces, tokens * max(ANSWERS, 2 * count))
    texts = [cut(text, start, tokens) for start in range(0, len(text.token_ids) - tokens + 1, tokens)]
    texts = [*itertools.islice(itertools.cycle(texts), max(ANSWERS, 2 * count))]
    limits = Limits(max_num_seqs=count)

    def run(schedule: Schedule, pins: Pins | None = None) -> float:
        costs = costs_of(device)
        hosts = [slow_host(costs, start) for start in STARTS] if slow else [costs]
        return statistics.harmonic_mean([on_host(host, schedule, pins or Pins()) for host in hosts])

    def on_host(costs: Costs, schedule: Schedule, pins: Pins) -> float:
        policy = Controller(shared_device=True, limits=limits, pins=pins, overlaps=True)
        return card(texts, costs, schedule, policy, limits=limits, num_slots=CPU_SLOTS, slowdown=device.slowdown)

    plain = run("plain")
    best, schedule, pins = max(((run(s, p), s, p) for s, p in CPU_GRID), key=lambda entry: entry[0])  # type: ignore[arg-type]
    title = f"{name}, {count} at once, {tokens} tokens{' on a slow host' if slow else ''}"
    found = {"plain": ("", plain), "card-fixed": (f"{schedule}, lead {pins.lead}", best), "card": ("", run("auto"))}
    return [Row(title, device.ratio, m, setting, speed / plain, device.ratio) for m, (setting, speed) in found.items()]


def cut(trace: Trace, start: int, tokens: int) -> Trace:
    """Return a part of a trace."""
    stop = start + tokens
    parts = (getattr(trace, name)[start:stop] for name in ("token_ids", "draft_ids", "draft_logs"))
    return Trace(trace.prompt_ids, *parts)


def batch_cell(name: str, traces: Sequence[Trace], device: Device, c: float, count: int) -> list[Row]:
    """Run several requests at once, verified together."""
    costs = costs_of(device, c)
    texts = [traces[i % len(traces)] for i in range(count)]
    plain, ours = (card(texts, costs, schedule, controller()) for schedule in ("plain", "auto"))
    title = f"{name}, {count} at once"
    return [Row(title, c, "plain", "", 1.0, c), Row(title, c, "card", "", ours / plain, c)]


def contest(kinds: dict[str, list[Trace]], gpu: Device, cpu: Device, ratios: Sequence[float]) -> Iterator[list[Row]]:
    """Yield the rows of each cell. As many cells run at once as there are cores.

    Args:
        kinds: traces by kind of text.
        gpu: device of each model.
        cpu: device that both models share.
        ratios: target pass / draft step on `gpu`.
    """
    with ProcessPoolExecutor(num_cores(), mp_context=get_context("spawn")) as pool:
        trees = dict(zip(kinds, pool.map(tree_runs, map(joined, kinds.values())), strict=True))
        jobs: list[tuple[Callable[..., list[Row]], tuple[object, ...]]] = [
            *((cell, (name, kinds[name], trees[name], gpu, c)) for name, c in product(kinds, ratios)),
            *((shared_cell, (name, kinds[name], cpu)) for name in kinds),
            *((batch_cell, (name, kinds[name], gpu, 8.0, count)) for name, count in product(kinds, BATCHES)),
            *((cpu_cell, (name, kinds[name], cpu, *setting)) for name, setting in product(kinds, CPU_CELLS)),
        ]
        try:
            for future in [pool.submit(job, *args) for job, args in jobs]:
                yield future.result()
        finally:  # also when the caller stops iterating
            pool.shutdown(wait=False, cancel_futures=True)
