"""Recorded traces of a pair, and the script that replays them.

A trace holds the draft's likeliest tokens, with log-probabilities, at every position of the target's greedy text. On
the text, the replayed draft proposes what was recorded. Off the text, it proposes what was recorded elsewhere, at a
position chosen by a hash of the prefix: such nodes are never accepted, but compete for draft steps and rows.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TypeAlias

from langchain_card.drafters.tree import MIN_CHANCE, NUM_CHILDREN
from langchain_card.errors import InvalidInputError

RECORD = "record one with `python -m benchmarks.contest.record FILE --prompts FILE`"

Candidates: TypeAlias = tuple[tuple[int, float], ...]

OFF_TEXT = 0
"""The target's token off its text. It is never committed."""


@dataclass(frozen=True)
class Trace:
    """The trace of one answer.

    Attributes:
        prompt_ids: [prompt].
        token_ids: [tokens] the target's greedy text.
        draft_ids: [tokens][k] the draft's likeliest tokens at each position, best first.
        draft_logs: [tokens][k] their log-probabilities.
    """

    prompt_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    draft_ids: tuple[tuple[int, ...], ...]
    draft_logs: tuple[tuple[float, ...], ...]

    def rank(self, position: int) -> int | None:
        """Return the rank of the target's token among the recorded ones of the draft; None if it is not recorded."""
        ids = self.draft_ids[position]
        return ids.index(self.token_ids[position]) if self.token_ids[position] in ids else None


def save(traces: Sequence[Trace], path: Path) -> None:
    """Write traces as JSON, with log-probabilities of three decimals."""
    rows = [asdict(trace) for trace in traces]
    for row in rows:
        row["draft_logs"] = [[round(log, 3) for log in logs] for logs in row["draft_logs"]]
    path.write_text(json.dumps(rows, separators=(",", ":")))


def _check(trace: Trace) -> None:
    if not len(trace.token_ids) == len(trace.draft_ids) == len(trace.draft_logs):
        raise ValueError("a text needs a row of the draft's choices for each of its tokens")
    if any(not ids or len(ids) != len(logs) for ids, logs in zip(trace.draft_ids, trace.draft_logs, strict=True)):
        raise ValueError("the draft's choices need one chance each")


def load(path: Path) -> list[Trace]:
    """Read the traces of a file that `save` wrote.

    Raises:
        InvalidInputError: the file is not valid, or holds no text.
    """
    try:
        traces = [
            Trace(
                tuple(row["prompt_ids"]),
                tuple(row["token_ids"]),
                tuple(map(tuple, row["draft_ids"])),
                tuple(map(tuple, row["draft_logs"])),
            )
            for row in json.loads(path.read_text())
        ]
        for trace in traces:
            _check(trace)
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise InvalidInputError("traces", str(path), f"cannot be read ({error!r})", RECORD) from error
    if not any(trace.token_ids for trace in traces):
        raise InvalidInputError("traces", str(path), "holds no text", RECORD)
    return traces


def shipped(folder: Path | None = None) -> dict[str, list[Trace]]:
    """Return traces by kind of text: those of the built-in pair, or those of a folder.

    Raises:
        InvalidInputError: the folder has no traces.
    """
    folder = folder or Path(__file__).parent / "data"
    files = sorted(folder.glob("*.json"))
    if not files:
        raise InvalidInputError("--traces", str(folder), "holds no .json file", RECORD)
    return {file.stem: load(file) for file in files}


class TraceScript:
    """A trace as a script for `ToyTarget` and `ToyDrafter` of tests/simulation.

    Args:
        trace: to replay.
        pool: traces of the same kind of text, for prefixes off the text.
    """

    def __init__(self, trace: Trace, pool: Sequence[Trace]) -> None:
        self._text = (*trace.prompt_ids, *trace.token_ids)
        self._num_prompt = len(trace.prompt_ids)
        self._recorded = _candidates(trace)
        self._elsewhere = [candidates for other in pool for candidates in _candidates(other)]

    def target_token(self, prefix: tuple[int, ...]) -> int:
        """Return the target's token after `prefix`."""
        length = len(prefix)
        return self._text[length] if length < len(self._text) and prefix == self._text[:length] else OFF_TEXT

    def candidates(self, prefix: tuple[int, ...], source: int = 1) -> Candidates:
        """Return the draft's candidates after `prefix`, likeliest first, with log-probabilities."""
        length = len(prefix)
        if length < len(self._text) and prefix == self._text[:length]:
            return self._recorded[length - self._num_prompt]
        return self._elsewhere[hash(prefix) % len(self._elsewhere)]


def _candidates(trace: Trace) -> list[Candidates]:
    """Return the candidates that the drafter proposes at each position."""
    least = math.log(MIN_CHANCE)
    return [
        tuple((token, log) for token, log in zip(ids[:NUM_CHILDREN], logs, strict=False) if log >= least)
        or ((ids[0], logs[0]),)
        for ids, logs in zip(trace.draft_ids, trace.draft_logs, strict=True)
    ]
