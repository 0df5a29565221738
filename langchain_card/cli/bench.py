"""`langchain-card bench`: methods side by side.

On long texts with `--context`, with many requests at once with `--load`; with `--steps`, a pair's step times.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

if TYPE_CHECKING:
    from langchain_card.bench.compare import Comparison
    from langchain_card.bench.load import LoadResults, Server
    from langchain_card.bench.long_texts import LongText
    from langchain_card.cli.render import Screen

PROMPTS, STEPS = 20, 8
"""`--count` by default: prompts of a comparison; steps of each size."""

LONG_METHODS = ("plain", "card")
"""`--methods` by default with `--context`."""

ANSWERS = (16, 64, 256)
"""`--answer` by default: tokens of the answers to long texts."""

LOAD_METHODS = ("plain", "card")
"""`--methods` by default with `--load`."""

_SHORT = {"prompts": None, "max_tokens": 128, "batch": 1, "count": None, "steps": None, "load": None}
"""Options that do not go with `--context`, with their defaults."""

_SET_BY_CONTEXT = {"max_model_len": None, "prefix_cache": "memory"}
"""Options of the engine that do not go with `--context`: it makes room for the texts, and reads each of them."""

_MARGIN = 64
"""Tokens by which a long prompt may exceed its nominal length."""


def register(subparsers: Any) -> None:
    """Add `bench`."""
    from langchain_card.bench.method_table import DEFAULTS, LOAD_SETS, METHODS, REQUESTS
    from langchain_card.cli.fields import SETS, add_drafter_fields, add_engine_fields

    parser = subparsers.add_parser("bench", help="measure ways to decode, side by side")
    add_engine_fields(parser)
    add_drafter_fields(parser)
    others = f"with --context {' '.join(LONG_METHODS)}, with --load {' '.join(LOAD_METHODS)}"
    known = f"of {', '.join(METHODS)} ({' '.join(DEFAULTS)}; {others})"
    parser.add_argument("--methods", nargs="+", metavar="NAME", help=known)
    several = f"{SETS}; with --load several ({' '.join(LOAD_SETS)})"
    parser.add_argument("--prompts", nargs="+", metavar="SET", help=several)
    parser.add_argument("--count", type=int, help=f"prompts ({PROMPTS}); with --steps, steps of each size ({STEPS})")
    parser.add_argument("--max-tokens", type=int, help="tokens of each answer (128)")
    default = " ".join(map(str, REQUESTS))
    parser.add_argument(
        "--load", type=int, nargs="*", metavar="N", help=f"answer each set with so many requests at once ({default})"
    )
    parser.add_argument("--context", type=int, nargs="+", metavar="N", help="read long texts, of so many tokens each")
    default = " ".join(map(str, ANSWERS))
    parser.add_argument(
        "--answer", type=int, nargs="+", metavar="N", help=f"with --context, tokens of each answer ({default})"
    )
    parser.add_argument("--temperature", type=float, default=0.0, help="0 takes the likeliest token (0)")
    parser.add_argument("--batch", type=int, help="prompts at once (1)")
    parser.add_argument("--repeat", type=int, default=1, help="times that all prompts are answered (1)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all rows, as they come")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw the result (needs the extra `bench`)")
    parser.add_argument("--steps", type=Path, metavar="FILE", help="measure a pair's step times here into FILE")
    parser.set_defaults(run=run, **_SHORT)


def run(args: argparse.Namespace) -> int:
    """Compare methods, or measure steps."""
    _check(args)
    if args.steps is not None:
        _measure(args)
    elif args.context is not None:
        _compare_long_texts(args)
    elif args.load is not None:
        _measure_load(args)
    else:
        _compare(args)
    return 0


def _check(args: argparse.Namespace) -> None:
    """What can be known to be wrong is, before hours of work."""
    from langchain_card.bench.method_table import DEFAULTS, LOAD_SETS, REQUESTS
    from langchain_card.cli.fields import check_output
    from langchain_card.errors import InvalidInputError, check_range

    if args.context is not None:
        for name, default in (_SHORT | _SET_BY_CONTEXT).items():
            if getattr(args, name) != default:
                option = f"--{name.replace('_', '-')}"
                raise InvalidInputError(option, getattr(args, name), "does not go with --context", "leave one out")
    elif args.answer is not None:
        raise InvalidInputError(
            "--answer", args.answer, "goes with --context only", "add --context, or use --max-tokens"
        )
    if args.load is not None:
        args.load = args.load or [*REQUESTS]
        for requests in args.load:
            check_range("--load", requests, 1, 1024)
        for name, default in {"batch": 1, "repeat": 1, "steps": None}.items():
            if getattr(args, name) != default:
                raise InvalidInputError(f"--{name}", getattr(args, name), "does not go with --load", "leave one out")
    elif args.prompts is not None and len(args.prompts) > 1:
        raise InvalidInputError("--prompts", " ".join(args.prompts), "is one set", "several go with --load")
    args.prompts = args.prompts or (["own"] if args.load is None else [*LOAD_SETS])
    for option in ("context", "answer"):
        for length in getattr(args, option) or ():
            check_range(f"--{option}", length, 1, 10_000_000)
    defaults = DEFAULTS if args.load is None else LOAD_METHODS
    args.methods = args.methods or (defaults if args.context is None else LONG_METHODS)
    if args.count is None:
        args.count = PROMPTS if args.steps is None else STEPS
    check_range("--count", args.count, 1, 100_000)
    check_range("--batch", args.batch, 1, 1000)
    check_range("--repeat", args.repeat, 1, 1000)
    for option in ("steps", "json"):
        check_output(f"--{option}", getattr(args, option), ".json")
    check_output("--plot", args.plot, ".png", ".svg", ".pdf")
    if args.plot is not None:
        from langchain_card.bench import plots  # noqa: F401 - fails before the work, where matplotlib is absent


def _compare(args: argparse.Namespace) -> None:
    from langchain_card.bench import prompts
    from langchain_card.bench.compare import Comparison, compare, measure_gaps
    from langchain_card.bench.method_table import check_methods
    from langchain_card.bench.methods import DecodeOptions, open_methods
    from langchain_card.bench.prompts import user_prompt
    from langchain_card.cli.chat import load
    from langchain_card.cli.fields import drafter_fields, engine_fields
    from langchain_card.cli.render import Screen
    from langchain_card.config import EngineConfig
    from langchain_card.core.request import SamplingParams

    fields, screen = engine_fields(args) | drafter_fields(args), Screen()
    config, options = EngineConfig(**fields), DecodeOptions(args.temperature)
    SamplingParams(max_tokens=args.max_tokens, temperature=options.temperature).check(config.limits)
    names = check_methods(tuple(args.methods), config, args.batch)
    texts = prompts.find(args.prompts[0], args.count)
    asked = {"max_tokens": args.max_tokens, "temperature": args.temperature, "batch": args.batch}
    save = partial(_save, args, {"engine": fields, "prompts": args.prompts, "asked": asked})

    def report(results: Comparison, number: int, total: int) -> None:
        save(results)
        speeds = "  ".join(f"{name} {run.speed:.1f}" for name, run in results.last_turn().items())
        screen.note(f"{number} of {total}, tokens/s: {speeds}")

    with contextlib.ExitStack() as stack:
        engine, methods, failed = open_methods(names, config, options, stack, partial(load, screen), screen.note)
        ids = [user_prompt(engine, text) for text in texts]
        weights = {method.name: method.weights for method in methods}
        results = Comparison(weights, failed=failed, greedy=not args.temperature)
        try:
            decode = engine.tokenizer.decode
            compare(results, methods, ids, args.max_tokens, args.batch, args.repeat, decode, report)
            if results.greedy:
                measure_gaps(results, engine, ids, args.batch, screen.note)
        finally:  # a run that was cut short shows what it has
            save(results)
            _show(screen, results, args)


def _measure_load(args: argparse.Namespace) -> None:
    from langchain_card.bench.load import LoadResults, measure_load
    from langchain_card.bench.method_table import check_methods
    from langchain_card.bench.methods import DecodeOptions, open_methods
    from langchain_card.bench.prompts import named_sets, user_prompt
    from langchain_card.cli.chat import load
    from langchain_card.cli.fields import drafter_fields, engine_fields
    from langchain_card.cli.render import Screen
    from langchain_card.config import EngineConfig
    from langchain_card.core.request import SamplingParams

    screen, fields = Screen(), engine_fields(args) | drafter_fields(args)
    config, options = EngineConfig(**fields), DecodeOptions(args.temperature)
    SamplingParams(max_tokens=args.max_tokens, temperature=options.temperature).check(config.limits)
    names = check_methods(tuple(args.methods), config, batch=1, at_load=True)
    texts = named_sets(args.prompts, args.count)
    asked = {"max_tokens": args.max_tokens, "temperature": args.temperature, "count": args.count}
    save = partial(_save, args, {"engine": fields, "prompts": args.prompts, "asked": asked})

    def report(results: LoadResults) -> None:
        save(results)
        cell = results.cells[-1]
        screen.note(f"{cell.text}, {cell.requests} at once, {cell.method}: {cell.speed:.1f} tokens/s")

    with contextlib.ExitStack() as stack:
        engine, methods, failed = open_methods(names, config, options, stack, partial(load, screen), screen.note)
        servers = [cast("Server", method) for method in methods]  # `check_methods` has seen to it
        ids = {name: [user_prompt(engine, text) for text in rows] for name, rows in texts.items()}
        results = LoadResults({method.name: method.weights for method in methods}, failed=failed)
        try:
            measure_load(results, servers, ids, args.load, args.max_tokens, report)
        finally:  # a run that was cut short shows what it has
            save(results)
            _show_load(screen, results, args)


def _show_load(screen: Screen, results: LoadResults, args: argparse.Namespace) -> None:
    from langchain_card.bench.compare import markdown_table
    from langchain_card.bench.load import table

    if results.cells:
        print(markdown_table([*table(results)]))
    for name, why in results.failed.items():
        screen.print(f"{name} was left out: {why}")
    if args.plot is not None and results.cells:
        from langchain_card.bench.plots import plot_load

        plot_load(
            results, args.plot, f"{args.model}, draft {args.draft_model}; answers of at most {args.max_tokens} tokens"
        )
    _name_files(screen, len(results.cells), args)


def _save(args: argparse.Namespace, about: Mapping[str, Any], results: Comparison | LoadResults) -> None:
    """Write the results with what they are about, if the user wants a file."""
    from langchain_card.bench import machine
    from langchain_card.bench.peers.peer import versions_of

    if args.json is None:
        return
    command = shlex.join(["langchain-card", *args.given])
    new = args.json.with_suffix(".new")
    versions = {"machine": machine.describe(), "packages": versions_of(results.weights)}
    rows = {"command": command, **versions, **about, **results.to_json()}
    new.write_text(json.dumps(rows) + "\n")
    os.replace(new, args.json)


def _show(screen: Screen, results: Comparison, args: argparse.Namespace) -> None:
    from langchain_card.bench.compare import markdown, remarks

    if results.rows:
        print(markdown(results))
    for remark in remarks(results):
        screen.print(remark)
    if args.plot is not None and results.rows:
        from langchain_card.bench.plots import plot_comparison

        answers = {row.group: len(row.run.token_ids) for row in results.rows}
        asked = f"{args.prompts[0]}, {sum(answers.values())} prompts"
        plot_comparison(results, args.plot, f"{args.model}, draft {args.draft_model}; {asked}")
    _name_files(screen, len(results.rows), args)


def _name_files(screen: Screen, rows: int, args: argparse.Namespace) -> None:
    if args.json is not None:
        screen.note(f"{rows} rows are in {args.json}")
    if args.plot is not None and rows:
        screen.note(f"a picture is in {args.plot}")


def _compare_long_texts(args: argparse.Namespace) -> None:
    from langchain_card.bench.compare import Comparison
    from langchain_card.bench.long_texts import compare_long_texts, long_texts
    from langchain_card.bench.method_table import check_methods
    from langchain_card.bench.methods import DecodeOptions, open_methods
    from langchain_card.cli.chat import load
    from langchain_card.cli.fields import drafter_fields, engine_fields
    from langchain_card.cli.render import Screen
    from langchain_card.config import EngineConfig
    from langchain_card.core.request import SamplingParams
    from langchain_card.limits import Limits

    answers, screen = args.answer or ANSWERS, Screen()
    texts = long_texts(args.context, answers, args.repeat)
    room = max(args.context) + max(answers) + Limits().max_window + _MARGIN  # the same KV cache for all methods
    fields = engine_fields(args) | drafter_fields(args) | {"max_model_len": room}
    config, options = EngineConfig(**fields), DecodeOptions(args.temperature, ignore_end=True)
    SamplingParams(max_tokens=max(answers), temperature=options.temperature).check(config.limits)
    names = check_methods(tuple(args.methods), config, batch=1)
    save = partial(_save, args, {"engine": fields, "asked": asdict(options), "texts": [*map(asdict, texts)]})

    def report(results: Comparison, number: int, total: int) -> None:
        save(results)
        text = texts[number - 1]
        seconds = "  ".join(f"{name} {run.whole:.1f}" for name, run in results.last_turn().items())
        lengths = f"{text.context:,} tokens of {text.kind} read, {text.answer:,} written"
        screen.note(f"{number} of {total}: {lengths}, seconds: {seconds}")

    with contextlib.ExitStack() as stack:
        engine, methods, failed = open_methods(names, config, options, stack, partial(load, screen), screen.note)
        weights = {method.name: method.weights for method in methods}
        results = Comparison(weights, failed=failed, greedy=not args.temperature)
        try:
            compare_long_texts(results, methods, texts, engine, report)
        finally:  # a run that was cut short shows what it has
            save(results)
            _show_long_texts(screen, results, texts, args)


def _show_long_texts(screen: Screen, results: Comparison, texts: Sequence[LongText], args: argparse.Namespace) -> None:
    from langchain_card.bench.compare import conditions, markdown_table
    from langchain_card.bench.long_texts import table

    if results.rows:
        print(markdown_table([*table(results, texts)]))
    for remark in conditions(results):
        screen.print(remark)
    if args.plot is not None and results.rows:
        from langchain_card.bench.plots import plot_long_texts

        plot_long_texts(results, texts, args.plot, f"{args.model}, draft {args.draft_model}; medians")
    _name_files(screen, len(results.rows), args)


def _measure(args: argparse.Namespace) -> None:
    from langchain_card.bench.step_times import measure
    from langchain_card.cli.fields import engine_fields
    from langchain_card.config import EngineConfig

    config = EngineConfig(**engine_fields(args))
    measure(config, args.steps.stem, args.count, lambda line: print(line, flush=True)).save(args.steps)
