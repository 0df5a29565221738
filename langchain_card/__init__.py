"""Local chat models that decode with a draft and a target at once, in the target's own words.

`CARDChatModel` is the LangChain chat model, `Engine` the same without LangChain. Both are imported when first used,
so that importing the package costs nothing and the engine runs where LangChain is not installed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from langchain_card._version import __version__

if TYPE_CHECKING:
    from langchain_card.chat_model import CARDChatModel
    from langchain_card.config import EngineConfig, Limits, Pins
    from langchain_card.core.request import SamplingParams
    from langchain_card.engine.engine import Engine
    from langchain_card.errors import CARDError

_HOMES = {
    "CARDChatModel": "chat_model",
    "CARDError": "errors",
    "Engine": "engine.engine",
    "EngineConfig": "config",
    "Limits": "config",
    "Pins": "config",
    "SamplingParams": "core.request",
}

__all__ = ["CARDChatModel", "CARDError", "Engine", "EngineConfig", "Limits", "Pins", "SamplingParams", "__version__"]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)
