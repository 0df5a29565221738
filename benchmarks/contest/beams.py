"""A trace as a path: what each token was to the draft, and how long a sibling's subtree would have lived."""

from __future__ import annotations

import random
from collections.abc import Sequence

from benchmarks.contest.paths import DEEP, MISS, TOP, Kind, Token
from benchmarks.contest.traces import Trace

MAX_REACH = 64


def trace_path(trace: Trace, pool: Sequence[Trace], width: int, branch: int) -> list[Token]:
    """One token per position.

    Args:
        trace: to look at.
        pool: traces of the same kind; what a draft says off the text is what it says at a random place of them.
        width: nodes that a draft's layer keeps.
        branch: rows that a tree window has for each layer.
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
    """Layers below a sibling in which a beam of `width` nodes still holds one of its descendants.

    The beam begins with the children of one place, whose log-probabilities are `logs`; what hangs under each node is
    drawn from `rows`.
    """
    beam = [(log, i == rank) for i, log in enumerate(logs)][:width]
    for reach in range(MAX_REACH):
        grown = [(score + log, mine) for score, mine in beam for log in rng.choice(rows)]
        grown.sort(reverse=True)
        beam = grown[:width]
        if not any(mine for _, mine in beam):
            return reach
        if all(mine for _, mine in beam):
            break
    return DEEP
