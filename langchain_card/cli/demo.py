"""`langchain-card chat --demo`: stream one answer, then time and compare it under every schedule."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from statistics import median
from typing import TYPE_CHECKING, Any

from rich import box
from rich.console import Console, ConsoleOptions, RenderResult
from rich.live import Live
from rich.table import Table
from rich.text import Text

from langchain_card.cli.chat import describe, load
from langchain_card.cli.render import REFRESH, Screen, progress, share, status
from langchain_card.config import EngineConfig, Schedule, lossy_note
from langchain_card.core.request import RequestStats, SamplingParams
from langchain_card.errors import InvalidInputError
from langchain_card.models.download import BUILTINS
from langchain_card.models.store import ModelStore

if TYPE_CHECKING:
    from langchain_card.engine.engine import Engine
    from langchain_card.engine.generation import Completion, Generation

PROMPT = """\
Add type hints and a docstring to this function, and let it skip empty lines. Answer with the code only.

def read_scores(path):
    scores = {}
    with open(path) as file:
        for line in file:
            name, score = line.strip().split(",")
            if name not in scores:
                scores[name] = []
            scores[name].append(float(score))
    return scores
"""
ORDER: tuple[Schedule, ...] = ("plain", "sequential", "parallel", "auto")
WARM_UP = 16
"""Tokens under each schedule before the timed runs: step costs are learnt and memory pages are touched."""
IDENTICAL = "identical: yes"
_SHARED = "Both are slower at once than alone, so that parallel pays less than on two devices."
_COLUMNS: tuple[tuple[str, Callable[[Sequence[RequestStats]], str]], ...] = (
    ("accepted\nlength", lambda runs: f"{_median(runs, lambda s: s.mean_accepted_length):.2f}"),
    ("hit\nrate", lambda runs: f"{_median(runs, lambda s: s.hit_rate):.0%}"),
    ("draft\nbusy", lambda runs: share(_median(runs, lambda s: s.draft_busy / (s.decode_seconds or 1)), 1)),
    ("target\nbusy", lambda runs: share(_median(runs, lambda s: s.target_busy / (s.decode_seconds or 1)), 1)),
    ("first\ntoken", lambda runs: f"{_median(runs, lambda s: s.first_token - s.submitted):.2f} s"),
)


def run(screen: Screen, config: EngineConfig, params: SamplingParams, opening: list[dict[str, str]]) -> int:
    """Show the demo.

    Args:
        screen: the output.
        config: the models.
        params: sampling parameters; the comparison replaces the schedule.
        opening: messages before the question.

    Returns:
        0, or 1 if the answers differ although the rule is exact.
    """
    if config.draft_model is None:
        raise InvalidInputError("draft_model", "none", "the demo compares ways to draft", 'use a model, or "ngram"')
    screen.print(_plan(config) + "\n")
    from langchain_card.text.prompt import encode

    with load(screen, config) as engine:
        question = {"role": "user", "content": PROMPT}
        prompt_ids = encode([*opening, question], engine.tokenizer, config.model)
        screen.print(f"{describe(engine)}. The question:\n")
        screen.print(PROMPT, "dim")
        streamed = _show(screen, engine, prompt_ids, params)
        runs = _compare(screen, engine, prompt_ids, params)
        answers = [(name, run.token_ids) for name, schedule_runs in runs.items() for run in schedule_runs]
        result = verdict(engine.tokenizer, [*answers, ("streamed", streamed.token_ids)])
        screen.print(result)
        if len(set(engine.devices.values())) < len(engine.devices):
            screen.note(f"\nDraft and target share one device here ({engine.devices['target']}). {_SHARED}")
    return 0 if result == IDENTICAL or config.lossy else 1


def _plan(config: EngineConfig) -> str:
    stored = {model.name: model.state for model in ModelStore().list()}
    absent = [name for name in (config.model, config.draft_model) if name and stored.get(name) == "absent"]
    size = sum(BUILTINS[name].size for name in absent) / 1e9
    first = f"First, {size:.1f} GB are downloaded: several minutes, once. " if absent else ""
    promise = lossy_note(config.acceptance) if config.lossy else "every word is the target's own"
    return (
        f"The draft guesses ahead, the target checks its guesses, and {promise}. "
        f"{first}You will see one answer being written; then the same question is answered with every schedule, "
        "twice each, and compared: about five minutes on two CPU cores."
    )


def _show(screen: Screen, engine: Engine, prompt_ids: Sequence[int], params: SamplingParams) -> Completion:
    """Stream the answer with each token coloured by its source."""
    screen.legend()
    generation = engine.submit(prompt_ids, params)
    screen.stream(generation, tint=True)
    completion = generation.result()
    screen.note(status(completion.stats))
    return completion


def _compare(
    screen: Screen, engine: Engine, prompt_ids: Sequence[int], params: SamplingParams
) -> dict[Schedule, list[Completion]]:
    """Answer under every schedule, in order and then in reverse order, and draw the table.

    Each run has a tenant of its own, so that it neither drafts from earlier answers nor reuses the prompt's KV.
    """
    board = Board()
    live = Live(board, console=screen.console, refresh_per_second=REFRESH) if screen.is_terminal else None
    with live or contextlib.nullcontext():
        for schedule in ORDER[:-1]:  # auto runs as one of the others
            warm = replace(params, schedule=schedule, max_tokens=min(WARM_UP, params.max_tokens), tenant="warm-up")
            board.follow("warming up", engine.submit(prompt_ids, warm)).result()
        turns = [*ORDER, *reversed(ORDER)]
        for number, schedule in enumerate(turns, start=1):
            label = f"run {number} of {len(turns)}: {schedule}"
            generation = engine.submit(prompt_ids, replace(params, schedule=schedule, tenant=label))
            completion = board.follow(label, generation).result()
            board.runs[schedule].append(completion)
            if live is None:
                screen.note(f"{label} · {progress(completion.stats)}")
        board.generation = None
    if live is None:
        screen.print("")
        screen.console.print(board)
    return board.runs


class Board:
    """The table of finished runs and the run in progress, for rich.

    Attributes:
        runs: finished answers by schedule.
        generation: the run in progress, or None.
    """

    def __init__(self) -> None:
        self.runs: dict[Schedule, list[Completion]] = {schedule: [] for schedule in ORDER}
        self.generation: Generation | None = None
        self._label = ""

    def follow(self, label: str, generation: Generation) -> Generation:
        """Show a run below the table, and return it."""
        self._label, self.generation = label, generation
        return generation

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield self._table(console.is_terminal)
        if self.generation is not None:
            yield Text(f"{self._label} · {progress(self.generation.stats, self.generation.reading)}", "dim")

    def _table(self, is_terminal: bool) -> Table:
        lines, gap = (box.SIMPLE_HEAD, 1) if is_terminal else (None, 2)
        table = Table(box=lines, padding=(0, 0, 0, gap), header_style="dim", pad_edge=False)
        table.add_column("schedule")
        for header in ("tokens/s", "speedup", *(header for header, _ in _COLUMNS)):
            table.add_column(header, justify="right", vertical="bottom")
        rates = {schedule: _rate(completions) for schedule, completions in self.runs.items()}
        for schedule, completions in self.runs.items():
            if not completions:
                table.add_row(schedule, *["·"] * (2 + len(_COLUMNS)), style="dim")
                continue
            stats = [completion.stats for completion in completions]
            name = f"auto ({stats[-1].schedule})" if schedule == "auto" else schedule
            rate, plain = rates[schedule], rates["plain"]
            speedup = f"{rate / plain:.2f}x" if plain else "-"
            style = "bold" if rate == max(rates.values()) else ""
            table.add_row(name, f"{rate:.1f}", speedup, *(show(stats) for _, show in _COLUMNS), style=style)
        return table


def _rate(completions: Sequence[Completion]) -> float:
    return median(each.stats.tokens_per_second for each in completions) if completions else 0.0


def _median(runs: Sequence[RequestStats], figure: Callable[[RequestStats], float]) -> float:
    return median(map(figure, runs))


def verdict(tokenizer: Any, answers: Sequence[tuple[str, tuple[int, ...]]]) -> str:
    """Return `IDENTICAL`, or a text that shows where an answer first differs from the first answer.

    Args:
        tokenizer: tokenizer with `decode(ids)`.
        answers: names and token ids.
    """
    first, *others = answers
    other = next((answer for answer in others if answer[1] != first[1]), None)
    if other is None:
        return IDENTICAL
    pairs = zip(first[1], other[1])  # noqa: B905 - one may be a prefix of the other
    position = next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(first[1]), len(other[1])))
    around = slice(max(0, position - 12), position + 8)
    texts = [f"  {name:10}  {tokenizer.decode(ids[around])!r}" for name, ids in (first, other)]
    return "\n".join(["identical: no", f"{other[0]} differs from {first[0]} at token {position}:", *texts])
