"""A plugin that runs other folders' tests on simulated devices: `pytest -p tests.simulation.on_devices FILES`.

Engines lie where the options say, and draft at any price. A test is skipped if its engine names another device or needs
kernels of a CPU. `make simulate` runs it.
"""

from __future__ import annotations

import contextlib
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

ON_A_CPU = {"test_in_blocks_an_adapter_costs_what_rounding_the_merged_model_costs"}
"""Tests that compare floats with weights in blocks, without an engine."""

_SIMULATION = pytest.StashKey[Simulation]()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--placement", choices=[*PLACEMENTS], default="two devices", help="where target and draft lie")
    parser.addoption("--execution", choices=["eager", "graphs"], default="graphs", help="how steps run")


def pytest_configure(config: pytest.Config) -> None:
    """Begin before tests are collected: some are skipped where CUDA is."""
    options = {**PLACEMENTS[config.getoption("--placement")], "execution": config.getoption("--execution")}
    stack = contextlib.ExitStack()
    config.add_cleanup(stack.close)
    patch = stack.enter_context(pytest.MonkeyPatch.context())
    patch.setenv(VARIABLE, json.dumps(options))
    config.stash[_SIMULATION] = stack.enter_context(simulated_cuda(check=False, prepare=f"{__name__}:place_engines"))
    place_engines(patch)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if getattr(item, "originalname", "") in ON_A_CPU:
            item.add_marker(pytest.mark.skip(reason="needs kernels of a CPU"))


@pytest.fixture(autouse=True)
def _no_violation(request: pytest.FixtureRequest) -> Iterator[None]:
    simulation = request.config.stash[_SIMULATION]
    yield
    violations = [*simulation.violations, *take_violations()]
    simulation.violations.clear()
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
