"""Child processes on simulated devices: exact answers, and violations that reach the test.

Seconds each: a process imports torch and transformers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from langchain_card.config import EngineConfig
from langchain_card.core.request import SamplingParams
from langchain_card.engine.engine import Engine
from tests.simulation import cuda
from tests.simulation.cuda import simulated_cuda
from tests.support.isolated import process_of
from tests.support.placed import APART, GREEDY, SAMPLED, SCHEDULES, completions
from tests.support.prepared import MARK
from tests.support.processes import gone, wait_until

pytestmark = pytest.mark.usefixtures("one_thread", "always_drafts")

Plain = Callable[[int, dict[str, Any]], list[tuple[int, ...]]]
DRAFTS = [{"draft_transport": "thread"}, {"draft_transport": "process"}]


@pytest.mark.slow  # 8 seconds each
@pytest.mark.parametrize("options", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("execution", ["eager", "graphs"])
def test_a_draft_in_a_process_of_its_own(
    pair: EngineConfig, plain: Plain, execution: str, options: dict[str, Any]
) -> None:
    with simulated_cuda():
        found = completions(replace(pair, **APART, execution=execution), SCHEDULES, 24, options)
    assert [[done.token_ids for done in each] for each in found] == [plain(24, options)] * 3
    assert all(done.stats.accepted for each in found[1:] for done in each)


@pytest.mark.slow  # 6 seconds
def test_a_missing_wait_in_a_drafters_process(pair: EngineConfig, plain: Plain) -> None:
    """The answer is exact, the draft dies of it, and the test would fail."""
    missing = pytest.raises(cuda.MissingWait, match=r"may still .* \(in a child process\)")
    with missing, simulated_cuda(prepare="tests.support.prepared:keep_on_another_stream"):
        found = completions(replace(pair, **APART, execution="eager"), ["parallel"], 6, GREEDY)
        assert [done.token_ids for done in found[0]] == plain(6, GREEDY)


@pytest.mark.slow  # 15 seconds each with a thread, 30 with a process
@pytest.mark.parametrize("drafts", DRAFTS, ids=lambda drafts: drafts["draft_transport"])
@pytest.mark.parametrize("execution", ["eager", "graphs"])
def test_an_engine_that_loses_its_device(
    pair: EngineConfig, plain: Plain, execution: str, drafts: dict[str, str], tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    """All answers go on exactly in the next process."""
    mark = tmp_path / "mark"
    mark.touch()
    monkeypatch.setenv(MARK, str(mark))
    config = replace(pair, **APART, **drafts, execution=execution, isolate=True)
    with simulated_cuda(prepare="tests.support.prepared:lose_the_device"), Engine(config) as engine:
        first = process_of(engine)
        asked = [(options, 50 + 30 * n) for n, options in enumerate((GREEDY, SAMPLED))]
        running = [
            engine.submit([*range(40, end)], SamplingParams(max_tokens=40, schedule="parallel", **options))
            for options, end in asked
        ]
        wait_until(lambda: bool(mark.read_text()), seconds=120)
        mark.unlink()
        found = [generation.result() for generation in running]
        assert gone(first.pid) and process_of(engine).pid != first.pid
    assert [done.token_ids for done in found] == [plain(40, GREEDY)[0], plain(40, SAMPLED)[1]]
    assert any(done.stats.accepted for done in found)
    assert "illegal memory access" in caplog.text
