"""Engines on a Ray cluster. The only folder that imports ray (`pip install 'langchain-card[ray]'`); on first use."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from langchain_card.cluster.answers import Answers

_MODULES = {"Answers": "answers"}

__all__ = ["Answers"]


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)
