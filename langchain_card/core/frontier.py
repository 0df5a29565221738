"""The frontier of a drafter: where it would look next, and what others propose there already."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from typing import NamedTuple

from langchain_card.core.candidates import CandidateTree


class Frontier(NamedTuple):
    """Where a drafter would look next.

    Attributes:
        chances: for each node that the target's tokens lead there, and on to no known child.
        reach: that they lead to the likeliest of them.
        others: chances of what others propose below it.
    """

    chances: Sequence[float]
    reach: float = 0.0
    others: Sequence[float] = ()


def frontier(
    tree: CandidateTree,
    known: AbstractSet[int],
    expanded: AbstractSet[int],
    budget: int,
    width: int = 1,
    min_chance: float = 0.0,
) -> Frontier:
    """Where a drafter would look next: the root, or the likeliest nodes that it knows, outside `expanded`.

    Args:
        tree: of the request.
        known: nodes that it has published.
        expanded: nodes under which it has looked.
        budget: only the root and the best subtree of so many nodes are searched.
        width: nodes at most.
        min_chance: chance of being reached at least.
    """
    nodes, chances = tree.best_subtree(budget)
    reached = {tree.root: 1.0, **dict(zip(nodes, chances))}  # noqa: B905
    likely = itertools.takewhile(lambda at: at[1] >= min_chance, reached.items())
    looks = (at for at in likely if at[0] not in expanded and (at[0] in known or at[0] == tree.root))
    found = [*itertools.islice(looks, width)]
    if not found:
        return Frontier([])
    first, reach = found[0]
    below, others = {first}, list[float]()
    for node in nodes:
        if tree.parents[node] in below:
            below.add(node)
            others.append(reached[node])
    return Frontier([chance * max(0.0, 1.0 - tree.covered(node)) for node, chance in found], reach, others)
