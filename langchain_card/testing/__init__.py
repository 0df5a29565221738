"""For tests of this package and of plug-ins: toy models, a simulated world, and an explorer of interleavings."""

from langchain_card.testing.explorer import (
    Coverage,
    PriorityChooser,
    RandomChooser,
    RecordedChooser,
    Violation,
    exhaust,
    replay,
    run,
)
from langchain_card.testing.scope import Scope
from langchain_card.testing.toy import FixedPolicy, ToyDrafter, ToyModel, ToyTarget
from langchain_card.testing.world import World

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
