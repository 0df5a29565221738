"""A process that has lost its device ends, and all its answers go on in the next one."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from langchain_card.config import EngineConfig
from langchain_card.core.request import SamplingParams
from langchain_card.engine.engine import Engine
from langchain_card.limits import Limits
from tests.support import packages, tiny
from tests.support.isolated import process_of
from tests.support.processes import gone, wait_until

pytestmark = pytest.mark.usefixtures("one_thread")

PLUG_IN = '''
from pathlib import Path
import torch

class Failing:
    """Every pass fails from the fourth on, as after an illegal access; in processes without the mark, none does."""

    def __init__(self, setting, mark=""):
        self.mark, self.passes = Path(mark), 0

    def __call__(self, logits, histories):
        self.passes += 1
        if self.passes > 3 and self.mark.exists():
            self.mark.write_text(str(self.passes))
            raise torch.AcceleratorError("CUDA error: an illegal memory access was encountered")
        return logits
'''


@pytest.mark.slow
def test_answers_go_on_in_the_next_process(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Half a minute beside other work: two processes import torch and transformers."""
    (tmp_path / "failing.py").write_text(PLUG_IN)
    with packages.installed(tmp_path, "failing", kind="steering", failing="failing:Failing"):
        _go_on(tmp_path)
    assert "illegal memory access" in caplog.text


def _go_on(tmp_path: Path) -> None:
    mark = tmp_path / "mark"
    config = EngineConfig(
        tiny.make_target("llama", tmp_path / "target"), None, dtype="float64", max_model_len=256,
        steering=f"failing?mark={mark}", limits=Limits(max_num_seqs=2, restart_seconds=0.01),
    )  # fmt: skip
    asked = [([*range(40, 50 + n)], SamplingParams(max_tokens=20, seed=n, temperature=float(n))) for n in range(2)]
    with Engine(config) as engine:
        wanted = [engine.submit(*each).result().token_ids for each in asked]
    mark.touch()
    with Engine(replace(config, isolate=True)) as engine:
        first = process_of(engine)
        generations = [engine.submit(*each) for each in asked]
        wait_until(lambda: bool(mark.read_text()), seconds=60)
        mark.unlink()
        assert [generation.result().token_ids for generation in generations] == wanted
        assert gone(first.pid) and process_of(engine).pid != first.pid
