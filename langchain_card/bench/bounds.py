"""How sure a figure is: bootstrapped bounds over prompts."""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Measured:
    """A figure over several texts, with its 95 % bootstrap interval: of 100 made so, 95 hold the true figure."""

    value: float
    low: float
    high: float

    @classmethod
    def of(
        cls,
        values: Sequence[float],
        figure: Callable[[Sequence[float]], float] = statistics.mean,
        draws: int = 4000,
    ) -> Measured:
        """Of a value a text.

        Args:
            values: at least one.
            figure: what is made of them.
            draws: of the bootstrap; the same ones always.
        """
        rng = random.Random(0)  # noqa: S311
        found = sorted(figure(rng.choices(values, k=len(values))) for _ in range(draws))
        return cls(figure(values), found[int(0.025 * draws)], found[int(0.975 * draws)])
