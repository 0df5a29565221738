"""`langchain-card bench --simulate | --record`."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from langchain_card.bench.contest import Row
    from langchain_card.bench.traces import Trace

RATIOS = (1, 2, 4, 8, 16, 32, 64)
"""Target step / draft step."""


def register(subparsers: Any) -> None:
    """Add `bench`."""
    parser = subparsers.add_parser("bench", help="measure: this engine against others on a virtual clock")
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--simulate", action="store_true", help="the contest over recorded traces")
    what.add_argument("--record", type=Path, metavar="FILE", help="record a pair's traces into FILE")
    parser.add_argument("--traces", type=Path, metavar="DIR", help="traces of your own, one JSON file a kind of text")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all rows of the contest")
    parser.add_argument("--prompts", type=Path, metavar="FILE", help="what to ask when recording: JSON lines")
    parser.add_argument("--count", type=int, default=8, help="prompts to record (8)")
    parser.add_argument("--max-tokens", type=int, default=128, help="tokens of each recorded answer (128)")
    parser.add_argument("--model", default="qwen2.5-coder-1.5b")
    parser.add_argument("--draft-model", default="qwen2.5-coder-0.5b")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Record or simulate."""
    if args.record is not None:
        _record(args)
    else:
        _simulate(args)
    return 0


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
    from langchain_card.bench.contest import contest
    from langchain_card.bench.traces import shipped
    from langchain_card.config import Limits

    rows: list[Row] = []
    for name, traces in shipped(args.traces).items():
        tokens = sum(len(trace.token_ids) for trace in traces)
        print(f"\n{name}: {len(traces)} texts, {tokens} tokens; times plain decoding", flush=True)
        for row in contest(name, traces, RATIOS, Limits()):
            if not rows or (row.trace, row.c) != (rows[-1].trace, rows[-1].c):
                print(f"  c {row.c:<3g} ceiling {row.ceiling:5.2f}", end="")
            print(f"  {row.method} {row.speedup:.2f}", end="\n" if row.method == "card" else "", flush=True)
            rows.append(row)
    if args.json is not None:
        args.json.write_text(json.dumps([vars(row) for row in rows], indent=1))
        print(f"{len(rows)} rows in {args.json}", file=sys.stderr)
