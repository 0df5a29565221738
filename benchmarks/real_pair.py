"""The real pair on one machine: this engine's ways to decode and transformers' own loops, alternating in one run.

    python benchmarks/real_pair.py --prompts humaneval.jsonl --count 20 --methods plain auto hf-generate

Methods are schedules (`plain`, `sequential`, `parallel`, `auto`), or drafters under `auto`: `ngram` (tables alone),
`model` (the draft model alone), `beside`, `below`, `below-and-beside` (where the tables are).

Of transformers: `hf-generate` (float32), `hf-assisted` and `hf-prompt-lookup` (both on the same int8 layers).

Prints tokens per second after the first token (median), the ratio to `plain` with its bootstrap lower bound (95 %),
and how many answers are identical to plain's; with `--against ngram model` the ratios to these, too.
"""

from __future__ import annotations

import argparse
import atexit
import contextlib
import json
import multiprocessing
import random
import resource
import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from langchain_card.bench import prompts
from langchain_card.config import EngineConfig
from langchain_card.core.request import SamplingParams
from langchain_card.engine.engine import Engine

DRAFTERS: dict[str, dict[str, Any]] = {
    "ngram": {"draft_model": "ngram"},
    "model": {"drafters": ()},
    "beside": {"drafters": ("ngram",)},
    "below": {"drafters": (), "stack": ("ngram",)},
    "below-and-beside": {"drafters": ("ngram",), "stack": ("ngram",)},
}
"""Engines of their own over the same weights."""

Answer = tuple[list[int], float, dict[str, Any]]  # tokens, seconds per token after the first, notes


def main() -> None:
    args = arguments()
    texts = prompts.load(args.prompts, args.count)
    beside = None if args.drafters is None else tuple(args.drafters)
    config = EngineConfig(model=args.model, draft_model=args.draft_model, drafters=beside)
    started = time.perf_counter()
    with contextlib.ExitStack() as held:
        engine = held.enter_context(Engine(config))
        print(f"loaded in {time.perf_counter() - started:.1f} s; threads {torch.get_num_threads()}")
        methods: dict[str, Callable[[list[int]], Answer]] = {}
        for name in args.methods:
            if name.startswith("hf-"):
                methods[name] = transformers_loop(args, name)
                continue
            own = held.enter_context(Engine(replace(config, **DRAFTERS[name]))) if name in DRAFTERS else engine
            methods[name] = ours(own, name, args.max_tokens, args.temperature)
        rows = measure(engine, methods, texts)
        print(f"peak memory {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20:.2f} GiB")
    report(rows, args)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=Path, default=prompts.OWN)
    parser.add_argument("--count", type=int, default=20)
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--model", default="qwen2.5-coder-1.5b")
    parser.add_argument("--draft-model", default="qwen2.5-coder-0.5b")
    parser.add_argument("--drafters", nargs="*", help="beside the draft model; none without a name")
    parser.add_argument("--temperature", type=float, default=0.0, help="of this engine's methods; seed 0")
    parser.add_argument("--methods", nargs="+", default=["plain", "auto"])
    parser.add_argument("--hf-tokens", type=int, default=32, help="tokens per prompt of transformers' loop")
    parser.add_argument("--hf-threads", type=int, default=2)
    parser.add_argument("--against", nargs="*", default=[], help="methods that all others are compared with as well")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    if unknown := {*args.against} - {*args.methods}:
        parser.error(f"--against names {', '.join(unknown)}, which --methods does not")
    return args


def ours(engine: Engine, name: str, max_tokens: int, temperature: float) -> Callable[[list[int]], Answer]:
    """Each method is a tenant of its own: none looks up what another one wrote."""
    schedule: Any = "auto" if name in DRAFTERS else name

    def run(prompt_ids: list[int]) -> Answer:
        params = SamplingParams(max_tokens=max_tokens, temperature=temperature, schedule=schedule, tenant=name)
        done = engine.submit(prompt_ids, params).result()
        s = done.stats
        notes = {
            "accepted_length": round(s.mean_accepted_length, 2),
            "hit_rate": round(s.hit_rate, 2),
            "verified": s.verified_by_source,
            "accepted": s.accepted_by_source,
            "target_busy": round(s.target_busy / s.decode_seconds, 2),
            "draft_busy": round(s.draft_busy / s.decode_seconds, 2),
        }
        return list(done.token_ids), 1 / s.tokens_per_second, notes

    return run


def transformers_loop(args: argparse.Namespace, name: str) -> Callable[[list[int]], Answer]:
    """Transformers' `generate`, prompt left out of the time: plain in float32, the others on the same int8 layers.

    In a process of its own: two pools of CPU threads in one process would slow both sides down.
    """
    ours, theirs = multiprocessing.Pipe()
    arguments = (theirs, name, args.model, args.draft_model, args.hf_tokens, args.hf_threads)
    multiprocessing.get_context("spawn").Process(target=_serve_transformers, args=arguments, daemon=True).start()
    atexit.register(ours.send, None)

    def run(prompt_ids: list[int]) -> Answer:
        ours.send(prompt_ids)
        token_ids, per_token = ours.recv()
        return token_ids, per_token, {}

    return run


def _serve_transformers(
    pipe: Connection, name: str, model_name: str, draft_name: str, max_tokens: int, threads: int
) -> None:
    from transformers import AutoModelForCausalLM, StoppingCriteria, StoppingCriteriaList

    from langchain_card.runtime import int8_weights
    from langchain_card.runtime.loader import load_model, resolve
    from langchain_card.runtime.store import ModelStore

    torch.set_num_threads(threads)
    options: dict[str, Any] = {}
    if name == "hf-generate":
        folder = ModelStore().prepare(model_name, "float")
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    else:
        pair = resolve(EngineConfig(model=model_name, draft_model=draft_name))
        with mock.patch.object(int8_weights, "fuse_layers"):  # their own decoder layers
            models = [load_model(spec) for spec in (pair.target, replace(pair.draft, draft=False))]
        for model in models:
            model.set_attn_implementation("sdpa")
        model = models[0]
        options = {"prompt_lookup_num_tokens": 10} if name == "hf-prompt-lookup" else {"assistant_model": models[1]}

    class Clock(StoppingCriteria):
        def __init__(self) -> None:
            self.at: list[tuple[int, float]] = []

        def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor, **_: Any) -> torch.Tensor:
            self.at.append((input_ids.shape[1], time.perf_counter()))
            return torch.zeros(len(input_ids), dtype=torch.bool)

    for prompt_ids in iter(pipe.recv, None):
        clock = Clock()
        out = model.generate(
            torch.tensor([prompt_ids]),
            attention_mask=torch.ones(1, len(prompt_ids)),
            do_sample=False,
            max_new_tokens=max_tokens,
            stopping_criteria=StoppingCriteriaList([clock]),
            **options,
        )
        (first, begun), (last, ended) = clock.at[0], clock.at[-1]
        pipe.send((out[0, len(prompt_ids) :].tolist(), (ended - begun) / max(1, last - first)))


def measure(
    engine: Engine, methods: dict[str, Callable[[list[int]], Answer]], texts: list[str]
) -> list[dict[str, Answer]]:
    rows: list[dict[str, Answer]] = []
    for number, text in enumerate(["Say hello.", *texts]):
        prompt_ids = engine.tokenizer.apply_chat_template(
            [{"role": "user", "content": text}], add_generation_prompt=True, return_dict=False
        )
        order = list(methods)
        random.Random(number).shuffle(order)
        row = {name: methods[name](prompt_ids) for name in order}
        if number == 0:
            continue  # warm-up
        rows.append(row)
        shown = "  ".join(f"{name} {1e3 * row[name][1]:.0f}" for name in methods)
        print(f"{number:3d}/{len(texts)}  ms a token: {shown}", flush=True)
    return rows


def report(rows: list[dict[str, Answer]], args: argparse.Namespace) -> None:
    print(f"\n{'method':18} {'tok/s':>6} {'ms/tok':>7} {'ratio':>6} {'lower':>6}  identical  accepted  hits  busy t/d")
    for name in args.methods:
        ratios = [row["plain"][1] / row[name][1] for row in rows] if "plain" in args.methods else [1.0]
        times = [row[name][1] for row in rows]
        same = sum(row[name][0] == row["plain"][0][: len(row[name][0])] for row in rows) if "plain" in rows[0] else 0
        notes = [row[name][2] for row in rows if row[name][2]]
        line = (
            f"{name:18} {1 / statistics.median(times):6.2f} {1e3 * statistics.median(times):7.1f} "
            f"{statistics.median(ratios):6.2f} {bootstrap(ratios):6.2f}  {same:3d} of {len(rows):3d}"
        )
        if notes:
            plain_numbers = ("accepted_length", "hit_rate", "target_busy", "draft_busy")
            mean = {key: statistics.mean(note[key] for note in notes) for key in plain_numbers}
            line += f"  {mean['accepted_length']:8.2f} {mean['hit_rate']:5.2f}"
            line += f"  {mean['target_busy']:.2f}/{mean['draft_busy']:.2f}"
            for source in sorted({name for note in notes for name in note["verified"]}):
                verified, accepted = (
                    sum(note[key].get(source, 0) for note in notes) for key in ("verified", "accepted")
                )
                line += f"  {source} {accepted} of {verified}"
        print(line)
    for base in args.against:
        ratios_to = {name: [row[base][1] / row[name][1] for row in rows] for name in args.methods if name != base}
        found = [f"{name} {statistics.median(each):.2f} ({bootstrap(each):.2f})" for name, each in ratios_to.items()]
        print(f"times {base}: {', '.join(found)}")
    if args.json:
        args.json.write_text(json.dumps(rows))


def bootstrap(ratios: list[float], draws: int = 10_000) -> float:
    """Lower end of the 95 % interval of the mean ratio over prompts."""
    rng = random.Random(0)
    means = sorted(statistics.mean(rng.choices(ratios, k=len(ratios))) for _ in range(draws))
    return means[int(0.025 * draws)]


if __name__ == "__main__":
    main()
