"""Tests for drafters of other packages: `DrafterConformance`, and the plain loop that it compares answers with.

`DrafterConformance` needs the extra `testing` (pytest) and is imported at its first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from langchain_card.testing.conformance import DrafterConformance

__all__ = ["DrafterConformance"]


def __getattr__(name: str) -> Any:
    if name != "DrafterConformance":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        from langchain_card.testing.conformance import DrafterConformance
    except ModuleNotFoundError as error:
        if error.name != "pytest":
            raise
        hint = "pip install pytest"
        raise ModuleNotFoundError(f"the suite needs pytest, which is missing: {hint}", name=error.name) from error
    return DrafterConformance
