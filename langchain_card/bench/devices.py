"""Step-time curves of a target and a draft on a kind of device."""

from __future__ import annotations

import bisect
import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from itertools import accumulate
from pathlib import Path


@dataclass(frozen=True)
class Device:
    """A pair on a kind of device.

    Attributes:
        name: of the kind.
        measured: whether the figures are; else they are estimates.
        source: where they come from.
        target: seconds of a pass by rows.
        draft: seconds of a step by rows.
        slowdown: how much longer a step of (target, draft) takes while both work on it.
    """

    name: str
    measured: bool
    source: str
    target: Mapping[int, float]
    draft: Mapping[int, float]
    slowdown: tuple[float, float] = (1.0, 1.0)

    @property
    def ratio(self) -> float:
        """Target pass / draft step, a row each."""
        return line(self.target, 1) / line(self.draft, 1)

    def save(self, path: Path) -> None:
        """Writes it as JSON."""
        path.write_text(json.dumps(asdict(self), indent=1) + "\n")


def check_curve(curve: Mapping[int, float], slowdown: tuple[float, ...] = ()) -> None:
    """Raises `ValueError` unless it is a curve."""
    if len(curve) < 2 or min(curve) != 1:
        raise ValueError("a curve begins with one row and has two sizes or more")
    if not all(0 < value < math.inf for value in (*curve.values(), *slowdown)):
        raise ValueError("times and slow-downs are positive numbers")


def rising(curve: Mapping[int, float]) -> dict[int, float]:
    """More rows are never faster; where they were measured so, it was noise."""
    sizes = sorted(curve)
    return dict(zip(sizes, accumulate((curve[size] for size in sizes), max), strict=True))


def line(curve: Mapping[int, float], rows: float) -> float:
    """The value at `rows`: on the line between the points, and on beyond the last two."""
    sizes = sorted(curve)
    i = min(max(bisect.bisect_left(sizes, rows), 1), len(sizes) - 1)
    few, many = sizes[i - 1], sizes[i]
    return curve[few] + (curve[many] - curve[few]) * (rows - few) / (many - few)
