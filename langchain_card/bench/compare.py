"""The comparison of decoding methods on the same prompts, in turns: runs, speedups, differences, and the table."""

from __future__ import annotations

import contextlib
import itertools
import random
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from langchain_card.bench.bounds import Measured
from langchain_card.bench.method import Method, Run
from langchain_card.bench.method_table import PEERS, PLAIN
from langchain_card.core.request import SamplingParams
from langchain_card.engine.engine import Engine
from langchain_card.errors import CARDError, InvalidInputError

WARM_UPS = 2
"""Uncounted runs of each method, over the longest and the shortest prompts.

They compile kernels, touch memory, and let `auto` measure both of its schedules."""

_GIB = 1 << 30

MIN_PROMPTS = 6
"""Fewest prompts for which intervals are shown. Bootstrap intervals of fewer are too narrow."""

HEADERS = (
    "method", "weights", "tokens/s (quartiles)", "times plain (95 %)", "accepted length", "acceptance", "hits",
    "busy target / draft", "first token", "peak memory", "identical",
)  # fmt: skip


@dataclass(frozen=True)
class Row:
    """One run of a comparison.

    Attributes:
        method: name of the method.
        group: index of the batch of prompts.
        repeat: index of the pass over all prompts.
        run: its result.
    """

    method: str
    group: int
    repeat: int
    run: Run


@dataclass(frozen=True)
class Difference:
    """An answer that differs from that of plain decoding.

    Attributes:
        method: name of the method.
        group, repeat, answer: indices of the batch, of the pass over all prompts, and of the answer in the batch.
        position: number of equal tokens before the difference.
        own, plain: text of the next token of either answer; "" if the answer ends there.
        gap: difference of the log-probabilities of the target's two likeliest tokens there; None until `measure_gaps`
            has run, at a temperature, and where the target cannot compute it.
    """

    method: str
    group: int
    repeat: int
    answer: int
    position: int
    own: str
    plain: str
    gap: float | None


@dataclass
class Comparison:
    """The results of a comparison, complete or not.

    Attributes:
        weights: number formats by method, in words.
        rows: all runs.
        failed: errors of the methods that were left out, by name.
        differences: answers that differ from those of plain decoding.
        greedy: True for greedy decoding, False at a temperature.
    """

    weights: dict[str, str]
    rows: list[Row] = field(default_factory=list)
    failed: dict[str, str] = field(default_factory=dict)
    differences: list[Difference] = field(default_factory=list)
    greedy: bool = True

    def of(self, method: str) -> list[Row]:
        """Return the runs of one method."""
        return [row for row in self.rows if row.method == method]

    def pairs(self, method: str, base: str = PLAIN) -> Iterator[tuple[Row, Row]]:
        """Yield the runs of a method, each with the run of `base` over the same prompts."""
        plain = {(row.group, row.repeat): row for row in self.of(base)}
        for row in self.of(method):
            if (other := plain.get((row.group, row.repeat))) is not None:
                yield row, other

    def speedups(self, method: str, base: str = PLAIN) -> list[float]:
        """Return the speedup over `base` for each batch of prompts: the median over repeats."""
        ratios: dict[int, list[float]] = {}
        for row, other in self.pairs(method, base):
            if row.run.speed and other.run.speed:
                ratios.setdefault(row.group, []).append(row.run.speed / other.run.speed)
        return [statistics.median(values) for values in ratios.values()]

    def speedup(self, method: str, base: str = PLAIN) -> Measured | None:
        """Return the median of `speedups` with its interval; None if there are no runs to compare."""
        speedups = self.speedups(method, base)
        return Measured.of(speedups, statistics.median) if speedups else None

    def identical(self, method: str, base: str = PLAIN) -> tuple[int, int]:
        """Return the number of answers that equal those of `base`, and of all answers."""
        same = [
            answer == reference
            for row, other in self.pairs(method, base)
            for answer, reference in zip(row.run.token_ids, other.run.token_ids, strict=True)
        ]
        return sum(same), len(same)

    def last_turn(self) -> dict[str, Run]:
        """Return the runs of the last turn by method, in the order of `weights`."""
        last = self.rows[-1]
        turn = {row.method: row.run for row in self.rows if (row.group, row.repeat) == (last.group, last.repeat)}
        return {name: turn[name] for name in self.weights if name in turn}

    def to_json(self) -> dict[str, Any]:
        """Return all results in the form of `bench --json`."""
        return {
            "weights": self.weights,
            "failed": self.failed,
            "differences": [asdict(difference) for difference in self.differences],
            "rows": [asdict(row) for row in self.rows],
        }


def compare(
    results: Comparison,
    methods: Sequence[Method],
    prompts: Sequence[Sequence[int]],
    max_tokens: int,
    batch: int,
    repeats: int,
    decode: Callable[[Sequence[int]], str],
    report: Callable[[Comparison, int, int], None],
) -> None:
    """Let each method answer all prompts, in turns whose order changes.

    A method that fails is left out of the remaining turns.

    Args:
        results: receives the runs.
        methods: plain decoding among them.
        prompts: token ids of each.
        max_tokens: of each answer.
        batch: prompts per run.
        repeats: passes over all prompts.
        decode: turns token ids into text, for answers that differ.
        report: called after each turn with the results, the number of turns done, and that of all turns.

    Raises:
        CARDError: plain decoding failed, so that there is no baseline.
    """
    groups = [prompts[i : i + batch] for i in range(0, len(prompts), batch)]
    cold, sizes = Comparison(results.weights, failed=results.failed), [sum(map(len, group)) for group in groups]
    for number, size in enumerate((max(sizes), min(sizes)), 1):
        turn(cold, methods, groups[sizes.index(size)], max_tokens, 0, -number)
    for number, (repeat, group) in enumerate(itertools.product(range(repeats), range(len(groups))), 1):
        turn(results, methods, groups[group], max_tokens, group, repeat)
        results.differences += differences(results, group, repeat, decode)
        report(results, number, repeats * len(groups))


def turn(
    results: Comparison,
    methods: Sequence[Method],
    prompts: Sequence[Sequence[int]],
    max_tokens: int,
    group: int,
    repeat: int,
) -> None:
    """Let each method that has not failed answer a batch of prompts, in an order that `group` and `repeat` determine.

    Raises:
        CARDError: plain decoding failed.
    """
    order = [method for method in methods if method.name not in results.failed]
    random.Random(f"{group} {repeat}").shuffle(order)  # noqa: S311
    for method in order:
        try:
            run = method.run(prompts, max_tokens, repeat)
        except CARDError as error:  # noqa: PERF203
            if method.name == PLAIN:
                raise
            results.failed[method.name] = str(error)
        else:
            results.rows.append(Row(method.name, group, repeat, run))


def differences(
    results: Comparison, group: int, repeat: int, decode: Callable[[Sequence[int]], str]
) -> Iterator[Difference]:
    """Yield the answers of one turn that differ from plain decoding, without gaps."""
    for method in results.weights:
        for row, base in results.pairs(method):
            if (row.group, row.repeat) != (group, repeat):
                continue
            for i, (answer, plain) in enumerate(zip(row.run.token_ids, base.run.token_ids, strict=True)):
                if answer != plain:
                    pairs = zip(answer, plain)  # noqa: B905 - one may be a prefix of the other
                    place = next((n for n, (a, b) in enumerate(pairs) if a != b), min(len(answer), len(plain)))
                    texts = [decode(ids[place : place + 1]) for ids in (answer, plain)]
                    yield Difference(method, group, repeat, i, place, texts[0], texts[1], None)


def measure_gaps(
    results: Comparison, engine: Engine, prompts: Sequence[Sequence[int]], batch: int, report: Callable[[str], None]
) -> None:
    """Compute the gap of each difference with the target.

    Args:
        results: of `compare`; its differences receive their gaps.
        engine: runs the target.
        prompts: as passed to `compare`.
        batch: as passed to `compare`.
        report: receives the progress.
    """
    answers = {(row.group, row.repeat): row.run.token_ids for row in results.of(PLAIN)}
    for number, difference in enumerate(results.differences):
        if number % 10 == 0:
            report(f"asking the target where answers differ: {number} of {len(results.differences)}")
        plain = answers[difference.group, difference.repeat][difference.answer]
        text = [*prompts[difference.group * batch + difference.answer], *plain[: difference.position]]
        with contextlib.suppress(InvalidInputError):  # a token that the model has and its tokenizer lacks
            results.differences[number] = replace(difference, gap=_gap(engine, text))


def _gap(engine: Engine, text: Sequence[int]) -> float:
    answer = engine.submit(text, SamplingParams(max_tokens=1, schedule="plain", logprobs=2)).result()
    first, second = (logprob for _, logprob in answer.logprobs[0].top)
    return first - second


def markdown(results: Comparison) -> str:
    """Return a table with a line per method, without figures for those that failed."""
    return markdown_table([HEADERS, *(_line(results, name) for name in results.weights)])


def markdown_table(lines: Sequence[tuple[str, ...]]) -> str:
    """Return the cells of `lines` as a table in Markdown; the first line is its header."""
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    ruled = [lines[0], tuple("-" * width for width in widths), *lines[1:]]
    rendered = (" | ".join(map(str.ljust, line, widths)) for line in ruled)
    return "\n".join(f"| {line} |" for line in rendered)


def _line(results: Comparison, name: str) -> tuple[str, ...]:
    runs = [row.run for row in results.of(name)]
    if not runs:
        return (name, results.weights[name], *[""] * (len(HEADERS) - 2))
    speeds = [run.speed for run in runs]
    low, _, high = statistics.quantiles(speeds, n=4, method="inclusive") if len(speeds) > 1 else [speeds[0]] * 3
    same, every = results.identical(name)
    schedules = sorted({run.figures.get("schedule", name) for run in runs})
    is_base = name == PLAIN
    return (
        f"{name} ({', '.join(schedules)})" if name == "card" else name,
        results.weights[name],
        f"{statistics.median(speeds):.1f} ({low:.1f} to {high:.1f})",
        "1" if is_base else times_base(results, name, PLAIN),
        _mean(runs, "accepted_length", "{:.2f}"),
        _mean(runs, "acceptance", "{:.2f}"),
        _mean(runs, "hit_rate", "{:.2f}"),
        f"{_mean(runs, 'target_busy', '{:.0%}')} / {_mean(runs, 'draft_busy', '{:.0%}')}".strip(" /"),
        f"{statistics.median(run.first for run in runs):.2f} s",
        f"{max(run.peak for run in runs) / _GIB:.1f} GiB",
        "" if is_base or (name in PEERS and not results.greedy) else f"{same} of {every}",
    )


def _mean(runs: Sequence[Run], figure: str, form: str) -> str:
    values = [run.figures[figure] for run in runs if run.figures.get(figure) is not None]
    return form.format(statistics.mean(values)) if values else ""


def _bounds(results: Comparison, name: str, base: str = PLAIN) -> str:
    times = results.speedup(name, base)
    few = len(results.speedups(name, base)) < MIN_PROMPTS
    return "" if few or times is None else f" ({times.low:.2f} to {times.high:.2f})"


def times_base(results: Comparison, name: str, base: str) -> str:
    """Return how many times as fast as `base` a method is, with bounds if there are enough prompts."""
    times = results.speedup(name, base)
    return "" if times is None else f"{times.value:.2f}{_bounds(results, name, base)}"


def remarks(results: Comparison) -> list[str]:
    """Return the notes below the table: those of `conditions`, and missing bounds."""
    few = 0 < len(results.speedups(PLAIN)) < MIN_PROMPTS
    return [*conditions(results), *([f"Bounds are given from {MIN_PROMPTS} prompts on."] if few else [])]


def conditions(results: Comparison) -> list[str]:
    """Return notes on failed methods, differing answers and unequal conditions."""
    notes = [f"{name} was left out: {why}" for name, why in results.failed.items()]
    for name in results.weights:
        if differences := [d for d in results.differences if d.method == name]:
            notes += _remark(results, name, differences)
        notes += _beside_own_plain(results, name)
    if any(name in PEERS for name in results.weights):
        notes.append(
            "This engine's methods share what its controller learns, and each remembers earlier prompts and answers, "
            "as it does for users; others' loops begin anew with each prompt, except that llama-server's n-grams "
            "remember earlier prompts and answers, too. Peak memory is that of a method's "
            "process: this engine's methods have one together, with all of their models, and what a draft in a process "
            "of its own holds is not in it."
        )
    return notes


def _beside_own_plain(results: Comparison, name: str) -> list[str]:
    base = PEERS[name].base if name in PEERS else ""
    if not base or results.speedup(name, base) is None:
        return []
    same, every = results.identical(name, base)
    equal = f", {same} of {every} answers are equal" if results.greedy else ""
    return [f"{name} beside its own plain decoding: {times_base(results, name, base)} times {base}{equal}."]


def _remark(results: Comparison, name: str, differences: Sequence[Difference]) -> list[str]:
    if name in PEERS and not results.greedy:  # peers sample with other noise
        return []
    first, gaps = differences[0], [d.gap for d in differences if d.gap is not None]
    alike = results.weights[name].split(",")[0] == results.weights[PLAIN].split(",")[0]
    kind = "is not lossless here" if alike else "runs on other weights"
    place = f"prompt {first.group + 1}, token {first.position}: {first.own!r} in the place of {first.plain!r}"
    sure = "" if first.gap is None else f", where the target's two likeliest tokens are {first.gap:.2g} nats apart"
    spread = f" (all: median {statistics.median(gaps):.2g}, at most {max(gaps):.2g})" if gaps else ""
    count = f"{len(differences)} of {results.identical(name)[1]} answers differ"
    return [f"{name} {kind}: {count}. The first difference: {place}{sure}{spread}."]
