"""Methods side by side: the same prompts, in turns, in one run; what came of it, also where the run was cut short."""

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
from langchain_card.bench.method_table import PLAIN
from langchain_card.core.request import SamplingParams
from langchain_card.engine.engine import Engine
from langchain_card.errors import CARDError, InvalidInputError

WARM_UPS = 2
"""Rounds that are not counted, over the longest and the shortest prompts: kernels compile, pages are touched, `auto`
measures both of its schedules."""


@dataclass(frozen=True)
class Row:
    """One run.

    Attributes:
        method: its name.
        group: number of the prompts that it was given.
        repeat: number of the pass over all prompts.
        run: what came of it.
    """

    method: str
    group: int
    repeat: int
    run: Run


@dataclass(frozen=True)
class Difference:
    """Where an answer parts from plain's.

    Attributes:
        method: whose answer.
        group, repeat, answer: which one: the group's number, the pass, the answer in the group.
        position: tokens that are the same.
        own, plain: the text of the next token, or "" where the answer ends.
        gap: difference of the log-probabilities of the target's two likeliest tokens there; None at a temperature,
            before it was asked (`explain`), and where it cannot be asked.
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
class Race:
    """What was measured so far.

    Attributes:
        weights: of each method, in words.
        rows: all runs.
        failed: why a method was left out, by its name.
        differences: answers that are not plain's.
        greedy: whether the likeliest token was taken.
    """

    weights: dict[str, str]
    rows: list[Row] = field(default_factory=list)
    failed: dict[str, str] = field(default_factory=dict)
    differences: list[Difference] = field(default_factory=list)
    greedy: bool = True

    def of(self, method: str) -> list[Row]:
        """The runs of one method."""
        return [row for row in self.rows if row.method == method]

    def pairs(self, method: str) -> Iterator[tuple[Row, Row]]:
        """Its runs, each with plain's on the same prompts."""
        plain = {(row.group, row.repeat): row for row in self.of(PLAIN)}
        for row in self.of(method):
            if (base := plain.get((row.group, row.repeat))) is not None:
                yield row, base

    def speedups(self, method: str) -> list[float]:
        """For each group of prompts times plain decoding: the median over repeats."""
        ratios: dict[int, list[float]] = {}
        for row, base in self.pairs(method):
            if row.run.speed and base.run.speed:
                ratios.setdefault(row.group, []).append(row.run.speed / base.run.speed)
        return [statistics.median(each) for each in ratios.values()]

    def speedup(self, method: str) -> Measured | None:
        """Their median, with its bounds; None where nothing can be compared."""
        found = self.speedups(method)
        return Measured.of(found, statistics.median) if found else None

    def identical(self, method: str) -> tuple[int, int]:
        """Answers that equal plain's, and all."""
        same = [
            own == reference
            for row, base in self.pairs(method)
            for own, reference in zip(row.run.token_ids, base.run.token_ids, strict=True)
        ]
        return sum(same), len(same)

    def to_json(self) -> dict[str, Any]:
        """Everything."""
        return {
            "weights": self.weights,
            "failed": self.failed,
            "differences": [asdict(each) for each in self.differences],
            "rows": [asdict(row) for row in self.rows],
        }


def race(
    found: Race,
    methods: Sequence[Method],
    prompts: Sequence[Sequence[int]],
    batch: int,
    repeats: int,
    decode: Callable[[Sequence[int]], str],
    report: Callable[[Race, int, int], None],
) -> None:
    """Has each method answer all prompts; they take turns, in an order that changes.

    A method that fails is left out from there on, and the others go on.

    Args:
        found: what is measured is added here.
        methods: plain decoding among them.
        prompts: token ids of each.
        batch: prompts at once.
        repeats: passes over all of them.
        decode: token ids to text, for where answers differ.
        report: told what is known, the number of the group and the number of groups, whenever one is done.

    Raises:
        CARDError: plain decoding failed: there is nothing to compare with.
    """
    groups = [prompts[i : i + batch] for i in range(0, len(prompts), batch)]
    cold, sizes = Race(found.weights, failed=found.failed), [sum(map(len, group)) for group in groups]
    for number, size in enumerate((max(sizes), min(sizes)), 1):
        _round(cold, methods, groups[sizes.index(size)], 0, -number)
    for number, (repeat, group) in enumerate(itertools.product(range(repeats), range(len(groups))), 1):
        _round(found, methods, groups[group], group, repeat)
        found.differences += _differences(found, group, repeat, decode)
        report(found, number, repeats * len(groups))


def _round(found: Race, methods: Sequence[Method], prompts: Sequence[Sequence[int]], group: int, repeat: int) -> None:
    order = [method for method in methods if method.name not in found.failed]
    random.Random(f"{group} {repeat}").shuffle(order)  # noqa: S311
    for method in order:
        try:
            run = method.run(prompts, repeat)
        except CARDError as error:  # noqa: PERF203
            if method.name == PLAIN:
                raise
            found.failed[method.name] = str(error)
        else:
            found.rows.append(Row(method.name, group, repeat, run))


def _differences(found: Race, group: int, repeat: int, decode: Callable[[Sequence[int]], str]) -> Iterator[Difference]:
    """Where answers of one round part from plain's; nobody was asked yet how sure the target is there."""
    for method in found.weights:
        for row, base in found.pairs(method):
            if (row.group, row.repeat) != (group, repeat):
                continue
            for i, (own, plain) in enumerate(zip(row.run.token_ids, base.run.token_ids, strict=True)):
                if own != plain:
                    pairs = zip(own, plain)  # noqa: B905 - one may be the beginning of the other
                    place = next((n for n, (a, b) in enumerate(pairs) if a != b), min(len(own), len(plain)))
                    texts = [decode(ids[place : place + 1]) for ids in (own, plain)]
                    yield Difference(method, group, repeat, i, place, texts[0], texts[1], None)


def explain(
    found: Race, engine: Engine, prompts: Sequence[Sequence[int]], batch: int, report: Callable[[str], None]
) -> None:
    """Asks the target how sure it was where answers part from plain's.

    Args:
        found: of the race; its `differences` get their gaps.
        engine: of the target.
        prompts: as the race had them.
        batch: as the race had it.
        report: told how far it is.
    """
    answers = {(row.group, row.repeat): row.run.token_ids for row in found.of(PLAIN)}
    for number, each in enumerate(found.differences):
        if number % 10 == 0:
            report(f"asking the target where answers differ: {number} of {len(found.differences)}")
        plain = answers[each.group, each.repeat][each.answer]
        text = [*prompts[each.group * batch + each.answer], *plain[: each.position]]
        with contextlib.suppress(InvalidInputError):  # a model without a tokenizer for all that it says
            found.differences[number] = replace(each, gap=_gap(engine, text))


def _gap(engine: Engine, text: Sequence[int]) -> float:
    done = engine.submit(text, SamplingParams(max_tokens=1, schedule="plain", logprobs=2)).result()
    first, second = (logprob for _, logprob in done.logprobs[0].top)
    return first - second
