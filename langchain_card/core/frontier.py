"""The frontier of a drafter: the nodes that it would expand next, and what other drafters propose below them."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from typing import NamedTuple

from langchain_card.core.candidates import CandidateTree


class Frontier(NamedTuple):
    """The nodes that a drafter would expand next.

    Attributes:
        chances: [nodes] chance that the answer passes through the node and continues with none of its known children.
        reach: chance that the answer passes through the best of them.
        others: chances of the candidates that other drafters propose below the best of them.
        lead: depth of the drafter's candidates.
    """

    chances: Sequence[float]
    reach: float = 0.0
    others: Sequence[float] = ()
    lead: int = 0


def frontier(
    tree: CandidateTree,
    published: AbstractSet[int],
    expanded: AbstractSet[int],
    budget: int,
    width: int = 1,
    min_chance: float = 0.0,
) -> Frontier:
    """Return the nodes that a drafter would expand next: the root, or the best of its own, outside `expanded`.

    Args:
        tree: the request's candidates.
        published: nodes that the drafter has published.
        expanded: nodes whose children it has published.
        budget: only the root and the best subtree of so many nodes are searched.
        width: nodes at most.
        min_chance: nodes that the answer reaches with a smaller chance are left out.
    """
    nodes, chances = tree.best_subtree(budget)
    reached = {tree.root: 1.0, **dict(zip(nodes, chances))}  # noqa: B905
    likely = itertools.takewhile(lambda at: at[1] >= min_chance, reached.items())
    open_ = (at for at in likely if at[0] not in expanded and (at[0] in published or at[0] == tree.root))
    chosen = [*itertools.islice(open_, width)]
    if not chosen:
        return Frontier([])
    first, reach = chosen[0]
    below, others = {first}, list[float]()
    for node in nodes:
        if tree.parents[node] in below:
            below.add(node)
            others.append(reached[node])
    return Frontier([chance * max(0.0, 1.0 - tree.covered(node)) for node, chance in chosen], reach, others)
