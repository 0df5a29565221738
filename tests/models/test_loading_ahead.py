"""Weights that are laid out before a model is built; half a second each but for the slow one, 10 s."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from langchain_card.config import EngineConfig
from langchain_card.engine import backends
from langchain_card.engine.engine import Engine
from langchain_card.errors import DeviceError
from langchain_card.models import loader
from langchain_card.models.loader import begin_loading, drop_loading, load_model, resolve
from tests.support import tiny

pytestmark = pytest.mark.usefixtures("one_thread")


def make_pair(folder: Path) -> EngineConfig:
    target = tiny.make_target("llama", folder / "target")
    return EngineConfig(target, tiny.make_draft(target, folder / "draft", noise=0.02), quantization="int8")


def test_an_engine_loads_what_was_begun_while_it_was_checked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    begun = list[str]()
    monkeypatch.setattr(backends, "begin_loading", lambda spec: (begun.append(spec.name), begin_loading(spec))[1])
    config = make_pair(tmp_path)
    packed, pack = list[str](), loader._pack
    monkeypatch.setattr(loader, "_pack", lambda spec, **rest: (packed.append(spec.name), pack(spec, **rest))[1])
    with Engine(config):
        assert begun == packed == [config.model, config.draft_model] and not loader._packings


@pytest.mark.slow
def test_what_other_processes_load_is_not_begun(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    begun = list[str]()
    monkeypatch.setattr(backends, "begin_loading", lambda spec: (begun.append(spec.name), begin_loading(spec))[1])
    config = make_pair(tmp_path)
    with Engine(replace(config, isolate=True)):
        assert not begun
    with Engine(replace(config, draft_transport="process")):
        assert begun == [config.model]


def test_nothing_is_left_of_an_engine_that_could_not_open(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> int:
        assert len(loader._packings) == 2
        raise DeviceError("device", "cpu", "is too small")

    monkeypatch.setattr(backends, "check_budget", fail)
    with pytest.raises(DeviceError, match="too small"):
        Engine(make_pair(tmp_path))
    assert not loader._packings


def test_little_memory_is_not_taken_before_it_was_checked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backends, "free_bytes", lambda device: 1000)
    monkeypatch.setattr(backends, "begin_loading", lambda spec: pytest.fail("it was begun"))
    with pytest.raises(DeviceError, match="use a smaller model"):
        Engine(make_pair(tmp_path))


def test_weights_that_were_begun_are_those_that_are_loaded(tmp_path: Path) -> None:
    spec = resolve(make_pair(tmp_path)).draft
    assert spec is not None
    plain = load_model(spec)
    assert begin_loading(spec) and not begin_loading(spec)
    early = load_model(spec)
    for name, module in plain.named_modules():
        if hasattr(module, "weights"):
            assert (module.weights.stored == early.get_submodule(name).weights.stored).all(), name
    assert not loader._packings
    begin_loading(spec)
    drop_loading(spec)
    drop_loading(spec)
    assert not loader._packings


def test_models_that_are_loaded_at_once_get_their_weights(tmp_path: Path) -> None:
    """While one thread builds an empty model, parameters of another's model must not become empty."""
    pair = resolve(make_pair(tmp_path))
    assert pair.draft is not None
    with ThreadPoolExecutor(2) as pool:
        models = pool.map(load_model, [pair.target, pair.draft] * 10)
    assert all(not parameter.is_meta for model in models for parameter in model.parameters())
