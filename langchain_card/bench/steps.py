"""Step times of a pair on this machine: what `Device` files hold."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

from langchain_card.bench.devices import Device
from langchain_card.bench.teacher_forced import borrowed
from langchain_card.config import EngineConfig
from langchain_card.errors import InvalidInputError
from langchain_card.models.loader import resolve
from langchain_card.runtime.kv_cache import KVCache
from langchain_card.runtime.rows import Rows
from langchain_card.runtime.runner import ModelRunner
from langchain_card.runtime.threads import ThreadPlan, use_threads

SIZES = (1, 2, 3, 4, 6, 8, 12, 16)
"""Rows of a step."""

CONTEXT = 256
"""Tokens before it."""


class Steps:
    """One model with a text in its cache."""

    def __init__(self, runner: ModelRunner) -> None:
        self._runner = runner
        self._cache: KVCache = runner.open()
        runner.prefill(self._cache, [1 + i % 99 for i in range(CONTEXT)])

    def seconds(self, rows: int) -> float:
        """Of one step over a chain of `rows` rows, which leaves nothing behind."""
        paths = [tuple(range(i + 1)) for i in range(rows)]
        begun = time.perf_counter()
        self._runner.step([Rows(self._cache, [5] * rows, self._cache.length, paths)]).argmax(-1).tolist()
        return time.perf_counter() - begun


def measure(config: EngineConfig, name: str, repeats: int, report: Callable[[str], None]) -> Device:
    """Medians over `repeats` steps of each size, sizes taking turns; then both models at once, a row a step.

    Args:
        config: a target and a model draft.
        name: of the device.
        repeats: steps of each size.
        report: told each figure.
    """
    pair = resolve(config)
    if pair.draft is None:
        raise InvalidInputError("draft_model", config.draft_model, "must be a model", "prompt lookup takes no steps")
    on_cpu = [spec.device.type == "cpu" for spec in (pair.target, pair.draft)]
    plan = ThreadPlan(target_on_cpu=on_cpu[0], draft_on_cpu=on_cpu[1])
    with borrowed(pair.target) as target_model, borrowed(pair.draft) as draft_model:
        target, draft = (
            Steps(ModelRunner(model, max_len=2 * CONTEXT, num_scratch=max(SIZES)))
            for model in (target_model, draft_model)
        )
        use_threads(plan.target("sequential"))
        found = curves((target, draft), repeats)
        for side, times in zip(("target", "draft"), found, strict=True):
            report(f"{side}: " + ", ".join(f"{rows} rows {1e3 * seconds:.1f} ms" for rows, seconds in times.items()))
        together = _together(target, draft, plan, repeats * found[0][1])
    slowdown = (together[0] / found[0][1], together[1] / found[1][1])
    report(f"both at once: the target takes {slowdown[0]:.2f} times as long, the draft {slowdown[1]:.2f}")
    source = f"measured: {config.model} and {config.draft_model}, medians of {repeats}, {CONTEXT} tokens before each"
    return Device(name, True, source, found[0], found[1], slowdown)


def curves(models: Sequence[Steps], repeats: int) -> list[dict[int, float]]:
    """Median seconds of a step by its rows, for each model; models and sizes take turns."""
    times: list[dict[int, list[float]]] = [{rows: [] for rows in SIZES} for _ in models]
    for _ in range(repeats):
        for model, seen in zip(models, times, strict=True):
            for rows in SIZES:
                seen[rows].append(model.seconds(rows))
    return [{rows: statistics.median(each) for rows, each in seen.items()} for seen in times]


def _together(target: Steps, draft: Steps, plan: ThreadPlan, seconds: float) -> Sequence[float]:
    """Median step times while both models work, each with its share of the threads."""
    until = time.perf_counter() + max(seconds, 1.0)

    def work(model: Steps, threads: int) -> float:
        use_threads(threads)
        times = [model.seconds(1)]
        while time.perf_counter() < until:
            times.append(model.seconds(1))
        return statistics.median(times)

    with ThreadPoolExecutor(2) as pool:
        sides = [
            pool.submit(work, model, threads)
            for model, threads in ((target, plan.target("parallel")), (draft, plan.draft("parallel")))
        ]
        return [side.result() for side in sides]
