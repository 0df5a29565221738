"""The simulation that runs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tests.simulation.cuda.simulation import Simulation

_active: list[Simulation] = []


def active() -> Simulation:
    """Return the simulation that runs."""
    return _active[-1]


@contextmanager
def activated(simulation: Simulation) -> Iterator[None]:
    """Let a simulation run during the block."""
    _active.append(simulation)
    try:
        yield
    finally:
        simulation.is_active = False
        _active.remove(simulation)
