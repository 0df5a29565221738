"""A simulated world for the core's protocol: toy models, a virtual clock, and an explorer of every order of events."""

from __future__ import annotations

from tests.simulation.explorer import (
    Coverage,
    PriorityChooser,
    RandomChooser,
    RecordedChooser,
    Violation,
    exhaust,
    replay,
    run,
)
from tests.simulation.scope import Scope
from tests.simulation.toy import FixedPolicy, ToyDrafter, ToyModel, ToyTarget
from tests.simulation.world import World

__all__ = [
    "Coverage",
    "FixedPolicy",
    "PriorityChooser",
    "RandomChooser",
    "RecordedChooser",
    "Scope",
    "ToyDrafter",
    "ToyModel",
    "ToyTarget",
    "Violation",
    "World",
    "exhaust",
    "replay",
    "run",
]
