"""The best options of each peer of the race, found on other prompts than those of the race.

    python benchmarks/tune_peers.py SET ... --json FILE [--count N] [--skip N] [--max-tokens N] [--methods NAME ...]

A set is `humaneval`, a file of JSON lines, or NAME=FILE; its first rows (`--skip`) are left to the race. Each setting
has a process of its own. The settings of a stage are measured on every third prompt; then the better half of them, in
the opposite order, on the other prompts. The best has the highest geometric mean of tokens per second. FILE is written
after every setting; the same command goes on where it stopped. The last lines are the table for
`bench/method_table.py`. With four sets, this takes about 40 minutes on two cores.
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

DRAFT = (*itertools.product((1, 2, 3, 4), (0.0, 0.5, 0.8)), (8, 0.5), (8, 0.8), (16, 0.8))
"""`n-max` and `p-min` of the draft model. A long draft needs a limit: wrong tokens take as long as right ones."""

NGRAM_MOD = (*itertools.product((3, 6, 12), (1,), (2, 4, 8)), (12, 4, 16), (24, 48, 64))
"""`n-match`, `n-min` and `n-max` of ngram-mod. The last are the server's own, which find nothing in short answers."""

SIZED = ("ngram-simple", "ngram-map-k", "ngram-map-k4v")
"""Kinds of n-grams with a length of matches, `size-n`, and of drafts, `size-m`."""

SIZES = ((3, 4), (5, 8), (12, 48))
"""`size-n` and `size-m`. The last are the server's own."""

BESIDE = ((6, 2, 4), (12, 1, 8), (12, 4, 16), (24, 8, 32))
"""`n-match`, `n-min` and `n-max` of ngram-mod with a draft model behind it, which drafts only where n-grams do not."""

LOOKUP = tuple(itertools.product((2, 3, 5, 8), (2, 3)))
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
    """Return the best of a grid at one setting of flash attention, then of the other and of another sampler."""
    grid = [
        {**plain, "spec-type": "draft-simple", "spec-draft-n-max": n_max, "spec-draft-p-min": p_min}
        for n_max, p_min in DRAFT
    ]
    chosen = dict(best("llama-server-draft", grid))
    other: dict[str, int | float | str] = {"flash-attn": "off" if plain["flash-attn"] == "on" else "on"}
    return best("llama-server-draft", [chosen, chosen | other, chosen | {"spec-draft-backend-sampling": False}])


def tune_ngram(plain: PeerOptions, best: Best) -> PeerOptions:
    """Return the best of five kinds of n-grams; those with options have several sizes."""
    grid: list[PeerOptions] = [{**plain, "spec-type": "ngram-mod", **mod(values)} for values in NGRAM_MOD]
    for kind, (size_n, size_m) in itertools.product(SIZED, SIZES):
        grid.append({**plain, "spec-type": kind, f"spec-{kind}-size-n": size_n, f"spec-{kind}-size-m": size_m})
    grid.append({**plain, "spec-type": "ngram-cache"})
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
        for options in grid:
            self._measure(method, options, self._places(0))
        order = sorted(grid, key=lambda options: -self.score(method, options, self._places(0)))
        better = order[: (len(grid) + 1) // 2]
        for options in (options for options in reversed(grid) if options in better):
            self._measure(method, options, self._places(1))
        failed = self._state["failed"]
        works = [options for options in order if key(method, options) not in failed]
        if not works:
            why = failed[key(method, grid[0])]
            raise InvalidInputError("--methods", method, f"failed with every setting ({why})", "leave it out")
        return max([each for each in works if each in better] or works, key=lambda each: self.score(method, each))

    def _places(self, number: int) -> list[str]:
        """Return the prompts of a round as "SET INDEX"."""
        return [f"{each} {at}" for each, ids in self._ids.items() for at in range(len(ids)) if _is_in(at, number)]

    def _measure(self, method: str, options: PeerOptions, places: Iterable[str]) -> None:
        """Measure one setting on prompts."""
        name = key(method, options)
        speeds: dict[str, float] = self._state["speeds"].setdefault(name, {})
        missing = [place for place in places if place not in speeds]
        if not missing or name in self._state["failed"]:
            return
        try:
            with self._start(method, options) as started:
                started.run([self._prompt(missing[0])], WARM_UP_TOKENS, 0)
                for place in missing:
                    speeds[place] = started.run([self._prompt(place)], self._max_tokens, 0).speed
        except CARDError as error:
            self._state["failed"][name] = str(error)
            self._say(f"{name} failed: {error}")
        else:
            self._say(f"{name}: {self.score(method, options):.1f} tokens/s")
        self._save()

    def _prompt(self, place: str) -> tuple[int, ...]:
        each, _, at = place.rpartition(" ")
        return self._ids[each][int(at)]

    def score(self, method: str, options: PeerOptions, places: Iterable[str] = ()) -> float:
        """Return the geometric mean of a setting's tokens per second on some prompts, or on all that it answered.

        0 if there are none, or if an answer had no speed.
        """
        speeds = self._state["speeds"].get(key(method, options), {})
        chosen = [speeds[place] for place in places or speeds if place in speeds]
        return statistics.geometric_mean(chosen) if chosen and min(chosen) > 0 else 0.0

    def table(self) -> list[tuple[str, ...]]:
        """Return the header, and a line for each setting: how many answers, and tokens per second of all and each set.

        The best of each method comes first. Settings with fewer answers were left out of the second round.
        """
        lines = list[tuple[int, float, tuple[str, ...]]]()
        for name in self._state["speeds"]:
            method, _, text = name.partition(" ")
            options = json.loads(text)
            words = ", ".join(f"{option} {value}" for option, value in options.items())
            sets = [[f"{each} {at}" for at in range(len(ids))] for each, ids in self._ids.items()]
            scores = [self.score(method, options), *(self.score(method, options, places) for places in sets)]
            answers = len(self._state["speeds"][name])
            lines.append((answers, scores[0], (method, words, str(answers), *(f"{score:.1f}" for score in scores))))
        order = [*PEER_OPTIONS]
        lines.sort(key=lambda line: (order.index(line[2][0]), -line[0], -line[1]))
        return [("method", "options", "answers", "tokens/s", *self._ids), *(line for *_, line in lines)]

    def _save(self) -> None:
        new = self._path.with_suffix(".new")
        new.write_text(json.dumps(self._state) + "\n")
        os.replace(new, self._path)


def _is_in(at: int, number: int) -> bool:
    """Return whether a prompt belongs to a round: every third to the first, the others to the second."""
    return (at % 3 == 0) == (number == 0)


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
