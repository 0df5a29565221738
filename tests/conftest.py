"""Fixtures shared by all tests."""

from __future__ import annotations

import contextlib
import gc
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from httpx._config import DEFAULT_TIMEOUT_CONFIG

from langchain_card.config import EngineConfig
from langchain_card.engine.engine import Engine
from langchain_card.models.store import default_cache
from langchain_card.runtime import threads
from tests.support import SMALL, tiny
from tests.support.processes import child_processes


def pytest_configure() -> None:
    """Let ctrl-c reach the processes that tests start, also where a shell runs the tests in the background."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="module", autouse=True)
def _no_child_stays() -> Iterator[None]:
    """End what a failed test left running, so that no test of another file finds it."""
    before = child_processes()
    yield
    for child in child_processes() - before:
        with contextlib.suppress(psutil.Error):
            if "langchain_card" in " ".join(child.cmdline()):
                child.kill()
                child.wait(10)


@pytest.fixture(scope="session", autouse=True)
def _own_conversions(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Downloaded models come from the user's cache and stay there; what tests convert goes with their folder."""
    cache, home = default_cache(), tmp_path_factory.mktemp("home")
    for name in ("models", "locks"):
        (cache / name).mkdir(parents=True, exist_ok=True)
        (home / name).symlink_to(cache / name)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LANGCHAIN_CARD_HOME", str(home))
        yield


@pytest.fixture(scope="session", autouse=True)
def _own_defaults() -> Iterator[None]:
    """Defaults are the package's, not the user's."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("LANGCHAIN_CARD_MODEL", "LANGCHAIN_CARD_DRAFT_MODEL", "LC_OUTPUT_VERSION"):
            patch.delenv(name, raising=False)
        yield


@pytest.fixture(scope="session", autouse=True)
def _patient_clients() -> Iterator[None]:
    """A request without a timeout of its own waits a minute: httpx's five seconds are short on a busy machine."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("connect", "read", "write", "pool"):
            patch.setattr(DEFAULT_TIMEOUT_CONFIG, name, 60.0)
        yield


@pytest.fixture(scope="session")
def tiny_pairs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[str, str]]:
    """By architecture: folders of a random target and of a draft that matches it in part."""
    pairs = {}
    for arch in tiny.CONFIGS:
        folder: Path = tmp_path_factory.mktemp(arch)
        target = tiny.make_target(arch, folder / "target")
        pairs[arch] = target, tiny.make_draft(target, folder / "draft", noise=0.02)
    return pairs


@pytest.fixture
def say(capsys: pytest.CaptureFixture[str]) -> Callable[[str], None]:
    """Prints a figure past the capture, so that every run of the tests shows it."""

    def print_now(text: str) -> None:
        with capsys.disabled():
            print(f"\n{text}", flush=True)

    return print_now


@pytest.fixture
def one_thread(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Tiny models gain nothing from more, and lose much where other programs run."""
    monkeypatch.setattr(threads, "num_cores", lambda: 1)
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def frozen() -> Iterator[None]:
    """A collection over all that earlier tests have left would stop the threads for half a second."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture(scope="session")
def small_engine() -> Iterator[Engine]:
    """SmolLM2 in int8 with prompt lookup."""
    with Engine(EngineConfig(model=SMALL, draft_model="ngram")) as engine:
        yield engine


@pytest.fixture(scope="session")
def toy(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Fields of a tiny random model in float64: quick to load, and it never ends by itself."""
    folder = tiny.make_target("llama", tmp_path_factory.mktemp("toy"))
    return {"model": folder, "draft_model": None, "dtype": "float64", "max_tokens": 8}


@pytest.fixture(scope="session")
def other_toy(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Another model of the toy's vocabulary."""
    return tiny.make_target("qwen2", tmp_path_factory.mktemp("other"), seed=5)
