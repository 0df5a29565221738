"""The comparison of decoding methods on texts of given lengths, with answers of given lengths: texts, turns, table.

The texts are Python's own: the source of its library, and the pages of its `help`. Each text is used once, so that no
method profits from an earlier one.
"""

from __future__ import annotations

import itertools
import statistics
import sysconfig
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

from langchain_card.bench.compare import WARM_UPS, Comparison, differences, turn
from langchain_card.bench.method import Method, Run
from langchain_card.bench.prompts import user_prompt
from langchain_card.engine.engine import Engine
from langchain_card.errors import InvalidInputError

_REQUEST = "\n\nContinue this text where it ends."
_GIB = 1 << 30


def _code() -> Iterator[str]:
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        yield path.read_text(encoding="utf-8", errors="replace")


SOURCES: dict[str, Callable[[], Iterable[str]]] = {"code": _code, "prose": topics.values}
"""Texts of each kind."""


@dataclass(frozen=True)
class LongText:
    """A text that each method reads once, and the length of the answer.

    Attributes:
        kind: of the text, a key of `SOURCES`.
        context: tokens of the prompt, about: the end of the text is cut in the middle of a token.
        answer: tokens of the answer.
        repeat: index of the pass.
    """

    kind: str
    context: int
    answer: int
    repeat: int


def long_texts(contexts: Iterable[int], answers: Iterable[int], repeats: int) -> list[LongText]:
    """Return the texts to read, the shortest first: their peaks of memory are then those of texts of their length."""
    order = itertools.product(sorted({*contexts}), sorted({*answers}), range(repeats), SOURCES)
    return [LongText(kind, context, answer, repeat) for context, answer, repeat, kind in order]


def prompts_of(texts: Iterable[LongText], engine: Engine) -> list[tuple[int, ...]]:
    """Return the prompt of each text; no part of a source is in two of them.

    Raises:
        InvalidInputError: the sources are too short.
    """
    supplies = {kind: _TokenSupply(kind, source(), engine.tokenizer) for kind, source in SOURCES.items()}
    frame = len(user_prompt(engine, _REQUEST))
    return [user_prompt(engine, supplies[text.kind].take(text.context - frame) + _REQUEST) for text in texts]


class _TokenSupply:
    """The texts of one kind, one after another, cut to lengths."""

    def __init__(self, kind: str, texts: Iterable[str], tokenizer: Any) -> None:
        self._kind, self._texts, self._tokenizer = kind, iter(texts), tokenizer
        self._ids: list[int] = []

    def take(self, count: int) -> str:
        """Return the text of the next `count` tokens; one token if `count` is lower."""
        count = max(1, count)
        while len(self._ids) < count:
            if (text := next(self._texts, None)) is None:
                limit = f"needs more {self._kind} than there is"
                raise InvalidInputError("--context", f"{count:,} tokens", limit, "a smaller --repeat, or fewer lengths")
            self._ids += self._tokenizer.encode(text, add_special_tokens=False)
        taken, self._ids = self._ids[:count], self._ids[count:]
        return str(self._tokenizer.decode(taken))


def compare_long_texts(
    results: Comparison,
    methods: Sequence[Method],
    texts: Sequence[LongText],
    engine: Engine,
    report: Callable[[Comparison, int, int], None],
) -> None:
    """Let each method read all texts, in turns whose order changes, after warm-ups on others of the shortest length.

    Args:
        results: receives the runs. A row's `group` is the index of its text.
        methods: plain decoding among them.
        texts: of `long_texts`.
        engine: encodes the texts.
        report: called after each turn with the results, the number of turns done, and that of all turns.

    Raises:
        CARDError: plain decoding failed, so that there is no baseline.
    """
    cold = Comparison(results.weights, failed=results.failed)
    prompts = prompts_of([*[texts[0]] * WARM_UPS, *texts], engine)
    for prompt in prompts[:WARM_UPS]:  # with the longest answer: `auto` measures both of its schedules
        turn(cold, methods, [prompt], texts[-1].answer, 0, -1)
    for number, (text, prompt) in enumerate(zip(texts, prompts[WARM_UPS:], strict=True)):
        turn(results, methods, [prompt], text.answer, number, text.repeat)
        results.differences += differences(results, number, text.repeat, engine.tokenizer.decode)
        report(results, number + 1, len(texts))


def runs_of(
    results: Comparison, texts: Sequence[LongText], method: str, context: int, answer: int
) -> dict[str, list[Run]]:
    """Return the runs of a method over texts of one length with answers of one length, by kind of text."""
    runs: dict[str, list[Run]] = {}
    for row in results.of(method):
        text = texts[row.group]
        if (text.context, text.answer) == (context, answer):
            runs.setdefault(text.kind, []).append(row.run)
    return runs


def table(results: Comparison, texts: Sequence[LongText]) -> Iterator[tuple[str, ...]]:
    """Yield the header, and for each length of text and answer a line per method. Figures are medians."""
    columns = [f"{name}, {kind}" for name in ("tokens/s", "whole time") for kind in SOURCES]
    yield ("read", "written", "method", "first token", *columns, "longest gap", "peak memory")
    for context, answer in dict.fromkeys((text.context, text.answer) for text in texts):
        for method in results.weights:
            by_kind = runs_of(results, texts, method, context, answer)
            if every := list(itertools.chain(*by_kind.values())):
                yield (
                    f"{context:,}",
                    f"{answer:,}",
                    method,
                    f"{statistics.median(run.first for run in every):.2f} s",
                    *(_median((run.speed for run in by_kind.get(kind, ())), "{:.1f}") for kind in SOURCES),
                    *(_median((run.whole for run in by_kind.get(kind, ())), "{:.1f} s") for kind in SOURCES),
                    f"{statistics.median(run.gap for run in every):.2f} s",
                    f"{max(run.peak for run in every) / _GIB:.1f} GiB",
                )


def _median(values: Iterable[float], form: str) -> str:
    return form.format(statistics.median(found)) if (found := [*values]) else ""
