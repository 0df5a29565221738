"""Fixtures of tests with a folder of prefixes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from langchain_card.engine import prefix_folder
from tests.support.prefixes import PROMPT, answers, folder_config


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of prefixes, of this test alone; a busy machine has time to write."""
    monkeypatch.setenv("LANGCHAIN_CARD_HOME", str(tmp_path))
    monkeypatch.setattr(prefix_folder, "CLOSE_SECONDS", 60.0)
    return tmp_path / "prefixes"


@pytest.fixture
def target(tiny_pairs: dict[str, tuple[str, str]]) -> str:
    return tiny_pairs["qwen2"][0]


@pytest.fixture(scope="module")
def written(tiny_pairs: dict[str, tuple[str, str]], tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """A folder with the blocks of two tenants, and their answer."""
    home = tmp_path_factory.mktemp("written")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LANGCHAIN_CARD_HOME", str(home))
        patch.setattr(prefix_folder, "CLOSE_SECONDS", 60.0)
        read = answers(folder_config(tiny_pairs["qwen2"][0]), (PROMPT, "other"), (PROMPT, ""))
    return home / "prefixes", read[1][0]
