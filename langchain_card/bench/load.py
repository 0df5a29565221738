"""Methods at a load: so many requests at once, the next prompt sent when an answer ends."""

from __future__ import annotations

import itertools
import math
import random
import statistics
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from typing import Any, Protocol

from langchain_card.bench.bounds import Measured
from langchain_card.bench.method import Served
from langchain_card.bench.method_table import PLAIN
from langchain_card.errors import CARDError

ANSWERS = 5
"""Answers to each load, at least, as a multiple of the requests at once."""

SHORTEST = 0.5
"""Tokens of the shortest answer to a load, as a share of the longest one's."""

WARM_UP_TOKENS = 96
"""Tokens of the answers before the measurement, which compile kernels and let `auto` measure its steps."""


class Server(Protocol):
    """A method that answers several requests at once.

    Attributes:
        name: as users write it.
        weights: number format of the weights, in words.
    """

    name: str
    weights: str

    def serve(
        self, prompts: Sequence[Sequence[int]], max_tokens: Sequence[int], requests: int, tenant: str
    ) -> list[Served]:
        """Answer prompts with at most so many tokens each, so many requests at once, the next one when an answer ends.

        Texts of another `tenant` are not reused. A prompt that came before is another tenant's.
        """


@dataclass(frozen=True)
class Cell:
    """What a method did at a load.

    Attributes:
        text: name of the set of prompts.
        requests: at once.
        method: its name.
        turns: [turns, prompts] its answers.
    """

    text: str
    requests: int
    method: str
    turns: tuple[tuple[Served, ...], ...]

    @property
    def answers(self) -> list[Served]:
        """The answers of all turns, one for each prompt."""
        return [*itertools.chain(*self.turns)]

    @property
    def speed(self) -> float:
        """Tokens per second of all requests together, while so many are in work.

        The end of a turn, where fewer and fewer answers are left, is not counted.
        """
        tokens, seconds = 0.0, 0.0
        for answers in self.turns:
            full_until = sorted(answer.ended for answer in answers)[-self.requests]
            seconds += full_until - min(answer.sent for answer in answers)
            tokens += sum(answer.tokens_until(full_until) for answer in answers)
        return tokens / seconds

    @property
    def slowest(self) -> float:
        """Tokens per second of the slowest answer."""
        return min(answer.speed for answer in self.answers)


@dataclass
class LoadResults:
    """The cells of a measurement, complete or not.

    Attributes:
        weights: number formats by method, in words.
        cells: in the order in which they were measured.
        failed: errors of the methods that were left out, by name.
    """

    weights: dict[str, str]
    cells: list[Cell] = field(default_factory=list)
    failed: dict[str, str] = field(default_factory=dict)

    def places(self) -> list[tuple[str, int]]:
        """Return the loads that were measured: set and number of requests."""
        return [*dict.fromkeys((cell.text, cell.requests) for cell in self.cells)]

    def to_json(self) -> dict[str, Any]:
        """Return all results in the form of `bench --json`."""
        return {"weights": self.weights, "failed": self.failed, "cells": [asdict(cell) for cell in self.cells]}

    def cell(self, text: str, requests: int, method: str) -> Cell | None:
        """Return a cell; None if it was not measured."""
        of_load = (cell for cell in self.cells if (cell.text, cell.requests) == (text, requests))
        return next((cell for cell in of_load if cell.method == method), None)


def keep_busy(answer: Callable[..., Served], requests: int, *arguments: Iterable[object]) -> list[Served]:
    """Call `answer` with each of the arguments, so many calls at once, from as many threads."""
    with ThreadPoolExecutor(requests) as threads:
        return [*threads.map(answer, *arguments)]


def laps(prompts: Iterable[Sequence[int]]) -> Iterator[int]:
    """Yield for each prompt how often it came before."""
    seen = Counter[tuple[int, ...]]()
    for prompt in map(tuple, prompts):
        yield seen[prompt]
        seen[prompt] += 1


def lengths(count: int, longest: int) -> list[int]:
    """Return limits of answers, spread evenly from `SHORTEST` to 1 times the longest; neighbours differ much.

    With one limit, plain decoding writes all answers in lockstep, and reads the next prompts in one pass.
    """
    golden = (math.sqrt(5) - 1) / 2
    return [math.ceil(longest * (1 - (1 - SHORTEST) * (place * golden % 1))) for place in range(count)]


def measure_load(
    results: LoadResults,
    methods: Sequence[Server],
    prompts: Mapping[str, Sequence[Sequence[int]]],
    requests: Sequence[int],
    max_tokens: int,
    report: Callable[[LoadResults], None],
) -> None:
    """Let each method answer each set at each load, in two turns of half the prompts; the second in reverse order.

    A set with too few prompts for a load is answered again, for another tenant. A method that fails is left out of the
    remaining turns.

    Args:
        results: receives the cells.
        methods: plain decoding among them.
        prompts: token ids by set.
        requests: numbers of requests at once.
        max_tokens: of the longest answers (`lengths`).
        report: called after each cell.

    Raises:
        CARDError: plain decoding failed, so that there is no baseline.
    """
    first = next(iter(prompts.values()))
    for method in methods:
        for count in requests:
            _serve(results, method, first[:count], [WARM_UP_TOKENS] * len(first), count, "warm-up")
    for (text, ids), count in itertools.product(prompts.items(), requests):
        queue = [*ids] * -(-ANSWERS * count // len(ids))
        limits, half = lengths(len(queue), max_tokens), len(queue) // 2
        order = [*methods]
        random.Random(f"{text} {count}").shuffle(order)  # noqa: S311
        first_turn = {
            method.name: _serve(results, method, queue[:half], limits[:half], count, text) for method in order
        }
        for method in reversed(order):
            second_turn = _serve(results, method, queue[half:], limits[half:], count, f"{text}, second turn")
            if method.name not in results.failed:
                results.cells.append(Cell(text, count, method.name, (first_turn[method.name], second_turn)))
                report(results)


def _serve(
    results: LoadResults,
    method: Server,
    ids: Sequence[Sequence[int]],
    limits: Sequence[int],
    requests: int,
    tenant: str,
) -> tuple[Served, ...]:
    if method.name in results.failed:
        return ()
    try:
        return (*method.serve(ids, limits, requests, f"{method.name} {requests} {tenant}"),)
    except CARDError as error:
        if method.name == PLAIN:
            raise
        results.failed[method.name] = str(error)
        return ()


def times_plain(results: LoadResults, text: str, requests: int, method: str) -> Measured | None:
    """Return how many times as fast as plain decoding the answers of a method were: the median, with its interval."""
    plain, own = (results.cell(text, requests, name) for name in (PLAIN, method))
    if plain is None or own is None:
        return None
    ratios = [a.speed / b.speed for a, b in zip(own.answers, plain.answers, strict=True)]
    return Measured.of(ratios, statistics.median)


def table(results: LoadResults) -> Iterator[tuple[str, ...]]:
    """Yield the header, and a line for each load."""
    others = [name for name in results.weights if name != PLAIN]
    columns = [(f"{name}, tokens/s", "times plain", "its answers (95 %)", "slowest", "equal") for name in others]
    yield ("text", "at once", "plain, tokens/s", "slowest", *(cell for column in columns for cell in column))
    for text, requests in results.places():
        plain = results.cell(text, requests, PLAIN)
        line = [text, str(requests), *_speeds(plain)]
        for name in others:
            own, times = results.cell(text, requests, name), times_plain(results, text, requests, name)
            if plain is None or own is None or times is None:
                line += [""] * len(columns[0])
                continue
            equal = sum(a.token_ids == b.token_ids for a, b in zip(own.answers, plain.answers, strict=True))
            speed, slowest = _speeds(own)
            bounds = f"{times.value:.2f} ({times.low:.2f} to {times.high:.2f})"
            line += [speed, f"{own.speed / plain.speed:.2f}", bounds, slowest, f"{equal} of {len(own.answers)}"]
        yield tuple(line)


def _speeds(cell: Cell | None) -> tuple[str, str]:
    return ("", "") if cell is None else (f"{cell.speed:.1f}", f"{cell.slowest:.1f}")
