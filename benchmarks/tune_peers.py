"""The best options of each peer of the race, found on other prompts than those of the race.

    python benchmarks/tune_peers.py SET ... --json FILE [--count N] [--skip N] [--max-tokens N] [--methods NAME ...]

A set is `humaneval`, a file of JSON lines, or NAME=FILE; its first rows (`--skip`) are left to the race. Each setting
has a process of its own. The settings of a stage are measured in two rounds, the second in the opposite order, each on
every second prompt. The best has the highest geometric mean of tokens per second. FILE is written after every setting;
the same command goes on where it stopped. The last lines are the table for `bench/method_table.py`.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import pprint
import statistics
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, TypeAlias

from langchain_card.bench import machine, prompts
from langchain_card.bench.compare import markdown_table
from langchain_card.bench.method import Method
from langchain_card.bench.method_table import PEER_OPTIONS, PeerOptions, check_methods
from langchain_card.bench.peers.peer import open_peer, versions_of
from langchain_card.bench.prompts import chat_ids
from langchain_card.config import EngineConfig
from langchain_card.errors import CARDError, InvalidInputError
from langchain_card.models.tokenizer import load_tokenizer

Prompts: TypeAlias = Mapping[str, Sequence[tuple[int, ...]]]
"""Token ids of prompts by set."""

Best: TypeAlias = Callable[[str, Sequence[PeerOptions]], PeerOptions]
"""Measures the settings of one stage of a method and returns the best."""

N_MAX, P_MIN = (2, 3, 4, 8, 16), (0.0, 0.5, 0.8)
"""Longest drafts of llama-server's draft model, and least probabilities of their tokens."""

NGRAM_MOD = (*itertools.product((3, 6, 12), (1,), (4, 8, 16)), (12, 4, 16), (24, 8, 32), (24, 48, 64))
"""`n-match`, `n-min` and `n-max` of ngram-mod. The last are the server's own, which find nothing in short answers."""

NGRAM_SIMPLE = ((3, 4), (3, 8), (5, 8), (12, 48))
"""`size-n` and `size-m` of ngram-simple. The last are the server's own."""

BESIDE = ((6, 2, 8), (12, 1, 8), (12, 4, 16), (12, 8, 32), (24, 8, 32))
"""`n-match`, `n-min` and `n-max` of ngram-mod with a draft model behind it, which drafts only where n-grams do not."""

LOOKUP = tuple(itertools.product((2, 3, 5, 8, 16), (2, 3)))
"""`num_assistant_tokens` and `max_ngram_size` of OpenVINO's prompt lookup."""

WARM_UP_TOKENS = 4
"""Tokens of the answer with which a process begins. It does not count."""

_MATCH, _MIN, _MAX = (f"spec-ngram-mod-n-{part}" for part in ("match", "min", "max"))


def mod(values: tuple[int, int, int]) -> dict[str, int]:
    return dict(zip((_MATCH, _MIN, _MAX), values, strict=True))


def tune(methods: Iterable[str], best: Best) -> dict[str, PeerOptions]:
    """Return the best options of each method.

    Args:
        methods: that are wanted. Those that they build on are tuned, too.
        best: measures settings.
    """
    wanted, found = {*methods}, dict[str, PeerOptions]()
    if any(name.startswith("llama-server") for name in wanted):
        found["llama-server"] = best("llama-server", [{"flash-attn": "on"}, {"flash-attn": "off"}])
        if wanted & {"llama-server-draft", "llama-server-both"}:
            found["llama-server-draft"] = tune_draft(found["llama-server"], best)
        if "llama-server-ngram" in wanted:
            found["llama-server-ngram"] = tune_ngram(found["llama-server"], best)
        if "llama-server-both" in wanted:
            both = {**found["llama-server-draft"], "spec-type": "ngram-mod,draft-simple"}
            found["llama-server-both"] = best("llama-server-both", [both | mod(values) for values in BESIDE])
    if any(name.startswith("openvino") for name in wanted):
        hint = {"PERFORMANCE_HINT": "LATENCY"}
        found["openvino"] = best("openvino", [{}, hint, {"ATTENTION_BACKEND": "SDPA"}])
        if "openvino-lookup" in wanted:
            common = {key: value for key, value in found["openvino"].items() if key != "ATTENTION_BACKEND"}
            names = ("num_assistant_tokens", "max_ngram_size")
            lookups = [common | dict(zip(names, values, strict=True)) for values in LOOKUP]
            found["openvino-lookup"] = best("openvino-lookup", lookups)
    return {name: options for name, options in found.items() if name in wanted}


def tune_draft(plain: PeerOptions, best: Best) -> PeerOptions:
    """Return the best of a grid at one setting of flash attention, then of both settings."""
    grid = [
        {**plain, "spec-type": "draft-simple", "spec-draft-n-max": n_max, "spec-draft-p-min": p_min}
        for n_max, p_min in itertools.product(N_MAX, P_MIN)
    ]
    chosen = best("llama-server-draft", grid)
    other = {"flash-attn": "off" if plain["flash-attn"] == "on" else "on"}
    return best("llama-server-draft", [chosen, {**chosen, **other}])


def tune_ngram(plain: PeerOptions, best: Best) -> PeerOptions:
    """Return the best of two kinds of n-grams, each with several sizes."""
    grid: list[PeerOptions] = [{**plain, "spec-type": "ngram-mod", **mod(values)} for values in NGRAM_MOD]
    for size_n, size_m in NGRAM_SIMPLE:
        sizes = {"spec-ngram-simple-size-n": size_n, "spec-ngram-simple-size-m": size_m}
        grid.append({**plain, "spec-type": "ngram-simple", **sizes})
    return best("llama-server-ngram", grid)


class Tuning:
    """Settings that are measured, and their file.

    Args:
        path: of the file.
        about: the conditions. Those of an existing file must be the same.
        ids: of the prompts, by set.
        max_tokens: of each answer.
        start: starts a method with options.
        say: receives the progress.

    Raises:
        InvalidInputError: the file holds measurements under other conditions.
    """

    def __init__(
        self,
        path: Path,
        about: Mapping[str, Any],
        ids: Prompts,
        max_tokens: int,
        start: Callable[[str, PeerOptions], AbstractContextManager[Method]],
        say: Callable[[str], None],
    ) -> None:
        self._path, self._ids, self._max_tokens, self._start, self._say = path, ids, max_tokens, start, say
        self._state: dict[str, Any] = {"about": dict(about), "speeds": {}, "failed": {}}
        if path.exists():
            self._state = json.loads(path.read_text())
            if self._state["about"] != json.loads(json.dumps(about)):
                hint = "name another file, or repeat the same command"
                raise InvalidInputError("--json", str(path), "holds a tuning under other conditions", hint)
            self._state["failed"] = {}

    def best(self, method: str, grid: Sequence[PeerOptions]) -> PeerOptions:
        """Measure what is not measured yet, and return the setting with the highest `score`.

        Raises:
            InvalidInputError: every setting failed.
        """
        for half in range(2):
            for options in grid if half == 0 else reversed(grid):
                self._measure(method, options, half)
        works = [options for options in grid if key(method, options) not in self._state["failed"]]
        if not works:
            why = self._state["failed"][key(method, grid[0])]
            raise InvalidInputError("--methods", method, f"failed with every setting ({why})", "leave it out")
        return max(works, key=lambda options: self.score(method, options))

    def _measure(self, method: str, options: PeerOptions, half: int) -> None:
        """Measure one setting on its share of the prompts of each set."""
        name = key(method, options)
        speeds: dict[str, float] = self._state["speeds"].setdefault(name, {})
        places = [(each, at) for each, ids in self._ids.items() for at in range(half, len(ids), 2)]
        missing = [(each, at) for each, at in places if f"{each} {at}" not in speeds]
        if not missing or name in self._state["failed"]:
            return
        try:
            with self._start(method, options) as started:
                started.run([self._ids[missing[0][0]][missing[0][1]]], WARM_UP_TOKENS, 0)
                for each, at in missing:
                    run = started.run([self._ids[each][at]], self._max_tokens, 0)
                    speeds[f"{each} {at}"] = run.speed
        except CARDError as error:
            self._state["failed"][name] = str(error)
            self._say(f"{name} failed: {error}")
        else:
            self._say(f"{name}: {self.score(method, options):.1f} tokens/s")
        self._save()

    def score(self, method: str, options: PeerOptions, only: str = "") -> float:
        """Return the geometric mean of a setting's tokens per second, of all sets or one; 0 if one answer had none."""
        speeds = self._state["speeds"].get(key(method, options), {})
        chosen = [speed for place, speed in speeds.items() if place.startswith(f"{only} " if only else "")]
        return statistics.geometric_mean(chosen) if chosen and min(chosen) > 0 else 0.0

    def table(self) -> list[tuple[str, ...]]:
        """Return the header, and a line for each setting, the best of each method first."""
        lines = list[tuple[float, tuple[str, ...]]]()
        for name in self._state["speeds"]:
            method, _, text = name.partition(" ")
            options = json.loads(text)
            words = ", ".join(f"{option} {value}" for option, value in options.items())
            scores = [self.score(method, options, only) for only in ("", *self._ids)]
            lines.append((scores[0], (method, words, *(f"{score:.1f}" for score in scores))))
        order = [method for method in PEER_OPTIONS if any(line[0] == method for _, line in lines)]
        lines.sort(key=lambda line: (order.index(line[1][0]), -line[0]))
        return [("method", "options", "tokens/s", *self._ids), *(line for _, line in lines)]

    def _save(self) -> None:
        new = self._path.with_suffix(".new")
        new.write_text(json.dumps(self._state) + "\n")
        os.replace(new, self._path)


def key(method: str, options: PeerOptions) -> str:
    """Return the name of a setting."""
    return f"{method} {json.dumps(dict(options), sort_keys=True)}"


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sets", nargs="+", metavar="SET")
    parser.add_argument("--json", type=Path, required=True, metavar="FILE")
    parser.add_argument("--count", type=int, default=3, help="prompts of each set (3)")
    parser.add_argument("--skip", type=int, default=100, metavar="N", help="leave out the first rows of each set (100)")
    parser.add_argument("--max-tokens", type=int, default=96, help="tokens of each answer (96)")
    parser.add_argument("--methods", nargs="+", default=[*PEER_OPTIONS], metavar="NAME", help=" ".join(PEER_OPTIONS))
    parser.add_argument("--max-model-len", type=int, default=4096, help="positions of each KV cache (4096)")
    parser.add_argument("--model", default=EngineConfig().model)
    parser.add_argument("--draft-model", default=EngineConfig().draft_model)
    return parser.parse_args(arguments)


def main(given: list[str]) -> None:
    args = parse(given)
    fields = {name: getattr(args, name) for name in ("model", "draft_model", "max_model_len")}
    config, sets = EngineConfig(**fields), prompts.named_sets(args.sets, args.count, args.skip)
    check_methods(tuple(args.methods), config, batch=1)
    tokenizer = load_tokenizer(args.model)
    ids = {name: [chat_ids(tokenizer, text) for text in texts] for name, texts in sets.items()}
    about = {"machine": machine.describe(), "packages": versions_of(args.methods), "engine": fields, "files": args.sets}
    about |= {"asked": {"count": args.count, "skip": args.skip, "max_tokens": args.max_tokens}}

    def start(method: str, options: PeerOptions) -> AbstractContextManager[Method]:
        return contextlib.closing(open_peer(method, config, options=options))

    tuning = Tuning(args.json, about, ids, args.max_tokens, start, lambda line: print(line, flush=True))
    found = tune(args.methods, tuning.best)
    print(markdown_table(tuning.table()))
    pprint.pprint(found, sort_dicts=False, width=100)


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except CARDError as error:
        sys.exit(str(error))
