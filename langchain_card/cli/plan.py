"""`langchain-card plan`: predict and measure which stack of drafters is the fastest on this machine."""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from langchain_card.bench.bounds import Measured
    from langchain_card.bench.measure_stacks import Levels
    from langchain_card.bench.plan import Case, Plan


def register(subparsers: Any) -> None:
    """Add `plan` and its options."""
    from langchain_card.cli.fields import SETS, add_engine_fields

    parser = subparsers.add_parser("plan", help="find the fastest stack of drafters, or that none pays")
    add_engine_fields(parser)
    lower = "a drafter that drafts for the one before it; may be repeated (a model, or at the end ngram; ngram)"
    parser.add_argument("--lower", action="append", metavar="NAME", help=lower)
    parser.add_argument("--prompts", default="own", metavar="SET", help=SETS)
    parser.add_argument("--count", type=int, default=8, help="prompts (8)")
    parser.add_argument("--max-tokens", type=int, default=128, help="tokens of each answer (128)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures")
    parser.add_argument("--costs", type=Path, metavar="FILE", help="plan from figures; nothing is loaded or measured")
    parser.add_argument("--no-measure", action="store_true", help="only predict; do not run what was picked")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Measure the levels, predict the speed of each stack, and measure the best ones."""
    from langchain_card.bench.measure_stacks import read_levels
    from langchain_card.bench.plan import rank_stacks
    from langchain_card.cli.fields import check_output
    from langchain_card.errors import InvalidInputError, check_range

    check_range("--count", args.count, 1, 100_000)
    check_range("--max-tokens", args.max_tokens, 16, 100_000)
    check_output("--json", args.json, ".json")
    if args.acceptance != "exact":
        limit = "is lossy: plans are for the exact rule"
        raise InvalidInputError("--acceptance", args.acceptance, limit, "leave it out")
    if args.draft_transport == "process":
        limit = "has nothing below the draft: plans are for drafts in this process"
        raise InvalidInputError("--draft-transport", args.draft_transport, limit, "leave it out")
    levels = read_levels(args.costs) if args.costs is not None else _measure_levels(args)
    case = levels.case()
    plans = rank_stacks(case)
    plain = next(plan for plan in plans if len(plan.levels) == 1)
    _print_agreement(levels)
    print('\npredicted, times plain decoding, draft and target in turns (schedule="sequential"):')
    for plan in plans:
        print(f"  {plain.seconds / plan.seconds:5.2f}  {describe(case, plan)}")
    _print_choice(case, plans)
    measured = {} if args.costs is not None or args.no_measure else _run_stacks(args, case, plans)
    if args.json is not None:
        rows = [
            {
                "stack": [case.names[level] for level in plan.levels],
                "blocks": plan.blocks,
                "predicted": plain.seconds / plan.seconds,
                "measured": vars(measured[plan.levels]) if plan.levels in measured else None,
                "picked": plan is plans[0],
            }
            for plan in plans
        ]
        args.json.write_text(json.dumps({"inputs": levels.to_json(), "stacks": rows}, indent=1) + "\n")
        print(f"all figures are in {args.json}")
    return 0


def _texts(args: argparse.Namespace) -> list[str]:
    from langchain_card.bench.prompts import find

    return find(args.prompts, args.count)


def _measure_levels(args: argparse.Namespace) -> Levels:
    from langchain_card.bench.measure_stacks import measure
    from langchain_card.cli.fields import engine_fields
    from langchain_card.config import NGRAM, EngineConfig

    config = EngineConfig(**engine_fields(args))
    lower = (NGRAM,) if args.lower is None and config.has_draft else tuple(args.lower or ())
    config = replace(config, stack=lower)
    return measure(config, _texts(args), args.max_tokens, lambda line: print(line, flush=True))


def describe(case: Case, plan: Plan) -> str:
    """Describe a stack in words, from the target down."""
    names = [case.names[level] for level in reversed(plan.levels)]
    if not plan.blocks:
        return f"{names[0]} alone"
    requests = [f"asks {name} for {block}" for name, block in zip(names[1:], reversed(plan.blocks), strict=True)]
    return f"{names[0]} {', which '.join(requests)}"


def _print_agreement(levels: Levels) -> None:
    print("\nof a block, the chance that the first 1, 2, 4 and 8 candidates are all taken:")
    for (low, up), edge in levels.edges.items():
        chances = ", ".join(f"{edge.reach[k]:.2f}" for k in (0, 1, 3, 7))
        print(f"  {levels.names[up]} takes from {levels.names[low]}: {chances}")


def _print_choice(case: Case, plans: list[Plan]) -> None:
    picked = plans[0]
    if len(picked.levels) == 1:
        print("\nAs predicted, do not speculate: plain decoding is the fastest here.")
        return
    print(f"\nFastest as predicted: {describe(case, picked)}.")
    if len(picked.levels) == 2 and any(len(plan.levels) > 2 for plan in plans):
        print("No middle level pays, as predicted: what it saves is less than what its passes cost.")


def _run_stacks(args: argparse.Namespace, case: Case, plans: list[Plan]) -> dict[tuple[int, ...], Measured]:
    """Measure, in turns on the same prompts, plain decoding and the best stacks with one drafter and with more."""
    from langchain_card.bench.measure_stacks import measure_speedups, stack_config, verdict
    from langchain_card.cli.fields import engine_fields

    best = {len(plan.levels) > 2: plan for plan in reversed(plans) if len(plan.levels) > 1}
    candidates, fields = [*best.values()], engine_fields(args)
    if not candidates:
        return {}
    plain = next(plan for plan in plans if len(plan.levels) == 1)
    print(f"\nmeasuring {len(candidates)} of them and plain decoding, in turns ...", flush=True)
    speedups = measure_speedups(fields, case, candidates, _texts(args), args.max_tokens)
    measured = {plan.levels: speedup for plan, speedup in zip(candidates, speedups, strict=True)}
    print("times plain decoding, predicted and measured (with a 95 % interval of the mean):")
    for plan in candidates:
        speedup = measured[plan.levels]
        interval = f"{speedup.value:5.2f} ({speedup.low:.2f} to {speedup.high:.2f})"
        print(f"  {plain.seconds / plan.seconds:5.2f}  {interval}  {describe(case, plan)}")
    print(verdict({describe(case, plan): measured[plan.levels] for plan in candidates}))
    print("as run, for a configuration of your own:")
    for plan in candidates:
        config = stack_config(fields, case, plan)
        names = ("draft_model", "drafters", "stack", "pins")
        print("  " + ", ".join(f"{name}={getattr(config, name)!r}" for name in names))
    return measured
