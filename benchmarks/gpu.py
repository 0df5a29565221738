"""Step times of a GPU compared with its bandwidth limit, and the speed-up they allow. Takes less than eight minutes.

python benchmarks/gpu.py                 torch and transformers suffice; skips where there is no CUDA device
python benchmarks/gpu.py --tiny          the same code on two tiny models, on a CPU if need be

Models are of true shapes with random weights, in bfloat16. With one GPU the speed of two is projected from step times.
"""

from __future__ import annotations

import argparse
import functools
import gc
import json
import random
import statistics
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
from transformers import AutoModelForCausalLM, Qwen2Config

from benchmarks.contest.contest import card, controller, joined
from benchmarks.contest.devices import costs_of
from benchmarks.contest.traces import shipped
from langchain_card.bench.step_times import Device
from langchain_card.core import messages as m
from langchain_card.core.request import Request, SamplingParams
from langchain_card.core.walk import ExactRule
from langchain_card.drafters.model import ModelDrafter
from langchain_card.engine.target_worker import TargetWorker
from langchain_card.ports import Budget, Constraint
from langchain_card.runtime.attention import ATTENTION_NAME, register
from langchain_card.runtime.grid_steps import compile_layers
from langchain_card.runtime.rows import Rows
from langchain_card.runtime.runner import ModelRunner

SHAPES = {  # hidden, intermediate, layers, heads, KV heads, tied embeddings
    "0.5B": (896, 4864, 24, 14, 2, True),
    "1.5B": (1536, 8960, 28, 12, 2, True),
    "7B": (3584, 18944, 28, 28, 4, False),
    "32B": (5120, 27648, 64, 40, 8, False),
}
TINY = {"0.5B": (64, 128, 2, 4, 2, True), "7B": (128, 256, 3, 4, 2, False)}
CONTEXT, MAX_LEN, SCRATCH, STRICT_WIDTH = 1024, 2048, 128, 16
WIDTHS = (1, 2, 4, 8, 16, 32, 64, 128)


class Bench:
    """One run of the script. Each figure is printed at once and added to `figures`."""

    def __init__(self, device: torch.device, shapes: dict[str, Any], repeats: int) -> None:
        self.device, self.shapes, self.repeats = device, shapes, repeats
        self.figures: dict[str, Any] = {"torch": torch.__version__, "device": str(device)}
        self.begun = time.perf_counter()
        if device.type == "cuda":
            self.figures["device"] = torch.cuda.get_device_name(device)

    def note(self, name: str, value: object) -> None:
        self.figures[name] = value
        print(f"{time.perf_counter() - self.begun:6.0f} s  {name}: {value}", flush=True)

    def model(self, shape: str) -> Any:
        """Return a model of random weights, made on the device."""
        hidden, intermediate, layers, heads, kv_heads, tied = self.shapes[shape]
        config = Qwen2Config(
            vocab_size=151_936 if self.shapes is SHAPES else 512,
            hidden_size=hidden, intermediate_size=intermediate, num_hidden_layers=layers, num_attention_heads=heads,
            num_key_value_heads=kv_heads, max_position_embeddings=32_768, tie_word_embeddings=tied,
        )  # fmt: skip
        torch.manual_seed(0)
        with torch.device(self.device):
            register()
            model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, attn_implementation=ATTENTION_NAME)
        return model.requires_grad_(False).eval()

    def milliseconds(self, call: Callable[[], object], repeats: int | None = None) -> float:
        """Return the median of calls, each of which ends with a read from the device."""
        times = []
        for _ in range(repeats or self.repeats):
            begun = time.perf_counter()
            call()
            times.append(time.perf_counter() - begun)
        return round(1e3 * statistics.median(times), 4)

    def bandwidth(self) -> float:
        """Return the bytes per second of a copy, reads and writes counted."""
        size = 2**31 if self.device.type == "cuda" else 2**26
        a, b = (torch.zeros(size, dtype=torch.uint8, device=self.device) for _ in range(2))

        def copy() -> object:
            b.copy_(a)
            return b[:1].tolist()

        copy()
        return 2 * size / self.milliseconds(copy, 10) * 1e3

    def steps(self, runner: ModelRunner, widths: Sequence[int], choose: Any = None) -> dict[int, float]:
        """Return the milliseconds of a step over a chain by its rows, token ids read back."""
        cache = runner.open()
        runner.prefill(cache, [1 + i % 99 for i in range(CONTEXT)])
        choose = choose or (lambda logits: logits.argmax(dim=-1).tolist())
        curve = {}
        for width in widths:
            rows = Rows(cache, [5] * width, cache.length, [tuple(range(i + 1)) for i in range(width)])

            def step(rows: Rows = rows) -> object:
                return choose(runner.step([rows]))

            for _ in range(3):
                step()
            curve[width] = self.milliseconds(step)
        runner.close(cache)
        return curve


def executions(bench: Bench, shape: str, bytes_per_second: float) -> dict[int, float]:
    """Measure eager, captured and compiled steps, and return the curve of the fastest execution."""
    model = bench.model(shape)
    config = model.config
    read = sum(p.numel() * p.element_size() for p in model.parameters())
    read -= 0 if config.tie_word_embeddings else config.vocab_size * config.hidden_size * 2
    floor = 1e3 * read / bytes_per_second
    best: dict[int, float] = {}
    for execution in ("eager", "graphs", "compiled"):
        if execution == "compiled":
            compile_layers(model)
        runner = ModelRunner(model, max_len=MAX_LEN, num_scratch=SCRATCH, execution=execution)
        wide = execution != "eager"
        curve = bench.steps(runner, WIDTHS if wide else (1,))
        bench.note(f"{shape} {execution}: ms by rows", curve)
        bench.note(f"{shape} {execution}: one row / floor of {floor:.2f} ms", round(curve[1] / floor, 2))
        if wide and (not best or curve[1] < best[1]):
            best = curve
        del runner
    bench.note(f"{shape}: 32 rows / one row", round(best[32] / best[1], 2))
    return best


def draft_steps(bench: Bench, shape: str) -> dict[int, float]:
    """Measure the whole step of a drafter: forward pass, top-k with log-sum-exp, read-back, tree."""
    model = bench.model(shape)
    runner = ModelRunner(model, max_len=2 * MAX_LEN, num_scratch=1024, execution="graphs")
    drafter = ModelDrafter(runner, vocab_size=model.config.vocab_size)
    prompt = tuple(1 + i % 99 for i in range(CONTEXT))
    curve = {}
    for width in (1, 2, 4, 8, 16, 32, 64):
        drafter.begin(Request(width, prompt, SamplingParams(max_tokens=512)), ())
        for _ in range(4):  # the first steps expand few nodes; later ones have the full width
            drafter.step([Budget(width, width)])
        budgets = [Budget(width, width)]
        curve[width] = bench.milliseconds(functools.partial(drafter.step, budgets), 10)
        drafter.end(width)
    bench.note(f"{shape}: whole draft step, ms by width", curve)
    return curve


def overlap(bench: Bench, target_shape: str, draft_shape: str, draft_device: torch.device) -> tuple[float, float]:
    """Return the slowdown of target and draft while both run."""
    target = ModelRunner(bench.model(target_shape), max_len=MAX_LEN, num_scratch=SCRATCH, execution="graphs")
    draft_model = bench.model(draft_shape).to(draft_device)
    draft = ModelRunner(draft_model, max_len=MAX_LEN, num_scratch=SCRATCH)
    times: list[list[float]] = [[], []]
    alone = [bench.steps(runner, (8,))[8] for runner in (target, draft)]
    end = time.perf_counter() + 3

    def work(side: int, runner: ModelRunner) -> None:
        while time.perf_counter() < end:
            times[side].append(bench.steps(runner, (8,))[8])

    threads = [threading.Thread(target=work, args=pair) for pair in enumerate((target, draft))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    slowdown = tuple(round(statistics.median(both) / single, 2) for both, single in zip(times, alone, strict=True))
    bench.note(
        f"{target_shape} + {draft_shape} on {draft_device}: alone ms, then how many times longer", (alone, slowdown)
    )
    return slowdown[0], slowdown[1]


def no_grammar(grammar: str) -> Constraint:
    """Refuse to compile: the requests here have no grammar."""
    raise NotImplementedError(grammar)


def strict_equality(bench: Bench, shape: str, tokens: int) -> None:
    """Check that a strict target with partly right candidates writes exactly what it writes alone."""
    runner = ModelRunner(
        bench.model(shape), max_len=CONTEXT + tokens + 64, num_scratch=STRICT_WIDTH, width=STRICT_WIDTH
    )
    worker = TargetWorker(runner, lambda schedule: None, max_rows=512, in_place=True, constrain=no_grammar)
    prompt = tuple(1 + i % 99 for i in range(64))
    rng = random.Random(0)

    def write(candidates: Callable[[int], Sequence[int]]) -> list[int]:
        request = Request(0, prompt, SamplingParams(max_tokens=tokens))
        worker.begin(m.Begin(m.TARGET, request, "plain"))
        output: list[int] = []
        kept: tuple[int, ...] = ()
        while len(output) < tokens:
            ids = (output[-1] if output else prompt[-1], *candidates(len(output)))
            start = len(prompt) - 1 + len(output)
            window = m.Window(0, len(output), start, ids, tuple(range(-1, len(ids) - 1)), kept)
            (verdict,) = (report for report in worker.verify([window]) if isinstance(report, m.Verdict))
            rows, new = ExactRule().walk(window, verdict, request)
            output += new
            kept = tuple(rows)
        worker.end(0)
        return output[:tokens]

    plain = write(lambda position: ())

    def partly_right(position: int) -> list[int]:
        right = plain[position : position + rng.randint(0, STRICT_WIDTH - 1)]
        return [token if rng.random() < 0.9 else 7 for token in right]

    again = write(partly_right)
    first = next((i for i, (a, b) in enumerate(zip(plain, again, strict=True)) if a != b), None)
    bench.note(
        f"{shape} strict: tokens equal to its own plain decoding", f"{tokens if first is None else first} of {tokens}"
    )


def projections(bench: Bench, targets: dict[str, dict[int, float]], draft: dict[int, float], slowdown: Any) -> None:
    """Project the speed-up over plain decoding: recorded traces and these step times on a virtual clock."""
    seconds = {rows: ms / 1e3 for rows, ms in draft.items()}
    for shape, curve in targets.items():
        target = {rows: ms / 1e3 for rows, ms in curve.items()}
        device = Device(shape, True, "", target, seconds)
        for kind, traces in shipped().items():
            text = [joined(traces)]
            costs = costs_of(device)
            on_two = costs.target(1) * card(text, costs, "auto", controller())
            on_one = costs.target(1) * max(
                card(text, costs, "auto", controller(shared_device=True)),
                card(text, costs, "parallel", controller(shared_device=True), slowdown=slowdown),
            )
            bench.note(f"{shape} with 0.5B, {kind}: one GPU, projected", round(on_one, 2))
            bench.note(f"{shape} with 0.5B, {kind}: two GPUs, projected, not run", round(on_two, 2))


def run_all(bench: Bench) -> None:
    """Run all parts in order. A part that fails is noted, and the next one runs."""
    small, *larger = bench.shapes
    large = larger[-2] if len(larger) > 1 else larger[-1]
    speed = bench.bandwidth()
    bench.note("copy, GB/s", round(speed / 1e9))
    targets: dict[str, dict[int, float]] = {}
    draft: dict[int, float] = {}
    slowdown = [1.0, 1.0]

    def one_gpu() -> None:
        slowdown[:] = overlap(bench, large, small, bench.device)

    parts: list[Callable[[], object]] = [
        *(lambda shape=shape: targets.update({shape: executions(bench, shape, speed)}) for shape in bench.shapes),
        lambda: draft.update(draft_steps(bench, small)),
        one_gpu,
        lambda: overlap(bench, large, small, torch.device("cpu")),
        lambda: strict_equality(bench, large, 2000 if bench.shapes is SHAPES else 200),
        lambda: projections(bench, {shape: targets[shape] for shape in larger}, draft, tuple(slowdown)),
    ]
    for part in parts:
        try:
            part()
        except Exception as error:
            traceback.print_exc()
            bench.note("failed", repr(error)[:300])
        if bench.device.type == "cuda":
            gc.collect()
            torch.cuda.empty_cache()


def main() -> None:
    """Run all parts and write the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true", help="tiny models, a few repeats, any device")
    parser.add_argument("--json", type=Path, help="write the figures here as well")
    args = parser.parse_args()
    if not torch.cuda.is_available() and not args.tiny:
        print("no CUDA device here: nothing to measure (--tiny runs the same code on a CPU)")
        return
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    bench = Bench(device, TINY if args.tiny else SHAPES, 3 if args.tiny else 30)
    try:
        run_all(bench)
    finally:
        if args.json:
            args.json.write_text(json.dumps(bench.figures, indent=1) + "\n")


if __name__ == "__main__":
    main()
