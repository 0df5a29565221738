"""Local chat models that decode with a draft and a target model at once; answers are the target's own.

`CARDChatModel` is the LangChain chat model, `CARDDecisionModel` answers typed questions with probabilities, and
`Engine` is the engine without LangChain. They are imported at first use, so that importing the package is cheap and the
engine runs where LangChain is not installed. `CARDDecisionModel` needs langchain-core 1.8 and is not in `__all__`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from langchain_card.chat_model import CARDChatModel
    from langchain_card.config import EngineConfig
    from langchain_card.core.request import SamplingParams
    from langchain_card.decisions.model import CARDDecisionModel as CARDDecisionModel
    from langchain_card.engine.engine import Engine
    from langchain_card.errors import CARDError
    from langchain_card.limits import Limits, Pins

_MODULES = {
    "CARDChatModel": "chat_model",
    "CARDDecisionModel": "decisions.model",
    "CARDError": "errors",
    "Engine": "engine.engine",
    "EngineConfig": "config",
    "Limits": "limits",
    "Pins": "limits",
    "SamplingParams": "core.request",
}

__all__ = [
    "CARDChatModel",
    "CARDError",
    "Engine",
    "EngineConfig",
    "Limits",
    "Pins",
    "SamplingParams",
    "__version__",
]


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)
