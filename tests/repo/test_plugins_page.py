"""docs/plugins.md does what it says: its files make a package that is found, used, and passes its own test."""

from __future__ import annotations

import configparser
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from langchain_card import plugins
from langchain_card.config import EngineConfig
from langchain_card.core.request import SamplingParams
from langchain_card.engine.engine import Engine
from tests.support import ROOT, tiny
from tests.support.documents import PLUGIN_FILES
from tests.support.packages import install


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The page's files, and the metadata that `pip` makes of them."""
    folder = tmp_path_factory.mktemp("echoing")
    for name, text in PLUGIN_FILES.items():
        (folder / name).write_text(text)
    project = configparser.ConfigParser()
    project.read_string(PLUGIN_FILES["pyproject.toml"])
    group = project['project.entry-points."langchain_card.drafters"']
    install(folder, "echoing", **{name: place.strip('"') for name, place in group.items()})
    return folder


def run(folder: Path, *arguments: str, **environment: str) -> str:
    path = os.pathsep.join([str(folder), str(ROOT)])
    done = subprocess.run(
        [sys.executable, "-W", "ignore", *arguments],
        cwd=folder, env={**os.environ, "PYTHONPATH": path, **environment}, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_the_example_is_short() -> None:
    assert {*PLUGIN_FILES} == {"echoing.py", "pyproject.toml", "use.py", "test_echo.py", "calm.py"}
    assert len([line for line in PLUGIN_FILES["echoing.py"].splitlines() if line.strip()]) <= 40


@pytest.mark.slow
def test_it_is_used_by_its_name(package: Path, tmp_path: Path) -> None:
    """With tiny models in the place of the built-in pair."""
    target = tiny.make_target("llama", tmp_path / "target")
    draft = tiny.make_draft(target, tmp_path / "draft", noise=0.02)
    said = run(package, "use.py", LANGCHAIN_CARD_MODEL=target, LANGCHAIN_CARD_DRAFT_MODEL=draft)
    assert "'echo': " in said


@pytest.mark.slow
def test_it_passes_its_own_test(package: Path) -> None:
    said = run(package, "-m", "pytest", "-q", "-p", "no:cacheprovider", "test_echo.py")
    assert re.search(r"\b4\d passed, 1 skipped", said), said


@pytest.mark.usefixtures("one_thread")
@pytest.mark.slow
def test_its_steering_steers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The token that the target would have said first is not said, and a draft changes nothing about it."""
    page: dict[str, Any] = {}
    exec(PLUGIN_FILES["calm.py"], page)
    monkeypatch.setattr(plugins, "_registered", {("steering", "calm"): page["Calm"]})
    target = tiny.make_target("llama", tmp_path / "target")
    draft, prompt_ids = tiny.make_draft(target, tmp_path / "draft", noise=0.02), tiny.byte_tokenizer()("abc").input_ids
    params = SamplingParams(max_tokens=12, logit_bias=((tiny.byte_tokenizer()("!").input_ids[0], 50.0),))
    said = []
    for options in ({"draft_model": None}, {"draft_model": None, "steering": "calm"}, {"steering": 'calm?words=["!"]'}):
        with Engine(EngineConfig(target, **{"draft_model": draft, "dtype": "float64", **options})) as engine:
            said.append(engine.submit(prompt_ids, params).result())
    assert "!" in said[0].text and "!" not in said[1].text
    assert said[1].token_ids == said[2].token_ids
