"""The conversion of a trace into a path: the kind of each token, and how deep a sibling's subtree survives."""

from __future__ import annotations

import random
from collections.abc import Sequence

from benchmarks.contest.paths import DEEP, MISS, TOP, Kind, Token
from benchmarks.contest.traces import Trace

MAX_REACH = 64
"""Layers that are simulated below a sibling."""


def trace_path(trace: Trace, pool: Sequence[Trace], width: int, branch: int) -> list[Token]:
    """Return the trace as a path, one token per position.

    Args:
        trace: to convert.
        pool: traces of the same kind of text, from which candidates off the text are drawn.
        width: nodes that a layer of the draft keeps.
        branch: rows of a tree window per layer.
    """
    rng = random.Random(0)
    rows = [logs for other in pool for logs in other.draft_logs]
    path = []
    for position in range(len(trace.token_ids)):
        rank = trace.rank(position)
        if rank == 0:
            path.append(TOP)
        elif rank is None or rank >= width:
            path.append(MISS)
        else:
            kind = Kind.NEAR if rank < branch else Kind.FAR
            path.append(Token(kind, beam_reach(trace.draft_logs[position], rank, rows, width, rng)))
    return path


def beam_reach(
    logs: Sequence[float], rank: int, rows: Sequence[Sequence[float]], width: int, rng: random.Random
) -> int:
    """Return the number of layers below a sibling in which a beam of `width` nodes still has a descendant of it.

    The beam begins with siblings whose log-probabilities are `logs`. The children of each node are drawn from `rows`.
    """
    beam = [(log, i == rank) for i, log in enumerate(logs)][:width]  # (score, descends from the sibling)
    for reach in range(MAX_REACH):
        grown = [(score + log, descends) for score, descends in beam for log in rng.choice(rows)]
        grown.sort(reverse=True)
        beam = grown[:width]
        if not any(descends for _, descends in beam):
            return reach
        if all(descends for _, descends in beam):
            break
    return DEEP
