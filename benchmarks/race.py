"""This engine against other packages at their best, on several sets of prompts; greedy, all methods in turns.

    python benchmarks/race.py SET ... --json FILE [--count N] [--skip N] [--max-tokens N] [--methods NAME ...]

A set is `humaneval`, a file of JSON lines, or NAME=FILE. The peers run with the options that `tune_peers.py` found on
other prompts. The warm-ups use the built-in prompts. FILE is written after every prompt; the same command goes on where
it stopped. `race_page.py` writes the pages from it; `make race` runs both.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import shlex
import sys
from pathlib import Path
from typing import Any

import langchain_card
from langchain_card.bench import machine, prompts
from langchain_card.bench.compare import WARM_UPS, Comparison, markdown_table, turn
from langchain_card.bench.method_table import PEER_OPTIONS, PEERS, check_methods
from langchain_card.bench.methods import DecodeOptions, open_methods
from langchain_card.bench.peers.peer import versions_of
from langchain_card.bench.race import CARD, details, losses, resumed, run_race, speed
from langchain_card.config import EngineConfig
from langchain_card.engine.engine import Engine
from langchain_card.errors import CARDError, InvalidInputError
from langchain_card.models.files import source_hash
from langchain_card.models.store import ModelStore
from langchain_card.runtime.step_timer import memory_bandwidth

METHODS = (CARD, *PEER_OPTIONS)


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sets", nargs="+", metavar="SET")
    parser.add_argument("--json", type=Path, required=True, metavar="FILE")
    parser.add_argument("--count", type=int, default=20, help="prompts of each set (20)")
    parser.add_argument("--skip", type=int, default=0, metavar="N", help="leave out the first rows of each set (0)")
    parser.add_argument("--max-tokens", type=int, default=128, help="tokens of each answer (128)")
    parser.add_argument("--methods", nargs="+", default=METHODS, metavar="NAME", help=" ".join(METHODS))
    parser.add_argument("--max-model-len", type=int, default=4096, help="positions of each method's KV cache (4096)")
    parser.add_argument("--model", default=EngineConfig().model)
    parser.add_argument("--draft-model", default=EngineConfig().draft_model)
    parser.add_argument("--dtype", default="auto")
    return parser.parse_args(arguments)


def describe(
    args: argparse.Namespace, given: list[str], fields: dict[str, Any], sets: dict[str, list[str]]
) -> dict[str, Any]:
    """Return the description of a race, without what is measured."""
    return {
        "command": shlex.join(["python", "benchmarks/race.py", *given]),
        "machine": machine.describe(),
        "packages": versions_of(args.methods),
        "code": source_hash(Path(langchain_card.__path__[0])),
        "engine": fields,
        "asked": {"max_tokens": args.max_tokens, "count": args.count, "skip": args.skip},
        "files": args.sets,
        "texts": hashlib.sha256(json.dumps(sets).encode()).hexdigest(),
        "options": {name: dict(PEER_OPTIONS[name]) for name in PEER_OPTIONS},
    }


def main(given: list[str]) -> None:
    args = parse(given)
    fields = {name: getattr(args, name) for name in ("model", "draft_model", "dtype", "max_model_len")}
    config = EngineConfig(**fields)
    names = check_methods(tuple(args.methods), config, batch=1)
    sets = prompts.named_sets(args.sets, args.count, args.skip)
    race = resumed(args.json, describe(args, given, fields, sets))
    if race.sets and all(
        len(race.of(name).of(method)) == len(texts) for name, texts in sets.items() for method in names
    ):
        raise InvalidInputError("--json", str(args.json), "holds a complete race", "delete it, or name another file")
    measured = memory_bandwidth()  # before models take the memory; other programs can only lower it
    race.about["bandwidth"] = max(measured, race.about.get("bandwidth", 0.0))
    print(f"memory: {race.about['bandwidth'] / 1e9:.1f} GB/s", flush=True)
    with contextlib.ExitStack() as stack:
        say = lambda line: print(line, flush=True)  # noqa: E731
        engine, methods, failed = open_methods(names, config, DecodeOptions(), stack, Engine, say)
        file = ModelStore().path(args.model)
        race.about["bytes_a_pass"] = machine.bytes_a_pass(file) if file.suffix == ".gguf" else None
        race.failed.update(failed)
        race.weights.update({method.name: method.weights for method in methods})
        for name in [name for name in race.failed if name in PEERS]:
            print(f"{name} is left out: {race.failed[name]}", flush=True)

        def report(name: str, group: int) -> None:
            race.save(args.json)
            results = race.of(name)
            speeds = "  ".join(f"{method} {speed(results, method):.1f}" for method in race.weights)
            print(f"{name}, prompt {group + 1}; medians, tokens/s: {speeds}", flush=True)

        cold = Comparison(race.weights, failed=race.failed)
        for number, text in enumerate(prompts.find("own", WARM_UPS), start=1):
            turn(cold, methods, [prompts.user_prompt(engine, text)], args.max_tokens, 0, -number)
        ids = {name: [prompts.user_prompt(engine, text) for text in texts] for name, texts in sets.items()}
        run_race(race, methods, ids, args.max_tokens, report)
    race.save(args.json)
    print(markdown_table([*details(race)]), *losses(race), sep="\n")


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except CARDError as error:
        sys.exit(str(error))
