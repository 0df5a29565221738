"""Which stack of drafters is the fastest, from what passes cost and how often levels agree? Figures in, figures out.

A level of a stack asks the one below it for a block of n candidates, and checks them in one pass over n + 1 rows; what
it takes, and one token of its own, is what it hands up. With c the cost of the pass, E the tokens that come of it and l
the time per token of the level below, its own time per token is

    (n * l + c(n + 1)) / E(n)

which rises with l. So the fastest stack that ends in a level holds the fastest that ends in the one below it: a dynamic
programme over pairs of levels and block sizes finds it, and any level may be left out. (Hierarchical speculative
decoding, arXiv 2510.19705.)

The formula takes the level below to stop within a block. Ours ends the step that fills it: `refined` counts whole
steps, what they bring beyond the block, and that this is kept for the next block where all of it came true.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

MAX_BLOCK = 8
"""Candidates of a block that are planned for."""

KEPT = 4
"""Stacks that are kept for each level, to be weighed again."""


@dataclass(frozen=True)
class Edge:
    """How far one level takes what a lower one says.

    Attributes:
        reach: [k] chance that the first k + 1 candidates of a block are all taken.
        offered: [k] chance that the lower level has so many; always, where it is empty.
    """

    reach: tuple[float, ...]
    offered: tuple[float, ...] = ()

    @classmethod
    def of(cls, chance: float, most: int = MAX_BLOCK) -> Edge:
        """Of candidates that are taken with one chance, independent of each other."""
        return cls(tuple(chance ** (k + 1) for k in range(most + 1)))

    def tokens(self, block: int) -> float:
        """That come of a pass over a block."""
        return 1.0 + sum(self.reach[:block])

    def rows(self, block: int) -> float:
        """Of the pass."""
        return 1.0 + (sum(self.offered[:block]) if self.offered else block)


@dataclass(frozen=True)
class Case:
    """What is known of the levels, the smallest first; the last is the target.

    Attributes:
        names: of the levels.
        costs: of each, seconds of a pass by its rows.
        edges: by (lower, upper) level; pairs that are missing do not work together.
        max_block: candidates of a block at most.
    """

    names: Sequence[str]
    costs: Sequence[Callable[[float], float]]
    edges: Mapping[tuple[int, int], Edge]
    max_block: int = MAX_BLOCK

    @property
    def target(self) -> int:
        """The last level."""
        return len(self.names) - 1


@dataclass(frozen=True, order=True)
class Plan:
    """A stack.

    Attributes:
        seconds: per token, as expected.
        levels: of the stack, the lowest first.
        blocks: [levels - 1] candidates that each level but the lowest asks for.
    """

    seconds: float
    levels: tuple[int, ...] = field(compare=False)
    blocks: tuple[int, ...] = field(compare=False, default=())


def best_plans(case: Case, keep: int = KEPT) -> list[Plan]:
    """The best few stacks that end in the target, by the formula above; one level alone is a stack, too."""
    found: list[list[Plan]] = []
    for upper in range(len(case.names)):
        ways: Iterator[Plan] = iter([Plan(case.costs[upper](1), (upper,))])
        for lower, block in itertools.product(range(upper), range(1, case.max_block + 1)):
            if (lower, upper) in case.edges:
                ways = itertools.chain(ways, [_above(case, plan, upper, block) for plan in found[lower]])
        found.append(heapq.nsmallest(keep, ways))
    return found[-1]


def _above(case: Case, plan: Plan, upper: int, block: int) -> Plan:
    edge = case.edges[plan.levels[-1], upper]
    seconds = (block * plan.seconds + case.costs[upper](edge.rows(block))) / edge.tokens(block)
    return Plan(seconds, (*plan.levels, upper), (*plan.blocks, block))


def best_blocks(case: Case, levels: Sequence[int]) -> Plan:
    """The best block sizes of one stack."""
    plan = Plan(case.costs[levels[0]](1), (levels[0],))
    for upper in levels[1:]:
        plan = min(_above(case, plan, upper, block) for block in range(1, case.max_block + 1))
    return plan


def stacks(case: Case) -> list[Plan]:
    """Every stack that ends in the target, the fastest first: by the blocks that the formula finds, weighed again.

    The first of them is the choice; where it is the target alone: do not speculate.
    """
    below = range(case.target)
    chosen = [levels for n in range(case.target + 1) for levels in itertools.combinations(below, n)]
    linked = [(*levels, case.target) for levels in chosen]
    linked = [levels for levels in linked if all(pair in case.edges for pair in itertools.pairwise(levels))]
    found: dict[tuple[int, ...], Plan] = {}
    for plan in (*best_plans(case), *(best_blocks(case, levels) for levels in linked)):
        weighed = refined(case, plan)
        found[plan.levels] = min(weighed, found.get(plan.levels, weighed))
    return sorted(found.values())


def refined(case: Case, plan: Plan) -> Plan:
    """The same stack with the time per token that whole steps take."""
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
    """Steps of the lower level until a block is full, on average.

    Args:
        brings: [k] chance that a step brings k + 1 candidates.
        block: candidates wanted.
        edge: between the two levels.
    """
    most = block + len(brings)
    ends = [_fill(brings, block, start, most) for start in range(most + 1)]
    follows = edge.reach[block] if block < len(edge.reach) else 0.0  # all of it, and the next candidate, came true
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
    """From `start` candidates to a full block: steps on average, and the chance of each number at its end."""
    chances, steps = [float(total == start) for total in range(most + 1)], 0.0
    for total in range(block):
        chance, chances[total] = chances[total], 0.0
        steps += chance
        for more, share in enumerate(brings, 1):
            chances[total + more] += chance * share
    return steps, chances
