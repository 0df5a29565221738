"""Engines on a Ray cluster, behind a relay. The only folder that imports ray (`pip install 'langchain-card[ray]'`)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from langchain_card.cluster.answers import Answers
    from langchain_card.cluster.application import build
    from langchain_card.cluster.deployment import ClusterSettings, deploy, joined_cluster

INSTALL = "pip install 'langchain-card[ray]'"
"""What installs the packages of the extra `ray`."""

_MODULES = {
    "Answers": "answers",
    "ClusterSettings": "deployment",
    "build": "application",
    "deploy": "deployment",
    "joined_cluster": "deployment",
}

__all__ = ["Answers", "ClusterSettings", "build", "deploy", "joined_cluster"]


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    try:
        return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "ray":
            raise
        raise ModuleNotFoundError(f"ray is missing, which a cluster needs: {INSTALL}", name=error.name) from error


def __dir__() -> list[str]:
    return sorted(__all__)
