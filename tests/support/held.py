"""An engine in this process whose target waits for a permit before each pass."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from langchain_card.engine.engine import Engine


def held(engine: Engine, patch: pytest.MonkeyPatch) -> threading.Semaphore:
    """The permits; `patch` lets the target go when it is undone."""
    permits = threading.Semaphore(0)
    target: Any = engine.backend._target  # type: ignore[attr-defined]
    verify = target.verify
    patch.setattr(target, "verify", lambda windows: (permits.acquire(timeout=30), verify(windows))[1])
    return permits
