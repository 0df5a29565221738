"""Where a step of the built-in pair goes on this CPU: `python benchmarks/steps.py` (three minutes on two cores).

Steps of target and draft by rows, the draft in 4 bits and in int8 in turn; then one row's time by part. Medians of 20.
"""

import gc
import statistics
from collections.abc import Callable
from time import perf_counter

import torch

from langchain_card.config import EngineConfig
from langchain_card.runtime import int4, integer_layers, row_kernels, row_stable
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


def medians(step: Callable[[], None], forms: tuple[int, ...]) -> list[float]:
    """Milliseconds; `forms` are values of `int4.MAX_ROWS`, tried in turn."""
    times: dict[int, list[float]] = {form: [] for form in forms}
    for _ in range(RUNS + 2):
        for form in forms:
            int4.MAX_ROWS = form
            started = perf_counter()
            step()
            times[form].append(1e3 * (perf_counter() - started))
    return [statistics.median(found[2:]) for found in times.values()]


def split(step: Callable[[], None]) -> str:
    meter = Meter()
    for linear in (integer_layers.IntegerLinear, int4.Int4Linear):
        meter.around(linear, "product", "products")
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
    both = (int4.MAX_ROWS, 0)
    target, draft = load_model(pair.target), load_model(pair.draft)
    gc.collect()
    gc.freeze()
    for name, model, forms in (("target", target, both[:1]), ("draft, 4 bits and int8", draft, both)):
        for width in WIDTHS:
            found = ", ".join(f"{ms:.1f}" for ms in medians(stepper(model, width), forms))
            print(f"{name}, {width} rows: {found} ms", flush=True)
    int4.MAX_ROWS = both[0]
    steps = {"target": stepper(target, 1), "draft": stepper(draft, 1)}
    for name in ("target", "draft"):
        print(f"{name}, one row: {split(steps[name])}", flush=True)


if __name__ == "__main__":
    main()
