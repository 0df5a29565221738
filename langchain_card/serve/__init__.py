"""The web application: `create_app(model)`. It needs the extra `server` and is imported on first use."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from langchain_card.serve.app import create_app
    from langchain_card.serve.settings import Settings

INSTALL = "pip install fastapi httpx prometheus-client starlette uvicorn"
"""What installs the packages of the extra `server`."""

_MODULES = {"create_app": "app", "Settings": "settings"}

__all__ = ["Settings", "create_app"]


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    try:
        return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in ("fastapi", "starlette", "prometheus_client"):
            raise
        limit = f"{error.name} is missing, which the server needs"
        raise ModuleNotFoundError(f"{limit}: {INSTALL}", name=error.name) from error


def __dir__() -> list[str]:
    return sorted(__all__)
