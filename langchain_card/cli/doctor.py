"""`langchain-card doctor`: check a pair of models on this machine, and advise."""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Iterable
from typing import Any

TOKENS, TEXTS, REPEATS = 48, 2, 5
"""Tokens of each trial answer, number of trial prompts, and timed steps of each size."""


def register(subparsers: Any) -> None:
    """Add `doctor` and its options."""
    from langchain_card.cli.fields import add_drafter_fields, add_engine_fields

    parser = subparsers.add_parser("doctor", help="check this machine and a pair: memory, step times, schedule, advice")
    add_engine_fields(parser)
    add_drafter_fields(parser)
    parser.add_argument("--no-measure", action="store_true", help="load no weights and measure nothing")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Print the findings section by section, so that an error leaves the earlier ones on the screen."""
    from langchain_card.bench import doctor, prompts
    from langchain_card.bench.step_times import measure
    from langchain_card.bench.teacher_forced import shared_model
    from langchain_card.chat.progress import ConsoleProgress
    from langchain_card.cli.chat import load
    from langchain_card.cli.fields import drafter_fields, engine_fields
    from langchain_card.cli.render import Screen
    from langchain_card.config import EngineConfig
    from langchain_card.models.loader import resolve

    screen = Screen()

    def print_section(heading: str, lines: Iterable[str]) -> None:
        screen.print(heading, "bold")
        for line in lines:
            screen.print(f"  {line}")

    config = EngineConfig(**engine_fields(args), **drafter_fields(args))
    print_section("This machine", doctor.about_machine())
    with ConsoleProgress() as progress:
        pair = resolve(config, progress)
    print_section(
        "The models", [*doctor.about_kernels(pair), *doctor.about_vocabulary(pair), *doctor.about_head(config, pair)]
    )
    print_section("Memory", doctor.about_memory(pair, config))
    for line in doctor.about_room(pair, config):
        screen.print(f"  {line}")
    if args.no_measure:
        return 0
    screen.note("starting another process")
    print_section("Start, measured", doctor.about_start(doctor.measure_start(config)))
    with contextlib.ExitStack() as loaded:  # weights are loaded once, for the steps and for the engine
        device = None
        if pair.draft is not None:
            screen.note(f"loading {config.model} and {config.draft_model}")
            for spec in (pair.target, pair.draft):
                loaded.enter_context(shared_model(spec))
            device = measure(config, "here", REPEATS, lambda _: None)
            shared = pair.draft.device == pair.target.device
            about_steps = doctor.about_steps(device, shared=shared)
            print_section("Steps, measured", [*about_steps, *doctor.about_placement(config, pair)])
        engine = loaded.enter_context(load(screen, config))
        trial = doctor.try_out(engine, prompts.load(prompts.OWN, TEXTS), TOKENS)
    print_section("Schedule", doctor.about_schedule(trial))
    print_section("What would help", doctor.advice(trial, device, pair))
    return 0
