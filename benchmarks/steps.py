"""Where a step of the built-in pair goes on this CPU: `python benchmarks/steps.py` (three minutes on two cores).

Steps of target and draft by rows, then the time of one row and of eight by part. Medians of 20.
"""

import gc
import statistics
from collections.abc import Callable
from time import perf_counter

import torch

from langchain_card.config import EngineConfig
from langchain_card.runtime import integer_layers, row_kernels, row_stable
from langchain_card.runtime.loader import load_model, resolve
from langchain_card.runtime.rows import Rows
from langchain_card.runtime.runner import ModelRunner
from langchain_card.runtime.threads import num_cores

CONTEXT, WIDTHS, RUNS = 200, (1, 2, 4, 8, 16), 20


class Meter:
    """Seconds within functions, by name; those within others are counted twice."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    def around(self, owner: object, name: str, label: str) -> None:
        function = getattr(owner, name)

        def timed(*args, **kwargs):
            started = perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                self.seconds[label] = self.seconds.get(label, 0.0) + perf_counter() - started

        setattr(owner, name, timed)


def stepper(model, width: int) -> Callable[[], None]:
    runner = ModelRunner(model, max_len=CONTEXT + 64, num_scratch=max(WIDTHS))
    cache = runner.open()
    runner.prefill(cache, list(range(100, 100 + CONTEXT)))
    rows = Rows(cache, list(range(400, 400 + width)), CONTEXT, [tuple(range(i + 1)) for i in range(width)])
    return lambda: runner.step([rows])


def median(step: Callable[[], None]) -> float:
    """Milliseconds."""
    times = []
    for _ in range(RUNS + 2):
        started = perf_counter()
        step()
        times.append(1e3 * (perf_counter() - started))
    return statistics.median(times[2:])


def split(step: Callable[[], None]) -> str:
    meter = Meter()
    meter.around(integer_layers.IntegerLinear, "product", "products")
    meter.around(row_stable.RowStablePlan, "attend", "attention")
    for name in ("normed", "scaled", "gated", "heads", "add"):
        meter.around(row_kernels, name, "passes")
    step()
    meter.seconds.clear()
    started = perf_counter()
    for _ in range(RUNS):
        step()
    total = perf_counter() - started
    parts = {**meter.seconds, "rest": total - sum(meter.seconds.values())}
    return "  ".join(f"{name} {1e3 * s / RUNS:.1f} ms ({100 * s / total:.0f} %)" for name, s in parts.items())


def main() -> None:
    torch.set_num_threads(num_cores())
    pair = resolve(EngineConfig())
    models = {"target": load_model(pair.target), "draft": load_model(pair.draft)}
    gc.collect()
    gc.freeze()
    for name, model in models.items():
        for width in WIDTHS:
            print(f"{name}, {width} rows: {median(stepper(model, width)):.1f} ms", flush=True)
    steps = {f"{name}, {width} rows": stepper(model, width) for name, model in models.items() for width in (1, 8)}
    for name, step in steps.items():
        print(f"{name}: {split(step)}", flush=True)


if __name__ == "__main__":
    main()
