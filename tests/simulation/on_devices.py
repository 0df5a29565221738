"""A plugin that runs other folders' tests on simulated devices: `pytest -p tests.simulation.on_devices FILES`.

Engines lie where the options say, and draft at any price. A test is skipped if its engine names another device or needs
kernels of a CPU. `make simulate` runs it.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from langchain_card.config import QUANTIZATIONS, EngineConfig
from langchain_card.engine import build
from langchain_card.engine.engine import Engine
from langchain_card.models.download import BUILTINS
from tests.simulation.cuda import Simulation, simulated_cuda
from tests.simulation.cuda.children import take_violations
from tests.support.placed import PLACEMENTS, policy

VARIABLE = "CARD_TEST_PLACEMENT"
NUM_SEQS = 3
"""Requests at once where a test leaves that to the engine: a capture for each of 16 would take a minute here."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--placement", choices=[*PLACEMENTS], default="two devices", help="where target and draft lie")
    parser.addoption("--execution", choices=["eager", "graphs"], default="graphs", help="how steps run")


@pytest.fixture(scope="session", autouse=True)
def _devices(request: pytest.FixtureRequest) -> Iterator[Simulation]:
    placement, execution = map(request.config.getoption, ("--placement", "--execution"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(VARIABLE, json.dumps({**PLACEMENTS[placement], "execution": execution}))
        with simulated_cuda(check=False, prepare=f"{__name__}:place_engines") as simulation:
            place_engines(patch)
            yield simulation


@pytest.fixture(autouse=True)
def _no_violation(_devices: Simulation) -> Iterator[None]:
    yield
    violations = [*_devices.violations, *take_violations()]
    _devices.violations.clear()
    assert not violations


def place_engines(patch: pytest.MonkeyPatch | None = None) -> None:
    """Place the engines of this process."""
    options, patch = json.loads(os.environ[VARIABLE]), patch or pytest.MonkeyPatch()
    check, init = EngineConfig.__post_init__, Engine.__init__

    def placed(config: EngineConfig) -> None:
        here = {"device": "cpu", "draft_device": "cpu"} if needs_cpu(config) else options
        for name, value in here.items():
            if getattr(config, name) == "auto":
                object.__setattr__(config, name, value)
        check(config)

    def begin(engine: Engine, config: EngineConfig | None = None, **others: Any) -> None:
        config = config or EngineConfig()
        if config.device != options["device"]:
            pytest.skip("needs kernels of a CPU" if needs_cpu(config) else f"names its own device, {config.device}")
        if config.limits.max_num_seqs is None and config.exact != "strict":
            config = replace(config, limits=replace(config.limits, max_num_seqs=NUM_SEQS))
        init(engine, config, **others)

    patch.setattr(EngineConfig, "__post_init__", placed)
    patch.setattr(Engine, "__init__", begin)
    patch.setattr(build, "Controller", policy)


def needs_cpu(config: EngineConfig) -> bool:
    """Return whether a configuration has weights in blocks, or integer keys."""
    in_blocks = config.quantization in QUANTIZATIONS or config.model in BUILTINS or config.model.endswith(".gguf")
    return in_blocks or config.kv_dtype == "int8"
