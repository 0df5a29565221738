"""A race on several sets of prompts: turns that can be resumed, its file, and its tables.

Each peer stands beside its own plain decoding. Figures are medians over prompts.
"""

from __future__ import annotations

import json
import os
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from langchain_card.bench.compare import Comparison, Row, times_base, turn
from langchain_card.bench.method import Method, Run
from langchain_card.bench.method_table import PEERS, PLAIN
from langchain_card.errors import InvalidInputError

CARD = "card"
_SAME = ("machine", "packages", "code", "engine", "asked", "files", "texts", "options")
"""Parts of a race's description that must not change when it goes on."""

_GIB = 1 << 30


@dataclass
class Race:
    """The results of a race, complete or not.

    Attributes:
        about: command, machine, packages, a hash of this package's code, engine, what was asked, files of the sets and
            a hash of their texts, options of the peers, bandwidth, and bytes that a pass reads.
        weights: number formats by method, in words.
        sets: results by set. Their rows' `group` is the index of the prompt.
        failed: errors of the methods that were left out, by name.
    """

    about: dict[str, Any]
    weights: dict[str, str] = field(default_factory=dict)
    sets: dict[str, Comparison] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)

    def of(self, name: str) -> Comparison:
        """Return the results of a set, which share weights and failures with the other sets."""
        return self.sets.setdefault(name, Comparison(self.weights, failed=self.failed))

    def save(self, path: Path) -> None:
        """Write everything to a file, at once."""
        rows = {name: [asdict(row) for row in results.rows] for name, results in self.sets.items()}
        new = path.with_suffix(".new")
        new.write_text(json.dumps({**self.about, "weights": self.weights, "failed": self.failed, "rows": rows}) + "\n")
        os.replace(new, path)


def load_race(path: Path) -> Race:
    """Read what `Race.save` wrote."""
    about = json.loads(path.read_text())
    rows, race = about.pop("rows"), Race(about, about.pop("weights"), failed=about.pop("failed"))
    for name, found in rows.items():
        race.of(name).rows += [Row(**row | {"run": Run(**row["run"])}) for row in found]
        for row in race.of(name).rows:  # JSON knows no tuples
            object.__setattr__(row.run, "token_ids", tuple(map(tuple, row.run.token_ids)))
    return race


def resumed(path: Path, about: Mapping[str, Any]) -> Race:
    """Return the race in a file, or a new one. Methods that failed are tried again.

    Raises:
        InvalidInputError: the file holds a race under other conditions.
    """
    if not path.exists():
        return Race(dict(about))
    race = load_race(path)
    for key in _SAME:
        if race.about.get(key) != json.loads(json.dumps(about[key])):
            limit = f"holds a race with another value of {key!r}"
            hint = "name another file, or repeat the same command with the same code and packages"
            raise InvalidInputError("--json", str(path), limit, hint)
    race.failed.clear()
    return race


def run_race(
    race: Race,
    methods: Sequence[Method],
    prompts: Mapping[str, Sequence[Sequence[int]]],
    max_tokens: int,
    report: Callable[[str, int], None],
) -> None:
    """Let each method answer each prompt once, in turns whose order changes. Whole turns are not run again.

    A turn that lacks a method is: methods are compared only where they ran side by side.

    Args:
        race: receives the runs.
        methods: plain decoding among them.
        prompts: token ids by set.
        max_tokens: of each answer.
        report: called with the set and the prompt's index after each turn, also after one that was cut short.

    Raises:
        CARDError: plain decoding failed, so that there is no baseline.
    """
    for name, ids in prompts.items():
        results = race.of(name)
        for group, prompt in enumerate(ids):
            done = {row.method for row in results.rows if row.group == group}
            if any(method.name not in done for method in methods):
                results.rows[:] = [row for row in results.rows if row.group != group]
                try:
                    turn(results, methods, [prompt], max_tokens, group, 0)
                finally:
                    report(name, group)


def speed(results: Comparison, method: str) -> float:
    """Return the median of a method's tokens per second; 0 without runs."""
    return statistics.median(row.run.speed for row in results.of(method)) if results.of(method) else 0.0


def peers_of(race: Race) -> dict[str, list[str]]:
    """Return the peers that decode plainly, each with the methods that speculate on it."""
    peers = [name for name in race.weights if name in PEERS]
    return {base: [name for name in peers if PEERS[name].base == base] for base in peers if not PEERS[base].base}


def fastest(results: Comparison, methods: Sequence[str]) -> str:
    """Return the method with the highest `speed` of those that answered every prompt; "" if there are none."""
    every = len(results.of(PLAIN))
    whole = [name for name in methods if len(results.of(name)) == every > 0]
    return max(whole, key=lambda name: speed(results, name), default="")


def summary(race: Race) -> Iterator[tuple[str, ...]]:
    """Yield the header, and a line for each set."""
    peers = peers_of(race)
    columns = [column for base, others in peers.items() for column in (base, *[f"{base}, best"] * bool(others))]
    ends = ("card / best peer", "plain / llama-server", "equal to plain")
    yield ("text", "plain, tokens/s", "card", "times plain (95 %)", *columns, *ends)
    for name, results in race.sets.items():
        cells = list[str]()
        for base, others in peers.items():
            cells.append(_number(speed(results, base)))
            if others:
                best = fastest(results, others)
                kind = f" ({best.removeprefix(f'{base}-')})" if best else ""
                cells.append(_number(speed(results, best)) + kind)
        best, ratio = fastest(results, [*_all(peers)]), results.speedup(PLAIN, "llama-server")
        yield (
            name,
            _number(speed(results, PLAIN)),
            _number(speed(results, CARD)),
            times_base(results, CARD, PLAIN),
            *cells,
            times_base(results, CARD, best),
            f"{ratio.value:.2f}" if ratio else "",
            "{} of {}".format(*results.identical(CARD)),
        )


def _all(peers: Mapping[str, Sequence[str]]) -> Iterator[str]:
    for base, others in peers.items():
        yield base
        yield from others


def _number(value: float) -> str:
    return f"{value:.1f}" if value else ""


def details(race: Race) -> Iterator[tuple[str, ...]]:
    """Yield the header, and for each set a line for each method."""
    yield (
        "text", "method", "tokens/s (quartiles)", "times own plain (95 %)", "card / it (95 %)", "accepted length",
        "acceptance", "first token", "peak memory", "bandwidth", "equal to own plain", "equal to plain",
    )  # fmt: skip
    for name, results in race.sets.items():
        for method in race.weights:
            if results.of(method):
                yield (name, method, *_figures(race, results, method))


def _figures(race: Race, results: Comparison, method: str) -> Iterator[str]:
    runs = [row.run for row in results.of(method)]
    speeds = [run.speed for run in runs]
    low, middle, high = statistics.quantiles(speeds, n=4, method="inclusive") if len(speeds) > 1 else speeds * 3
    base = PEERS[method].base if method in PEERS else PLAIN * (method != PLAIN)
    yield f"{middle:.1f} ({low:.1f} to {high:.1f})"
    yield times_base(results, method, base) if base else ""
    yield "" if method in (PLAIN, CARD) else times_base(results, CARD, method)
    for figure in ("accepted_length", "acceptance"):
        values = [run.figures[figure] for run in runs if run.figures.get(figure) is not None]
        yield f"{statistics.mean(values):.2f}" if values else ""
    yield f"{statistics.median(run.first for run in runs):.2f} s"
    yield f"{max(run.peak for run in runs) / _GIB:.1f} GiB"
    share = bandwidth_share(race, results, method)
    yield f"{share:.0%}" if share else ""
    yield "{} of {}".format(*results.identical(method, base)) if base else ""
    yield "" if method == PLAIN else "{} of {}".format(*results.identical(method))


def bandwidth_share(race: Race, results: Comparison, method: str) -> float | None:
    """Return the share of the machine's memory bandwidth that a plain method reads weights with; None for others.

    The bytes of a pass are those of the target's file, whatever a peer makes of them.
    """
    plain = method == PLAIN or (method in PEERS and PEERS[method].weights == "gguf" and not PEERS[method].base)
    size, bandwidth = race.about.get("bytes_a_pass"), race.about.get("bandwidth")
    return size * speed(results, method) / bandwidth if plain and size and bandwidth else None


def losses(race: Race) -> list[str]:
    """Return a sentence for each set and peer that was faster than `card`, or than plain decoding without a draft."""
    found = list[str]()
    for name, results in race.sets.items():
        for base, others in peers_of(race).items():
            ours = [(PLAIN, base), *((CARD, peer) for peer in (base, *others))]
            slower = [(own, peer) for own, peer in ours if (times := results.speedup(own, peer)) and times.value < 1]
            found += [f"{name}: {own} was {times_base(results, own, peer)} times {peer}." for own, peer in slower]
    return found
