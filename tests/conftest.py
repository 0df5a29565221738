"""Fixtures shared by all tests."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import tiny

from langchain_card.config import EngineConfig
from langchain_card.engine.engine import Engine

SMALL = "smollm2-135m"


@pytest.fixture(scope="session", params=["llama", "qwen2", "qwen3", "mistral"])
def tiny_pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """Folders of a random target and of a draft that matches it in part."""
    folder: Path = tmp_path_factory.mktemp(request.param)
    target = tiny.make_target(request.param, folder / "target")
    return target, tiny.make_draft(target, folder / "draft", noise=0.06)


@pytest.fixture(scope="session")
def small_engine() -> Iterator[Engine]:
    """SmolLM2 in int8 with prompt lookup."""
    with Engine(EngineConfig(model=SMALL, draft_model="ngram")) as engine:
        yield engine
