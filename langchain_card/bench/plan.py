"""The planner: the fastest stack of drafters, computed from pass times and the agreement of levels.

A level of a stack requests a block of n candidates from the level below, verifies them in one pass over n + 1 rows, and
hands up the accepted ones and one token of its own. With c(n + 1) the time of the pass, E(n) the expected tokens of it,
and l the time per token of the level below, the level's own time per token is

    (n * l + c(n + 1)) / E(n)

which increases with l. The fastest stack that ends in a level therefore contains the fastest one that ends in the level
below it: a dynamic programme over pairs of levels and block sizes finds it, and may leave out any level. (Hierarchical
speculative decoding, arXiv 2510.19705.)

The formula assumes that the level below can stop within a step. In this engine it finishes the step that fills the
block: `refined` counts whole steps, the candidates beyond the block, and their reuse if the whole block is accepted.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

MAX_BLOCK = 8
"""Largest block of candidates that is planned for."""

KEPT = 4
"""Fastest stacks per level that are kept and then refined."""


@dataclass(frozen=True)
class Edge:
    """The acceptance of a lower level's candidates by an upper level.

    Attributes:
        reach: [k] chance that the first k + 1 candidates of a block are all accepted.
        offered: [k] chance that the lower level offers k + 1 candidates. Empty: it always does.
    """

    reach: tuple[float, ...]
    offered: tuple[float, ...] = ()

    @classmethod
    def of(cls, chance: float, most: int = MAX_BLOCK) -> Edge:
        """Return the edge whose candidates are accepted independently with the same chance."""
        return cls(tuple(chance ** (k + 1) for k in range(most + 1)))

    def tokens(self, block: int) -> float:
        """Return the expected tokens of a pass over a block."""
        return 1.0 + sum(self.reach[:block])

    def rows(self, block: int) -> float:
        """Return the expected rows of a pass over a block."""
        return 1.0 + (sum(self.offered[:block]) if self.offered else block)


@dataclass(frozen=True)
class Case:
    """The input of the planner: all levels, the smallest first. The last is the target.

    Attributes:
        names: of the levels.
        costs: seconds of a pass of each level, as a function of its rows.
        edges: by (lower, upper) level. Levels without an edge cannot work together.
        max_block: largest block of candidates.
    """

    names: Sequence[str]
    costs: Sequence[Callable[[float], float]]
    edges: Mapping[tuple[int, int], Edge]
    max_block: int = MAX_BLOCK

    @property
    def target(self) -> int:
        """Index of the target."""
        return len(self.names) - 1


@dataclass(frozen=True, order=True)
class Plan:
    """A stack with its block sizes and expected speed.

    Attributes:
        seconds: expected time per token.
        levels: indices of its levels, the lowest first.
        blocks: [levels - 1] candidates that each level but the lowest requests.
    """

    seconds: float
    levels: tuple[int, ...] = field(compare=False)
    blocks: tuple[int, ...] = field(compare=False, default=())


def best_plans(case: Case, keep: int = KEPT) -> list[Plan]:
    """Return the `keep` fastest stacks that end in the target, by the formula above. The target alone is a stack."""
    best: list[list[Plan]] = []  # by the last level
    for upper in range(len(case.names)):
        ways: Iterator[Plan] = iter([Plan(case.costs[upper](1), (upper,))])
        for lower, block in itertools.product(range(upper), range(1, case.max_block + 1)):
            if (lower, upper) in case.edges:
                ways = itertools.chain(ways, [_add_level(case, plan, upper, block) for plan in best[lower]])
        best.append(heapq.nsmallest(keep, ways))
    return best[-1]


def _add_level(case: Case, plan: Plan, upper: int, block: int) -> Plan:
    edge = case.edges[plan.levels[-1], upper]
    seconds = (block * plan.seconds + case.costs[upper](edge.rows(block))) / edge.tokens(block)
    return Plan(seconds, (*plan.levels, upper), (*plan.blocks, block))


def best_blocks(case: Case, levels: Sequence[int]) -> Plan:
    """Return a stack with its fastest block sizes, by the formula above."""
    plan = Plan(case.costs[levels[0]](1), (levels[0],))
    for upper in levels[1:]:
        plan = min(_add_level(case, plan, upper, block) for block in range(1, case.max_block + 1))
    return plan


def rank_stacks(case: Case) -> list[Plan]:
    """Return every stack that ends in the target, the fastest first, with block sizes of the formula and refined times.

    If the first one is the target alone, speculation does not pay.
    """
    below = range(case.target)
    chosen = [levels for n in range(case.target + 1) for levels in itertools.combinations(below, n)]
    linked = [(*levels, case.target) for levels in chosen]
    linked = [levels for levels in linked if all(pair in case.edges for pair in itertools.pairwise(levels))]
    fastest: dict[tuple[int, ...], Plan] = {}
    for plan in (*best_plans(case), *(best_blocks(case, levels) for levels in linked)):
        plan = refined(case, plan)
        fastest[plan.levels] = min(plan, fastest.get(plan.levels, plan))
    return sorted(fastest.values())


def refined(case: Case, plan: Plan) -> Plan:
    """Return the stack with the expected time per token if levels finish their steps."""
    step, brings = case.costs[plan.levels[0]](1), [1.0]
    tokens = 1.0
    for (lower, upper), block in zip(itertools.pairwise(plan.levels), plan.blocks, strict=True):
        edge = case.edges[lower, upper]
        step = step * _steps_a_block(brings, block, edge) + case.costs[upper](edge.rows(block))
        tokens = edge.tokens(block)
        reach = (1.0, *edge.reach[:block], 0.0)
        brings = [before - after for before, after in itertools.pairwise(reach)]
    return Plan(step / tokens, plan.levels, plan.blocks)


def _steps_a_block(brings: Sequence[float], block: int, edge: Edge) -> float:
    """Return the mean steps of the lower level until a block is full.

    Args:
        brings: [k] chance that a step adds k + 1 candidates.
        block: candidates requested.
        edge: between the two levels.
    """
    most = block + len(brings)
    ends = [_fill(brings, block, start, most) for start in range(most + 1)]
    follows = edge.reach[block] if block < len(edge.reach) else 0.0  # the block and the next candidate accepted
    left = [1.0, *[0.0] * most]
    for _ in range(50):  # to the steady state
        after = [0.0] * (most + 1)
        for chance, (_, totals) in zip(left, ends, strict=True):
            for total, share in enumerate(totals):
                after[max(0, total - block - 1)] += chance * share * follows
        after[0] += 1.0 - sum(after)
        left = after
    return sum(chance * steps for chance, (steps, _) in zip(left, ends, strict=True))


def _fill(brings: Sequence[float], block: int, start: int, most: int) -> tuple[float, list[float]]:
    """Return the mean steps from `start` candidates to a full block, and the chance of each number of candidates."""
    chances, steps = [float(total == start) for total in range(most + 1)], 0.0
    for total in range(block):
        chance, chances[total] = chances[total], 0.0
        steps += chance
        for more, share in enumerate(brings, 1):
            chances[total + more] += chance * share
    return steps, chances
