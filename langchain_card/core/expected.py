"""The time per token that step times and hits alone let expect, whatever else a machine does.

A pass over a chain of candidates, each right as often as the draft's first guess is, yields the tokens of a geometric
series. (Leviathan et al., arXiv 2211.17192.)
"""

from __future__ import annotations

import math

from langchain_card.core.costs import CostModel
from langchain_card.core.policy import Load

MAX_HITS = 0.99
"""A draft's first guess is expected to be right at most so often."""


def seconds_by_model(load: Load, hits: float, costs: CostModel, max_lead: int) -> float:
    """Return the time per token of all answers, if each drafts a chain; 0 before steps were measured.

    Drafting takes time of its own under `sequential`, and overlaps the passes under `parallel`, where a miss wastes it.
    A draft whose reading does not pay drafts nothing: the target decodes alone.

    Args:
        load: the load that runs.
        hits: share of tokens that are the draft's first guess.
        costs: of the load, or of one like it.
        max_lead: longest chain.
    """
    (schedule, num_seqs, _), hits = load, min(hits, MAX_HITS)
    if not costs.comparable:
        return 0.0
    if not (step := costs.draft.at(num_seqs)):
        return costs.target.at(num_seqs) / num_seqs
    times = []
    for lead in range(1 if schedule == "parallel" else 0, max_lead + 1):
        tokens = tokens_of_chain(hits, lead)
        elapsed = costs.target.at(num_seqs * (lead + 1))
        if schedule == "parallel":
            times.append(max(elapsed, lead * step) / (1 + hits * (tokens - 1)))
        else:
            times.append((elapsed + lead * step) / tokens)
    return min(times) / num_seqs


def with_a_chain(num_seqs: int, hits: float, costs: CostModel, max_lead: int) -> float:
    """Return the time per token of one answer, as its share of all of them, if it drafts a chain under `sequential`.

    The chain adds its rows to a pass, and its draft steps before it. Either all requests share these steps, or this one
    has them alone. The arguments are those of `seconds_by_model`.
    """
    plain, hits, best = costs.target.at(num_seqs), min(hits, MAX_HITS), math.inf
    for sharing in {1, num_seqs}:
        step, last = costs.draft.at(sharing), math.inf
        for lead in range(1, max_lead + 1):
            more = costs.target.at(num_seqs + sharing * lead) - plain + lead * step
            time = (plain / num_seqs + more / sharing) / tokens_of_chain(hits, lead)
            if time > last:
                break  # longer chains only take longer
            best, last = min(best, time), time
    return best


def tokens_of_chain(hits: float, lead: int) -> float:
    """Return the tokens that a pass yields over a chain of `lead` candidates."""
    return (1 - hits ** (lead + 1)) / (1 - hits)
