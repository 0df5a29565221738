"""The engine with its draft model in a process of its own: chosen, loaded, exact, and gone when it is closed."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from langchain_card import CARDChatModel
from langchain_card.config import EngineConfig
from langchain_card.core.request import SamplingParams
from langchain_card.engine import build, drafter_hosts
from langchain_card.engine.drafter_hosts import needs_process
from langchain_card.engine.engine import Engine
from langchain_card.errors import DeviceError, InvalidInputError, ModelStoreError
from langchain_card.models.loader import ModelSpec, Pair, resolve
from langchain_card.models.placement import find_device
from langchain_card.ports import Setting
from langchain_card.runtime.threads import ThreadPlan, single_threaded
from tests.simulation import FixedPolicy
from tests.support import naive
from tests.support.processes import child_processes
from tests.support.weights import num_loaded_models

PROMPT = list(range(40, 60))
ASKED: dict[str, dict[str, Any]] = {
    "greedy": {},
    "sampled": {"temperature": 0.8, "seed": 5, "top_p": 0.9, "repetition_penalty": 1.2},
}


class Told:
    """Progress, kept."""

    def __init__(self) -> None:
        self.stages: list[str] = []

    def update(self, stage: str, done: int, total: int) -> None:
        self.stages.append(stage)


@pytest.fixture(scope="module")
def config(tiny_pairs: dict[str, tuple[str, str]]) -> EngineConfig:
    model, draft = tiny_pairs["llama"]
    return EngineConfig(model, draft, dtype="float64", drafters=(), draft_transport="process")


@pytest.fixture(scope="module")
def running(config: EngineConfig) -> Iterator[Engine]:
    """Each step of its draft logs the number of CPU threads. All candidates are verified, whatever they cost here."""
    before, told, processes = num_loaded_models(), Told(), child_processes()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(build, "Controller", lambda **_: FixedPolicy())
        patch.setattr(drafter_hosts, "FACTORY", "tests.support.children:counting_threads")
        with Engine(config, progress=told) as opened:
            assert told.stages[-1:] == [f"load {config.draft_model} in a process of its own"]
            assert num_loaded_models() == before + 1, "the draft's weights are not loaded here"
            yield opened
    assert num_loaded_models() == before
    assert child_processes() <= processes, "the process is gone with its engine"


@pytest.mark.parametrize("schedule", ["sequential", "parallel"])
@pytest.mark.parametrize("name", ASKED)
def test_the_tokens_are_those_of_plain_decoding(
    running: Engine, name: str, schedule: str, caplog: pytest.LogCaptureFixture
) -> None:
    params = SamplingParams(max_tokens=120, schedule=schedule, **ASKED[name])  # type: ignore[arg-type]
    model = naive.load(running.config.model, torch.float64)
    wanted = naive.generate(naive.reading(model), PROMPT, params, running.eos_ids)
    done = running.submit(PROMPT, params).result()
    assert list(done.token_ids) == wanted.token_ids
    assert done.token_ids == running.submit(PROMPT, replace(params, schedule="plain")).result().token_ids
    assert done.stats.accepted > 10, "candidates came of it"
    share = ThreadPlan(target_on_cpu=True, draft_on_cpu=True).draft("parallel")
    assert {record.getMessage() for record in caplog.records} == {f"{share} threads"}, "it keeps to its share"
    assert running.devices == {"target": "cpu", "draft": "cpu"}


@pytest.mark.slow
def test_weights_that_are_gone(config: EngineConfig, tmp_path: Path) -> None:
    """What the process finds is raised here, as what it is, and nothing is left."""
    folder = tmp_path / "draft"
    shutil.copytree(str(config.draft_model), folder)
    config = replace(config, draft_model=str(folder))
    pair, models, processes = resolve(config), num_loaded_models(), child_processes()
    (folder / "model.safetensors").unlink()
    with pytest.raises(ModelStoreError, match=r"draft_model = '.*/draft': could not be loaded \(.*model\.safetensors"):
        Engine(config, pair=pair)
    assert num_loaded_models() == models and child_processes() <= processes


def test_no_memory_for_the_weights(config: EngineConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    def short(spec: ModelSpec) -> Any:
        raise torch.OutOfMemoryError("planted")

    spec = resolve(config).draft
    assert spec is not None
    monkeypatch.setattr(drafter_hosts, "load_model", short)
    setting = drafter_hosts._setting_arguments(
        Setting(9, 64), Path(), ThreadPlan(target_on_cpu=True, draft_on_cpu=True)
    )
    with single_threaded(), pytest.raises(DeviceError, match=r"draft_device = 'cpu': has no room for .*draft"):
        drafter_hosts.build_worker(
            print,
            print,
            **drafter_hosts._model_arguments(spec),
            **setting,
            execution="",
            own_vocabulary=False,
            context=0,
        )  # type: ignore[arg-type]


def pair_on(target: str, draft: str | None) -> Pair:
    specs = [ModelSpec("m", Path(), "float", torch.device(d), torch.float32) for d in (target, draft) if d is not None]
    return Pair(specs[0], specs[1] if draft is not None else None, None, (), 10, 64)


@pytest.mark.parametrize(
    ("asked", "target", "draft", "wanted"),
    [
        ("auto", "cuda:0", "cuda:1", True),
        ("auto", "cuda:0", "cuda:0", False),
        ("auto", "cuda:0", "cpu", False),
        ("auto", "cpu", "cpu", False),
        ("thread", "cuda:0", "cuda:1", False),
        ("process", "cpu", "cpu", True),
        ("process", "cuda:0", None, False),
    ],
)
def test_which_draft_gets_a_process(asked: str, target: str, draft: str | None, wanted: bool) -> None:
    assert needs_process(EngineConfig(draft_transport=asked), pair_on(target, draft)) is wanted


def test_the_field_is_checked_and_reaches_the_engine() -> None:
    with pytest.raises(InvalidInputError, match=r"must be one of auto, thread, process\. Hint: did you mean thread"):
        EngineConfig(draft_transport="threads")
    assert CARDChatModel(draft_transport="process").engine_config().draft_transport == "process"
    with pytest.raises(ValueError, match="'auto', 'thread' or 'process'"):
        CARDChatModel(draft_transport="threads")  # type: ignore[arg-type]


def test_one_device_has_one_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else a pair on one device would be taken for a pair on two."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert find_device("device", "auto") == find_device("device", "cuda") == torch.device("cuda:0")
    assert find_device("device", "cuda:1") == torch.device("cuda:1")
