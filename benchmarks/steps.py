"""Time of a step of the built-in pair on this CPU, by part: `python benchmarks/steps.py` (two minutes on two cores).

Medians of 20 steps of target and draft, by rows, all sizes in turn: the whole step, its compiled layers and their
matrix products (timed alone), the head, and the rest, which is Python and transformers; and the step on one thread.
"""

import gc
import statistics
from collections.abc import Callable
from time import perf_counter

import numpy as np

from langchain_card.config import EngineConfig
from langchain_card.models.loader import load_model, resolve
from langchain_card.runtime.cpu import row_layers
from langchain_card.runtime.cpu.blocks.activations import empty_rounded
from langchain_card.runtime.cpu.blocks.matmul import multiply
from langchain_card.runtime.cpu.plan import RowStablePlan
from langchain_card.runtime.cpu.team import cores
from langchain_card.runtime.rows import Rows
from langchain_card.runtime.runner import ModelRunner
from langchain_card.runtime.threads import num_cores, use_threads

CONTEXT, WIDTHS, RUNS = 200, (1, 2, 4, 5, 8, 9, 12, 16), 20


def stepper(model, width: int) -> Callable[[], object]:
    runner = ModelRunner(model, max_len=CONTEXT + 64, num_scratch=max(WIDTHS))
    cache = runner.open()
    runner.prefill(cache, list(range(100, 100 + CONTEXT)))
    rows = Rows(cache, list(range(400, 400 + width)), CONTEXT, [tuple(range(i + 1)) for i in range(width)])
    return lambda: runner.step([rows])


def products(model, width: int) -> Callable[[], object]:
    """Return a function that computes the matrix products of all layers on given rounded activations."""
    (stack,) = model.get_decoder().layers
    linear = [
        part.weights for layer in stack.stacked_layers for part in (layer.qkv, layer.out, layer.gate_up, layer.down)
    ]
    rounded = {weights.features: empty_rounded(width, weights.features) for weights in linear}
    for features, rows in rounded.items():
        x = np.random.default_rng(0).standard_normal((width, features), np.float32)
        row_layers.norm_and_round(x, np.empty(0, np.float32), np.float32(0), features, rows, 0, 1)

    def run() -> None:
        with cores() as threads:
            for weights in linear:
                multiply(rounded[weights.features], weights, threads)

    return run


class Meter:
    """A meter of the seconds within functions, by name."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    def around(self, owner: object, name: str, label: str) -> None:
        function = getattr(owner, name)
        self.seconds[label] = 0.0

        def timed(*args, **kwargs):
            started = perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                self.seconds[label] += perf_counter() - started

        setattr(owner, name, timed)

    def of(self, run: Callable[[], object]) -> list[float]:
        """Return the milliseconds of a run: whole, by name, and the rest."""
        self.seconds = dict.fromkeys(self.seconds, 0.0)
        started = perf_counter()
        run()
        whole = perf_counter() - started
        parts = list(self.seconds.values())
        return [1e3 * seconds for seconds in (whole, *parts, whole - sum(parts))]


def main() -> None:
    cores_here = num_cores()
    use_threads(cores_here, in_torch=False)
    pair = resolve(EngineConfig())
    meter = Meter()
    meter.around(RowStablePlan, "decode", "layers")
    meter.around(row_layers, "linear", "head")
    for name, spec in (("target", pair.target), ("draft", pair.draft)):
        assert spec is not None
        model = load_model(spec)
        steps = {width: (stepper(model, width), products(model, width)) for width in WIDTHS}
        gc.collect()
        gc.freeze()
        samples: dict[int, list[list[float]]] = {width: [] for width in WIDTHS}
        for _ in range(RUNS + 2):
            for width, (step, multiply_all) in steps.items():
                both = [*meter.of(step), meter.of(multiply_all)[0]]
                use_threads(1, in_torch=False)
                samples[width].append([*both, meter.of(step)[0]])
                use_threads(cores_here, in_torch=False)
        for width, runs in samples.items():
            whole, layers, head, rest, alone, one_thread = (
                statistics.median(column) for column in zip(*runs[2:], strict=True)
            )
            print(
                f"{name}, {width} rows: {whole:.1f} ms: layers {layers:.1f} (products {alone:.1f}), head {head:.1f}, "
                f"rest {rest:.1f} ({100 * rest / whole:.0f} %); on one thread {one_thread:.1f}",
                flush=True,
            )


if __name__ == "__main__":
    main()
