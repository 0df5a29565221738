"""Step times of a pair of models: measured on this machine, interpolated, and written as device files."""

from __future__ import annotations

import bisect
import json
import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from itertools import accumulate
from pathlib import Path

from langchain_card.bench.teacher_forced import shared_model
from langchain_card.config import EngineConfig
from langchain_card.errors import InvalidInputError
from langchain_card.models.loader import resolve
from langchain_card.runtime.runner import ModelRunner
from langchain_card.runtime.step_timer import CONTEXT, StepTimer
from langchain_card.runtime.threads import ThreadPlan, use_threads

SIZES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)
"""Numbers of rows in a step that are measured."""


@dataclass(frozen=True)
class Device:
    """Step times of a target and a draft on one kind of device.

    Attributes:
        name: of the kind of device.
        measured: True if the times were measured, False if they are estimates.
        source: origin of the times.
        target: seconds of a target pass, by rows.
        draft: seconds of a draft step, by rows.
        slowdown: factors by which a step of (target, draft) takes longer while both models work.
    """

    name: str
    measured: bool
    source: str
    target: Mapping[int, float]
    draft: Mapping[int, float]
    slowdown: tuple[float, float] = (1.0, 1.0)

    @property
    def ratio(self) -> float:
        """Time of a target pass divided by that of a draft step, one row each."""
        return interpolate(self.target, 1) / interpolate(self.draft, 1)

    def save(self, path: Path) -> None:
        """Write the device as JSON."""
        path.write_text(json.dumps(asdict(self), indent=1) + "\n")


def check_curve(curve: Mapping[int, float], slowdown: tuple[float, ...] = ()) -> None:
    """Raise `ValueError` unless a curve of seconds by rows can be interpolated."""
    if len(curve) < 2 or min(curve) != 1:
        raise ValueError("a curve begins with one row and has two sizes or more")
    if not all(0 < value < math.inf for value in (*curve.values(), *slowdown)):
        raise ValueError("times and slow-downs are positive numbers")


def monotone(curve: Mapping[int, float]) -> dict[int, float]:
    """Return the curve with measurement noise removed: more rows never take less time."""
    sizes = sorted(curve)
    return dict(zip(sizes, accumulate((curve[size] for size in sizes), max), strict=True))


def interpolate(curve: Mapping[int, float], rows: float) -> float:
    """Return the time at `rows` by linear interpolation, beyond the last size by extrapolation."""
    sizes = sorted(curve)
    i = min(max(bisect.bisect_left(sizes, rows), 1), len(sizes) - 1)
    few, many = sizes[i - 1], sizes[i]
    return curve[few] + (curve[many] - curve[few]) * (rows - few) / (many - few)


def measure(config: EngineConfig, name: str, repeats: int, report: Callable[[str], None]) -> Device:
    """Measure the step times of a pair, each model alone and then both at once.

    Args:
        config: a target and a draft model.
        name: of the device.
        repeats: steps of each size. The result holds their medians.
        report: receives each figure.

    Raises:
        InvalidInputError: the pair has no draft model.
    """
    pair = resolve(config)
    if pair.draft is None:
        raise InvalidInputError("draft_model", config.draft_model, "must be a model", "prompt lookup takes no steps")
    on_cpu = [spec.device.type == "cpu" for spec in (pair.target, pair.draft)]
    plan = ThreadPlan(target_on_cpu=on_cpu[0], draft_on_cpu=on_cpu[1])
    with shared_model(pair.target) as target_model, shared_model(pair.draft) as draft_model:
        target, draft = (
            StepTimer(ModelRunner(model, max_len=2 * CONTEXT, num_scratch=max(SIZES)))
            for model in (target_model, draft_model)
        )
        use_threads(plan.target("sequential"), in_torch=pair.target.form == "float")
        alone = curves((target, draft), repeats)
        for side, times in zip(("target", "draft"), alone, strict=True):
            report(f"{side}: " + ", ".join(f"{rows} rows {1e3 * seconds:.1f} ms" for rows, seconds in times.items()))
        together = _together(target, draft, plan, repeats * alone[0][1], in_torch=pair.target.form == "float")
    slowdown = (together[0] / alone[0][1], together[1] / alone[1][1])
    report(f"both at once: the target takes {slowdown[0]:.2f} times as long, the draft {slowdown[1]:.2f}")
    source = f"measured: {config.model} and {config.draft_model}, medians of {repeats}, {CONTEXT} tokens before each"
    return Device(name, True, source, alone[0], alone[1], slowdown)


def curves(models: Sequence[StepTimer], repeats: int) -> list[dict[int, float]]:
    """Return the median seconds of a step by its rows, for each model. Models and sizes alternate."""
    times: list[dict[int, list[float]]] = [{rows: [] for rows in SIZES} for _ in models]
    for _ in range(repeats):
        for model, samples in zip(models, times, strict=True):
            for rows in SIZES:
                samples[rows].append(model.seconds(rows))
    return [{rows: statistics.median(seconds) for rows, seconds in samples.items()} for samples in times]


def _together(
    target: StepTimer, draft: StepTimer, plan: ThreadPlan, seconds: float, *, in_torch: bool
) -> Sequence[float]:
    """Return median seconds of one-row steps while both models work, each with its share of the threads."""
    until = time.perf_counter() + max(seconds, 1.0)

    def work(model: StepTimer, threads: int) -> float:
        use_threads(threads, in_torch=in_torch)
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
