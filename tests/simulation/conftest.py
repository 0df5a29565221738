"""A pair of tiny models in float64 for simulated devices, and its answers on a CPU."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from langchain_card.config import EngineConfig
from langchain_card.engine import build
from langchain_card.limits import Limits
from tests.support import tiny
from tests.support.placed import answers, policy


@pytest.fixture(scope="session")
def pair(tmp_path_factory: pytest.TempPathFactory) -> EngineConfig:
    """A target and a draft that matches it in part."""
    folder = tmp_path_factory.mktemp("pair")
    target = tiny.make_target("llama", folder / "target")
    return EngineConfig(
        target, tiny.make_draft(target, folder / "draft", noise=0.02), drafters=(), dtype="float64", max_model_len=256,
        limits=Limits(max_num_seqs=2, max_window=8, restart_seconds=0.01),
    )  # fmt: skip


@pytest.fixture
def always_drafts(monkeypatch: pytest.MonkeyPatch) -> None:
    """A draft of simulated speed would hardly ever pay."""
    monkeypatch.setattr(build, "Controller", policy)


@pytest.fixture(scope="session")
def plain(pair: EngineConfig) -> Callable[[int, dict[str, Any]], list[tuple[int, ...]]]:
    """The answers of the target alone on a CPU: a number of tokens and options, as `answers` takes them."""
    config, known = replace(pair, draft_model=None, device="cpu"), dict[str, list[tuple[int, ...]]]()

    def find(count: int, options: dict[str, Any]) -> list[tuple[int, ...]]:
        name = f"{count} {options}"
        if name not in known:
            known[name] = answers(config, ["plain"], count, options)[0]
        return known[name]

    return find
