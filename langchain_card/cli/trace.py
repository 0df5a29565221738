"""`langchain-card trace`: the timeline of draft and target during one answer, as a picture and for Perfetto."""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from langchain_card.core.messages import TARGET
from langchain_card.core.request import SamplingParams

if TYPE_CHECKING:
    from collections.abc import Mapping

    from langchain_card.bench.timeline import Timeline
    from langchain_card.cli.render import Screen

WARM_UP = 16
"""Tokens of a first answer that is not shown: step costs become known and kernels are compiled."""


def register(subparsers: Any) -> None:
    """Add `trace` and its options."""
    from langchain_card.cli.fields import add_drafter_fields, add_engine_fields
    from langchain_card.config import SCHEDULES

    params = SamplingParams()
    parser = subparsers.add_parser("trace", help="one answer's timeline: a picture, and a file for Perfetto")
    parser.add_argument("prompt", nargs="?", help="the question (the demo's)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the trace for ui.perfetto.dev")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw some rounds (needs the extra `bench`)")
    parser.add_argument(
        "--first", type=int, default=1, metavar="ROUND", help="the first that is drawn; number 0 reads the prompt (1)"
    )
    parser.add_argument("--rounds", type=int, default=6, help="how many are drawn (6)")
    parser.add_argument("--max-tokens", type=int, default=96, help="tokens of the answer (96)")
    parser.add_argument("--temperature", type=float, default=params.temperature, help="0 takes the likeliest token (0)")
    parser.add_argument("--schedule", default="parallel", choices=SCHEDULES, help="of the answer (parallel)")
    add_engine_fields(parser)
    add_drafter_fields(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Trace one answer, print a summary, and write the files."""
    from langchain_card.bench.timeline import Tracer
    from langchain_card.cli.chat import load
    from langchain_card.cli.demo import PROMPT
    from langchain_card.cli.fields import check_output, drafter_fields, engine_fields
    from langchain_card.cli.render import Screen
    from langchain_card.config import EngineConfig
    from langchain_card.errors import InvalidInputError, check_range

    check_output("--json", args.json, ".json")
    check_output("--plot", args.plot, ".png", ".svg", ".pdf")
    check_range("--first", args.first, 0, 100_000)
    check_range("--rounds", args.rounds, 1, 1000)
    if args.plot is not None:
        from langchain_card.bench import plots  # fails before the work, where matplotlib is absent
    config = EngineConfig(**engine_fields(args), **drafter_fields(args))
    params = SamplingParams(max_tokens=args.max_tokens, temperature=args.temperature, schedule=args.schedule)
    params.check(config.limits)
    screen, tracer = Screen(), Tracer()
    with load(screen, config, tracer) as engine:
        from langchain_card.bench.prompts import user_prompt
        from langchain_card.drafters.model import ModelDrafter

        prompt_ids = user_prompt(engine, args.prompt or PROMPT)
        engine.submit(
            prompt_ids, replace(params, max_tokens=min(WARM_UP, params.max_tokens), tenant="warm-up")
        ).result()
        generation = engine.submit(prompt_ids, params)
        screen.stream(generation, tint=True)
        generation.result()
        decode = engine.tokenizer.decode
    timeline = tracer.timelines[generation.request.request_id]
    names = {TARGET: config.model, ModelDrafter.name: config.draft_model or ""}
    _print_summary(screen, timeline, names)
    if args.json is not None:
        from langchain_card.bench.timeline import to_perfetto

        args.json.write_text(json.dumps(to_perfetto(timeline, decode)))
        screen.note(f"{args.json}: open it at https://ui.perfetto.dev")
    if args.plot is not None:
        shown = range(len(timeline.rounds))[args.first : args.first + args.rounds]
        if not shown:
            limit = f"the answer has rounds 0 to {len(timeline.rounds) - 1}"
            raise InvalidInputError("--first", args.first, limit, "name an earlier one, or raise --max-tokens")
        plots.plot_timeline(timeline, decode, names, args.plot, args.first, args.rounds)
        screen.note(f"{args.plot}: rounds {shown[0]} to {shown[-1]} of 0 to {len(timeline.rounds) - 1}")
    return 0


def _print_summary(screen: Screen, timeline: Timeline, names: Mapping[str, str]) -> None:
    stats = timeline.stats
    screen.print(
        f"\n{stats.output_tokens} tokens in {len(timeline.rounds)} rounds of the target, {stats.tokens_per_second:.1f} "
        f"tokens/s; {stats.hits} rounds hit; schedule {stats.schedule}"
    )
    for lane in (TARGET, *timeline.sources):
        steps = len(timeline.rounds) if lane == TARGET else sum(step.source == lane for step in timeline.drafts)
        screen.print(f"{names.get(lane, lane)}: {steps} steps, busy {timeline.busy(lane):.0%} of the time")
