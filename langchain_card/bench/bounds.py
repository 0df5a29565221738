"""Bootstrap intervals of measured figures."""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Measured:
    """A figure over several prompts, with its 95 % bootstrap interval."""

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
        """Return the figure of `values`, one value per prompt, with its interval.

        Args:
            values: at least one.
            figure: computes the figure from values.
            draws: bootstrap samples. The random seed is fixed.
        """
        rng = random.Random(0)  # noqa: S311
        samples = sorted(figure(rng.choices(values, k=len(values))) for _ in range(draws))
        return cls(figure(values), samples[int(0.025 * draws)], samples[int(0.975 * draws)])
