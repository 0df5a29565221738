"""`langchain-card bench`: methods side by side, for real; with `--simulate | --record | --steps` on a virtual clock."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shlex
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from langchain_card.bench.contest import Row
    from langchain_card.bench.race import Race
    from langchain_card.bench.traces import Trace
    from langchain_card.cli.render import Screen

SIMULATED = ("traces", "ratios", "gpu", "cpu")
"""Options of the virtual clock."""

COUNT, RECORDED = 20, 8
"""Prompts by default: of a comparison; to record, or steps to measure."""


def register(subparsers: Any) -> None:
    """Add `bench`."""
    from langchain_card.bench.names import DEFAULTS, METHODS
    from langchain_card.cli.fields import SETS, add_drafter_fields, add_engine_fields

    parser = subparsers.add_parser(
        "bench", help="compare ways to decode, side by side: measured, or on a virtual clock"
    )
    add_engine_fields(parser)
    add_drafter_fields(parser)
    known = f"of {', '.join(METHODS)} ({' '.join(DEFAULTS)})"
    parser.add_argument("--methods", nargs="+", default=DEFAULTS, metavar="NAME", help=known)
    parser.add_argument("--prompts", default="own", metavar="SET", help=SETS)
    parser.add_argument("--count", type=int, help=f"prompts ({COUNT}); to record, or steps of each size ({RECORDED})")
    parser.add_argument("--max-tokens", type=int, default=128, help="tokens of each answer (128)")
    parser.add_argument("--temperature", type=float, default=0.0, help="0 takes the likeliest token (0)")
    parser.add_argument("--batch", type=int, default=1, help="prompts at once (1)")
    parser.add_argument("--repeat", type=int, default=1, help="times that all prompts are answered (1)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all rows, as they come")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw the result (needs the extra `bench`)")
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--simulate", action="store_true", help="this engine against others on a virtual clock")
    what.add_argument("--record", type=Path, metavar="FILE", help="record a pair's traces into FILE")
    what.add_argument("--steps", type=Path, metavar="FILE", help="measure a pair's step times here into FILE")
    parser.add_argument("--traces", type=Path, metavar="DIR", help="traces of your own, one JSON file a kind of text")
    parser.add_argument("--ratios", type=float, nargs="+", metavar="C", help="target pass / draft step (1 to 64)")
    parser.add_argument("--gpu", help="step times where each model has its device: a name (h200) or a file")
    parser.add_argument("--cpu", help="step times where they share one (cpu)")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Compare, record, measure or simulate."""
    _check(args)
    if args.record is not None:
        _record(args)
    elif args.steps is not None:
        _measure(args)
    elif args.simulate:
        _simulate(args)
    else:
        _compare(args)
    return 0


def _check(args: argparse.Namespace) -> None:
    """What can be known to be wrong is, before hours of work."""
    from langchain_card.checks import check_range
    from langchain_card.cli.fields import check_output
    from langchain_card.errors import InvalidInputError

    for option in SIMULATED:
        if not args.simulate and (value := getattr(args, option)) is not None:
            raise InvalidInputError(f"--{option}", value, "is of the virtual clock", "add --simulate, or leave it out")
    for ratio in args.ratios or ():
        check_range("--ratios", ratio, 0.01, 1000.0, "target pass / draft step")
    if args.count is None:
        args.count = RECORDED if args.record is not None or args.steps is not None else COUNT
    check_range("--count", args.count, 1, 100_000)
    check_range("--batch", args.batch, 1, 1000)
    check_range("--repeat", args.repeat, 1, 1000)
    for option in ("record", "steps", "json"):
        check_output(f"--{option}", getattr(args, option), ".json")
    check_output("--plot", args.plot, ".png", ".svg", ".pdf")


def _compare(args: argparse.Namespace) -> None:
    from langchain_card.bench import machine, prompts
    from langchain_card.bench.methods import Asked, open_methods
    from langchain_card.bench.names import check_methods
    from langchain_card.bench.race import Race, explain, race
    from langchain_card.bench.record import asked_as_user
    from langchain_card.cli.chat import load
    from langchain_card.cli.fields import drafter_fields, engine_fields
    from langchain_card.cli.render import Screen
    from langchain_card.config import EngineConfig
    from langchain_card.core.request import SamplingParams

    if args.plot is not None:
        from langchain_card.bench import canvas  # noqa: F401 - fails before the work, where matplotlib is absent
    fields, screen = engine_fields(args) | drafter_fields(args), Screen()
    config = EngineConfig(**fields)
    asked = Asked(args.max_tokens, args.temperature, args.batch)
    SamplingParams(max_tokens=asked.max_tokens, temperature=asked.temperature).check(config.limits)
    names = check_methods(tuple(args.methods), config, args.batch)
    texts = prompts.find(args.prompts, args.count)
    about = {
        "command": shlex.join(["langchain-card", *args.given]),
        "machine": machine.describe(),
        "engine": fields,
        "prompts": args.prompts,
        "asked": asdict(asked),
    }

    def save(found: Race) -> None:
        if args.json is not None:
            new = args.json.with_suffix(".new")
            new.write_text(json.dumps(about | found.to_json()) + "\n")
            os.replace(new, args.json)

    def report(found: Race, number: int, total: int) -> None:
        save(found)
        group, repeat = found.rows[-1].group, found.rows[-1].repeat
        now = {row.method: row.run for row in found.rows if (row.group, row.repeat) == (group, repeat)}
        speeds = "  ".join(f"{name} {now[name].speed:.1f}" for name in names if name in now)
        screen.note(f"{number} of {total}, tokens/s: {speeds}")

    with contextlib.ExitStack() as held:
        engine, methods, failed = open_methods(names, config, asked, held, lambda own: load(screen, own), screen.note)
        ids = [asked_as_user(engine, text) for text in texts]
        found = Race({method.name: method.weights for method in methods}, failed=failed, greedy=not args.temperature)
        try:
            race(found, methods, ids, args.batch, args.repeat, engine.tokenizer.decode, report)
            if found.greedy:
                explain(found, engine, ids, args.batch, screen.note)
        finally:  # a run that was cut short shows what it has
            save(found)
            _show(screen, found, args)


def _show(screen: Screen, found: Race, args: argparse.Namespace) -> None:
    from langchain_card.bench.race_table import markdown, plot, remarks

    if found.rows:
        print(markdown(found))
    for remark in remarks(found):
        screen.say(remark)
    if args.json is not None:
        screen.note(f"{len(found.rows)} rows are in {args.json}")
    if args.plot is not None and found.rows:
        answers = {row.group: len(row.run.token_ids) for row in found.rows}
        asked = f"{args.prompts}, {sum(answers.values())} prompts"
        plot(found, args.plot, f"{args.model}, draft {args.draft_model}; {asked}")
        screen.note(f"a picture is in {args.plot}")


def _record(args: argparse.Namespace) -> None:
    from langchain_card.bench.prompts import find
    from langchain_card.bench.record import record_all
    from langchain_card.bench.traces import save
    from langchain_card.cli.fields import engine_fields
    from langchain_card.config import EngineConfig

    texts = find(args.prompts, args.count)

    def report(number: int, trace: Trace) -> None:
        first = sum(trace.rank(position) == 0 for position in range(len(trace.token_ids)))
        print(
            f"{number} of {len(texts)}: {len(trace.token_ids)} tokens, {first} of them the draft's first choice",
            flush=True,
        )

    save(record_all(EngineConfig(**engine_fields(args)), texts, args.max_tokens, report), args.record)


def _simulate(args: argparse.Namespace) -> None:
    from langchain_card.bench.changes import changes
    from langchain_card.bench.contest import RATIOS, contest
    from langchain_card.bench.devices import load_device
    from langchain_card.bench.traces import shipped

    if args.plot is not None:
        from langchain_card.bench.plot import plot  # fails before the work, where matplotlib is not there
    rows: list[Row] = []
    kinds, gpu, cpu = shipped(args.traces), load_device(args.gpu or "h200"), load_device(args.cpu or "cpu")
    for name, traces in kinds.items():
        print(f"{name}: {len(traces)} texts, {sum(len(trace.token_ids) for trace in traces)} tokens", flush=True)
    print(f"{gpu.name}: {gpu.source}\n{cpu.name}: {cpu.source}\nall figures are times plain decoding", flush=True)
    for cell in contest(kinds, gpu, cpu, args.ratios or RATIOS):
        figures = "  ".join(f"{row.method} {row.speedup:.2f}" for row in cell)
        print(f"{cell[0].trace}, c = {cell[0].c:.3g}: {figures}", flush=True)
        rows += cell
    if args.json is not None:
        args.json.write_text(json.dumps([vars(row) for row in rows], indent=1) + "\n")
        print(f"{len(rows)} rows in {args.json}", file=sys.stderr)
    if args.plot is not None:
        plot(rows, changes(kinds, gpu) if len(kinds) > 1 else [], args.plot)
        print(f"a picture in {args.plot}", file=sys.stderr)


def _measure(args: argparse.Namespace) -> None:
    from langchain_card.bench.steps import measure
    from langchain_card.cli.fields import engine_fields
    from langchain_card.config import EngineConfig

    config = EngineConfig(**engine_fields(args))
    measure(config, args.steps.stem, args.count, lambda line: print(line, flush=True)).save(args.steps)
