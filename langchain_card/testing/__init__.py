"""For tests of this package and of plug-ins: toy models, a simulated world, and an explorer of interleavings.

`DrafterConformance`, the suite of plug-ins, needs the extra `testing` (pytest), and is imported when first used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

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

if TYPE_CHECKING:
    from langchain_card.testing.conformance import DrafterConformance

__all__ = [
    "Coverage",
    "DrafterConformance",
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


def __getattr__(name: str) -> Any:
    if name != "DrafterConformance":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        from langchain_card.testing.conformance import DrafterConformance
    except ModuleNotFoundError as error:
        if error.name != "pytest":
            raise
        hint = "pip install 'langchain-card[testing]'"
        raise ModuleNotFoundError(f"pytest is missing, which the suite needs: {hint}", name=error.name) from error
    return DrafterConformance
