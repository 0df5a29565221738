"""`langchain-card bench --simulate | --record | --steps`."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from langchain_card.bench.contest import Row
    from langchain_card.bench.traces import Trace


def register(subparsers: Any) -> None:
    """Add `bench`."""
    parser = subparsers.add_parser("bench", help="measure: this engine against others on a virtual clock")
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--simulate", action="store_true", help="the contest over recorded traces")
    what.add_argument("--record", type=Path, metavar="FILE", help="record a pair's traces into FILE")
    what.add_argument("--steps", type=Path, metavar="FILE", help="measure a pair's step times here into FILE")
    parser.add_argument("--traces", type=Path, metavar="DIR", help="traces of your own, one JSON file a kind of text")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all rows of the contest")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw the contest (needs the extra `bench`)")
    parser.add_argument("--ratios", type=float, nargs="+", metavar="C", help="target pass / draft step (1 to 64)")
    parser.add_argument("--gpu", default="h200", help="step times where each model has its device: a name or a file")
    parser.add_argument("--cpu", default="cpu", help="step times where they share one")
    parser.add_argument("--prompts", type=Path, metavar="FILE", help="what to ask when recording: JSON lines")
    parser.add_argument("--count", type=int, default=8, help="prompts to record, or steps of each size (8)")
    parser.add_argument("--max-tokens", type=int, default=128, help="tokens of each recorded answer (128)")
    parser.add_argument("--model", default="qwen2.5-coder-1.5b")
    parser.add_argument("--draft-model", default="qwen2.5-coder-0.5b")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Record, measure or simulate."""
    _check(args)
    if args.record is not None:
        _record(args)
    elif args.steps is not None:
        _measure(args)
    else:
        _simulate(args)
    return 0


def _check(args: argparse.Namespace) -> None:
    """What can be known to be wrong is, before hours of work."""
    from langchain_card.checks import check_range
    from langchain_card.cli.fields import check_output

    for ratio in args.ratios or ():
        check_range("--ratios", ratio, 0.01, 1000.0, "target pass / draft step")
    check_range("--count", args.count, 1, 100_000)
    for option in ("record", "steps", "json"):
        check_output(f"--{option}", getattr(args, option), ".json")
    check_output("--plot", args.plot, ".png", ".svg", ".pdf")


def _record(args: argparse.Namespace) -> None:
    from langchain_card.bench.prompts import load
    from langchain_card.bench.record import record_all
    from langchain_card.bench.traces import save
    from langchain_card.config import EngineConfig
    from langchain_card.errors import InvalidInputError

    if args.prompts is None:
        raise InvalidInputError("--prompts", None, "is needed to record", "name a file of JSON lines")
    texts = load(args.prompts, args.count)

    def report(number: int, trace: Trace) -> None:
        first = sum(trace.rank(position) == 0 for position in range(len(trace.token_ids)))
        print(
            f"{number} of {len(texts)}: {len(trace.token_ids)} tokens, {first} of them the draft's first choice",
            flush=True,
        )

    save(record_all(EngineConfig(args.model, args.draft_model), texts, args.max_tokens, report), args.record)


def _simulate(args: argparse.Namespace) -> None:
    from langchain_card.bench.changes import changes
    from langchain_card.bench.contest import RATIOS, contest
    from langchain_card.bench.devices import load_device
    from langchain_card.bench.traces import shipped

    if args.plot is not None:
        from langchain_card.bench.plot import plot  # fails before the work, where matplotlib is not there
    rows: list[Row] = []
    kinds, gpu, cpu = shipped(args.traces), load_device(args.gpu), load_device(args.cpu)
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
    from langchain_card.config import EngineConfig

    config = EngineConfig(args.model, args.draft_model)
    measure(config, args.steps.stem, args.count, lambda line: print(line, flush=True)).save(args.steps)
