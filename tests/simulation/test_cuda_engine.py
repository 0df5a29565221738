"""The engine on simulated devices: a CPU's answers, wherever the models lie, eager and captured.

Seconds each: an operation takes a tenth of a millisecond here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Phi3Config

from langchain_card.config import EngineConfig
from langchain_card.core.request import SamplingParams
from langchain_card.engine.draft_placement import may_choose
from langchain_card.engine.drafter_hosts import needs_process
from langchain_card.engine.engine import Engine
from langchain_card.engine.target_worker import TargetWorker
from langchain_card.errors import DeviceLostError
from langchain_card.limits import Limits
from langchain_card.models.loader import is_loaded, resolve
from langchain_card.runtime.step_timer import StepTimer
from tests.simulation.cuda import simulated_cuda
from tests.simulation.cuda.graphs import CUDAGraph
from tests.support import tiny
from tests.support.placed import GREEDY, PLACEMENTS, SCHEDULES, answers

pytestmark = pytest.mark.usefixtures("one_thread", "always_drafts")

LONGROPE = Phi3Config(
    **tiny.SHAPE, pad_token_id=0, original_max_position_embeddings=128,
    rope_parameters={"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 8, "long_factor": [2.0] * 8},
)  # fmt: skip

Plain = Callable[[int, dict[str, Any]], list[tuple[int, ...]]]


@pytest.mark.parametrize("execution", ["graphs", pytest.param("eager", marks=pytest.mark.slow)])
def test_a_draft_on_the_other_device(pair: EngineConfig, plain: Plain, execution: str) -> None:
    """Three seconds, most of them for captures."""
    config = replace(pair, **PLACEMENTS["two devices"], execution=execution)
    with simulated_cuda():
        assert answers(config, ["parallel"], 6, GREEDY) == [plain(6, GREEDY)]


@pytest.mark.slow  # a second or two each
@pytest.mark.parametrize("family", [*tiny.FAMILIES, "longrope"])
def test_steps_of_each_family_are_captured(family: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Experts in float32: grouped products have no float64."""
    form = (tiny.FAMILIES | {"longrope": lambda: LONGROPE})[family]()
    dtype = "float32" if family in ("mixtral", "qwen2_moe", "qwen3_moe") else "float64"
    config = EngineConfig(
        str(tiny.save_random(form, tmp_path / family)), None, drafters=(), dtype=dtype, device="cpu", max_model_len=128,
        limits=Limits(max_num_seqs=2, max_window=8),
    )  # fmt: skip
    wanted = answers(config, ["plain"], 12, GREEDY)
    with simulated_cuda():
        assert answers(replace(config, device="cuda:0"), ["plain"], 12, GREEDY) == wanted
    assert "no CUDA graph" not in caplog.text


@pytest.mark.slow  # 3 seconds
def test_memory_runs_out_during_a_replay(pair: EngineConfig, plain: Plain, monkeypatch: pytest.MonkeyPatch) -> None:
    """Answers are whole, and later passes are replays."""
    replays, replay = list[CUDAGraph](), CUDAGraph.replay

    def scarce(graph: CUDAGraph) -> None:
        replays.append(graph)
        if len(replays) == 3:
            raise torch.OutOfMemoryError("planted")
        replay(graph)

    monkeypatch.setattr(CUDAGraph, "replay", scarce)
    with simulated_cuda():
        assert answers(replace(pair, device="cuda:0", draft_model=None), ["plain"], 12, GREEDY) == [plain(12, GREEDY)]
    assert len(replays) > 12


@pytest.mark.slow  # 10 seconds
def test_one_arithmetic_for_all_schedules(pair: EngineConfig) -> None:
    """Strict mode in float32: the bits of plain decoding on the same device."""
    config = replace(pair, **PLACEMENTS["two devices"], dtype="float32", exact="strict")
    with simulated_cuda():
        first, *others = answers(config, SCHEDULES, 24, GREEDY)
    assert others == [first] * 2


@pytest.mark.slow  # 5 seconds
def test_a_draft_in_blocks_on_the_cpu(pair: EngineConfig) -> None:
    """Its number format is its own: the target's answers stay those of plain decoding, in 16 bits."""
    config = replace(pair, **PLACEMENTS["draft on the CPU"], dtype="bfloat16", exact="strict")
    with simulated_cuda():
        found = resolve(config)
        assert found.draft is not None and found.draft.form == "int8" and found.draft.dtype == torch.float32
        assert found.target.form == "float" and found.target.dtype == torch.bfloat16
        first, *others = answers(config, SCHEDULES, 24, GREEDY)
    assert others == [first] * 2


@pytest.mark.slow  # 5 seconds each
@pytest.mark.parametrize(("device", "seconds"), [("cpu", 0.004), ("cuda:0", 0.04)])
@pytest.mark.parametrize("transport", ["auto", "process"])
def test_a_draft_goes_where_its_steps_cost_least(
    pair: EngineConfig, plain: Plain, device: str, seconds: float, transport: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The times are given: 10 ms for a step on the GPU, and the CPU's. A draft in a process is not kept in this one."""
    steps = lambda timer, rows: 0.01 if timer._runner.device.type == "cuda" else seconds  # noqa: E731
    monkeypatch.setattr(StepTimer, "seconds", steps)
    config = replace(pair, device="cuda:0", draft_transport=transport)
    with simulated_cuda(num_devices=1):
        with Engine(config) as engine:
            assert engine.devices == {"target": "cuda:0", "draft": device} and engine.config.draft_device == device
            assert is_loaded(engine._pair.draft) is (transport == "auto")
        assert answers(config, ["parallel"], 6, GREEDY) == [plain(6, GREEDY)]


def test_whose_device_is_open(pair: EngineConfig) -> None:
    with simulated_cuda(num_devices=1):
        for fields, is_open in (({}, True), ({"draft_device": "cuda:0"}, False), ({"stack": ("ngram",)}, False)):
            config = replace(pair, **{"device": "cuda:0", **fields})
            assert may_choose(config, resolve(config)) is is_open
    with simulated_cuda(num_devices=2):
        for device in ("cuda:0", "cuda:0,cuda:1", "cpu"):
            config = replace(pair, device=device)
            assert not may_choose(config, resolve(config))


@pytest.mark.parametrize(
    ("placement", "apart"),
    [("two devices", True), ("one device", False), ("target over both", False), ("draft on the CPU", False)],
)
def test_a_draft_has_a_process_where_the_target_has_no_part(pair: EngineConfig, placement: str, apart: bool) -> None:
    """Two processes on one GPU would take turns."""
    with simulated_cuda():
        config = replace(pair, **PLACEMENTS[placement] | {"draft_transport": "auto"})
        found = resolve(config)
        assert needs_process(config, found) is apart
        assert found.share_device is (placement in ("one device", "target over both"))


@pytest.mark.parametrize(("placement", "warned"), [("two devices", False), ("one device", True)])
def test_two_processes_on_one_device_are_warned_of(
    pair: EngineConfig, placement: str, warned: bool, caplog: pytest.LogCaptureFixture
) -> None:
    with simulated_cuda():
        config = replace(pair, **PLACEMENTS[placement] | {"draft_transport": "process"})
        assert needs_process(config, resolve(config))
    assert ("takes turns on cuda:0" in caplog.text) is warned


@pytest.fixture
def lost(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """All passes fail from the fourth on, as they do after an illegal access to memory."""
    passes, verify = list[int](), TargetWorker._verify

    def fails(worker: TargetWorker) -> Any:
        passes.append(len(passes))
        if len(passes) > 3:
            raise torch.AcceleratorError("CUDA error: an illegal memory access was encountered")
        return verify(worker)

    monkeypatch.setattr(TargetWorker, "_verify", fails)
    yield passes


def test_a_lost_device_ends_an_engine_at_once(pair: EngineConfig, lost: list[int]) -> None:
    """Every answer fails, and later requests do, with an error that names what helps."""
    with Engine(replace(pair, draft_model=None)) as engine:
        running = [engine.submit([*range(40, 60)], SamplingParams(max_tokens=20)) for _ in range(2)]
        for generation in (*running, engine.submit([5], SamplingParams(max_tokens=2))):
            with pytest.raises(DeviceLostError, match=r"illegal memory access.*isolate=True"):
                generation.result()
    assert len(lost) == 4, "nothing is tried again in a process that has lost its device"
