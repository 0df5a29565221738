"""Time of a head's parts beside a pass of its target: `python benchmarks/heads.py MODEL FOLDER` (a minute or two).

Medians of 60 runs, all parts in turn and back, by rows of the window: a pass without taps, a pass with them, what the
head does after each pass, and a draft step.
"""

import argparse
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from time import perf_counter
from typing import Any

from langchain_card.config import EngineConfig
from langchain_card.core.messages import ROOT, Window
from langchain_card.heads.folder import load_head
from langchain_card.models.loader import load_model, resolve
from langchain_card.runtime.heads import HeadRunner, ObservedRows
from langchain_card.runtime.kv_cache import KVCache
from langchain_card.runtime.rows import Rows
from langchain_card.runtime.runner import ModelRunner
from langchain_card.runtime.taps import Taps
from langchain_card.runtime.threads import num_cores, use_threads

CONTEXT, WIDTHS, RUNS = 200, (1, 2, 3, 4, 8, 16), 60


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("folder", type=Path)
    args = parser.parse_args()
    pair = resolve(EngineConfig(args.model, None))
    model = load_model(pair.target)
    use_threads(num_cores(), in_torch=False)
    head = HeadRunner(load_head(args.folder, model))
    scratch = max(WIDTHS) + head.num_scratch
    fields: dict[str, Any] = {"max_len": CONTEXT + 64, "num_scratch": scratch, "integer_kv": pair.target.integer_kv}
    plain = ModelRunner(model, **fields)
    tapped = ModelRunner(model, taps=Taps(model, head.taps), more_layers=head.num_layers, **fields)
    head.bind(tapped)
    print(f"{'rows':>4} {'pass ms':>8} {'with taps':>10} {'observe':>8} {'step':>6}")
    caches = [(runner, runner.open()) for runner in (plain, tapped)]
    for runner, cache in caches:
        runner.prefill(cache, [*range(100, 100 + CONTEXT)])
    for width in WIDTHS:
        parts = of_width(caches, head, width)
        spent: dict[str, list[float]] = {name: [] for name in parts}
        for run in range(RUNS):
            for name in parts if run % 2 else reversed(parts):  # what ran before a part has filled the caches
                begun = perf_counter()
                parts[name]()
                spent[name].append(1e3 * (perf_counter() - begun))
        medians = {name: statistics.median(times[5:]) for name, times in spent.items()}
        print("{:>4} {plain:>8.2f} {taps:>10.2f} {observe:>8.2f} {step:>6.2f}".format(width, **medians), flush=True)


def of_width(
    caches: Sequence[tuple[ModelRunner, KVCache]], head: HeadRunner, width: int
) -> dict[str, Callable[[], object]]:
    """Return the parts of a round whose window is a chain, by runners without taps and with them, and their texts."""
    (plain, _), (tapped, _) = caches
    tokens, parents = (*range(400, 400 + width),), (ROOT, *range(width - 1))
    paths = [(*range(row + 1),) for row in range(width)]
    windows = [Rows(cache, tokens, CONTEXT, paths) for _, cache in caches]
    observed = ObservedRows(0, windows[1], [*range(401, 401 + width)], Window(0, 0, CONTEXT, tokens, parents))
    tapped.step([windows[1]])
    head.observe([observed])

    def step() -> object:
        if head.num_slots:
            slots = head.slots(head.windows[0].outputs[-1:])
            return head.slot_logits(slots, [*range(head.num_slots)])
        drafted = Rows(
            windows[1].cache, [500], CONTEXT, [(*paths[-1], head.first_slot)], features=head.windows[0].outputs[-1:]
        )
        return head.logits(head.step([drafted]))

    return {
        "plain": lambda: plain.step([windows[0]]),
        "taps": lambda: tapped.step([windows[1]]),
        "observe": lambda: head.observe([observed]),
        "step": step,
    }


if __name__ == "__main__":
    main()
