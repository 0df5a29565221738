"""`langchain-card bench`: methods side by side; with `--steps` the step times of a pair."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shlex
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from langchain_card.bench.compare import Comparison
    from langchain_card.cli.render import Screen

PROMPTS, STEPS = 20, 8
"""`--count` by default: prompts of a comparison; steps of each size."""


def register(subparsers: Any) -> None:
    """Add `bench`."""
    from langchain_card.bench.method_table import DEFAULTS, METHODS
    from langchain_card.cli.fields import SETS, add_drafter_fields, add_engine_fields

    parser = subparsers.add_parser("bench", help="measure ways to decode, side by side")
    add_engine_fields(parser)
    add_drafter_fields(parser)
    known = f"of {', '.join(METHODS)} ({' '.join(DEFAULTS)})"
    parser.add_argument("--methods", nargs="+", default=DEFAULTS, metavar="NAME", help=known)
    parser.add_argument("--prompts", default="own", metavar="SET", help=SETS)
    parser.add_argument("--count", type=int, help=f"prompts ({PROMPTS}); with --steps, steps of each size ({STEPS})")
    parser.add_argument("--max-tokens", type=int, default=128, help="tokens of each answer (128)")
    parser.add_argument("--temperature", type=float, default=0.0, help="0 takes the likeliest token (0)")
    parser.add_argument("--batch", type=int, default=1, help="prompts at once (1)")
    parser.add_argument("--repeat", type=int, default=1, help="times that all prompts are answered (1)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all rows, as they come")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw the result (needs the extra `bench`)")
    parser.add_argument("--steps", type=Path, metavar="FILE", help="measure a pair's step times here into FILE")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Compare methods, or measure steps."""
    _check(args)
    if args.steps is not None:
        _measure(args)
    else:
        _compare(args)
    return 0


def _check(args: argparse.Namespace) -> None:
    """What can be known to be wrong is, before hours of work."""
    from langchain_card.cli.fields import check_output
    from langchain_card.errors import check_range

    if args.count is None:
        args.count = PROMPTS if args.steps is None else STEPS
    check_range("--count", args.count, 1, 100_000)
    check_range("--batch", args.batch, 1, 1000)
    check_range("--repeat", args.repeat, 1, 1000)
    for option in ("steps", "json"):
        check_output(f"--{option}", getattr(args, option), ".json")
    check_output("--plot", args.plot, ".png", ".svg", ".pdf")


def _compare(args: argparse.Namespace) -> None:
    from langchain_card.bench import machine, prompts
    from langchain_card.bench.compare import Comparison, compare, measure_gaps
    from langchain_card.bench.method_table import check_methods
    from langchain_card.bench.methods import DecodeOptions, open_methods
    from langchain_card.bench.prompts import user_prompt
    from langchain_card.cli.chat import load
    from langchain_card.cli.fields import drafter_fields, engine_fields
    from langchain_card.cli.render import Screen
    from langchain_card.config import EngineConfig
    from langchain_card.core.request import SamplingParams

    if args.plot is not None:
        from langchain_card.bench import plots  # noqa: F401 - fails before the work, where matplotlib is absent
    fields, screen = engine_fields(args) | drafter_fields(args), Screen()
    config = EngineConfig(**fields)
    options = DecodeOptions(args.max_tokens, args.temperature, args.batch)
    SamplingParams(max_tokens=options.max_tokens, temperature=options.temperature).check(config.limits)
    names = check_methods(tuple(args.methods), config, args.batch)
    texts = prompts.find(args.prompts, args.count)
    about = {
        "command": shlex.join(["langchain-card", *args.given]),
        "machine": machine.describe(),
        "engine": fields,
        "prompts": args.prompts,
        "asked": asdict(options),
    }

    def save(results: Comparison) -> None:
        if args.json is not None:
            new = args.json.with_suffix(".new")
            new.write_text(json.dumps(about | results.to_json()) + "\n")
            os.replace(new, args.json)

    def report(results: Comparison, number: int, total: int) -> None:
        save(results)
        group, repeat = results.rows[-1].group, results.rows[-1].repeat
        now = {row.method: row.run for row in results.rows if (row.group, row.repeat) == (group, repeat)}
        speeds = "  ".join(f"{name} {now[name].speed:.1f}" for name in names if name in now)
        screen.note(f"{number} of {total}, tokens/s: {speeds}")

    with contextlib.ExitStack() as stack:
        engine, methods, failed = open_methods(names, config, options, stack, partial(load, screen), screen.note)
        ids = [user_prompt(engine, text) for text in texts]
        weights = {method.name: method.weights for method in methods}
        results = Comparison(weights, failed=failed, greedy=not args.temperature)
        try:
            compare(results, methods, ids, args.batch, args.repeat, engine.tokenizer.decode, report)
            if results.greedy:
                measure_gaps(results, engine, ids, args.batch, screen.note)
        finally:  # a run that was cut short shows what it has
            save(results)
            _show(screen, results, args)


def _show(screen: Screen, results: Comparison, args: argparse.Namespace) -> None:
    from langchain_card.bench.compare import markdown, remarks

    if results.rows:
        print(markdown(results))
    for remark in remarks(results):
        screen.print(remark)
    if args.json is not None:
        screen.note(f"{len(results.rows)} rows are in {args.json}")
    if args.plot is not None and results.rows:
        from langchain_card.bench.plots import plot_comparison

        answers = {row.group: len(row.run.token_ids) for row in results.rows}
        asked = f"{args.prompts}, {sum(answers.values())} prompts"
        plot_comparison(results, args.plot, f"{args.model}, draft {args.draft_model}; {asked}")
        screen.note(f"a picture is in {args.plot}")


def _measure(args: argparse.Namespace) -> None:
    from langchain_card.bench.step_times import measure
    from langchain_card.cli.fields import engine_fields
    from langchain_card.config import EngineConfig

    config = EngineConfig(**engine_fields(args))
    measure(config, args.steps.stem, args.count, lambda line: print(line, flush=True)).save(args.steps)
