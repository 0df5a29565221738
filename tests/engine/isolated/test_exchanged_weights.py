"""Weights that are exchanged on disk between two lives of an engine: no answer is a mixture of two models."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from langchain_card.config import EngineConfig
from langchain_card.core.request import SamplingParams
from langchain_card.engine.engine import Engine
from langchain_card.errors import EngineError
from langchain_card.limits import Limits
from tests.support import tiny
from tests.support.isolated import pool_of, process_of
from tests.support.processes import wait_until

pytestmark = pytest.mark.usefixtures("one_thread")

PROMPT = [*range(40, 60)]
PARAMS = SamplingParams(max_tokens=400, banned_ids=tuple(range(256, tiny.VOCAB)))  # not the end of text


def negate(file: Path) -> None:
    """Turn the last layer norm around: the likeliest token becomes the least likely."""
    weights = load_file(file)
    weights["model.norm.weight"] *= -1
    save_file(weights, file, {"format": "pt"})


@pytest.mark.slow
def test_an_answer_that_another_model_began_ends(tmp_path: Path) -> None:
    """Fifteen seconds: two processes import torch and transformers, the second one with other weights.

    A request that had not begun is answered by those alone.
    """
    target = Path(tiny.make_target("llama", tmp_path / "target"))
    limits = Limits(max_num_seqs=1, restart_seconds=0.01)
    options = {"device": "cpu", "dtype": "float64", "max_model_len": 512, "limits": limits}
    exchanged = Path(shutil.copytree(target, tmp_path / "exchanged"))
    negate(exchanged / "model.safetensors")
    with Engine(EngineConfig(str(target), None, **options)) as engine:  # type: ignore[arg-type]
        old = engine.submit(PROMPT, PARAMS).result().token_ids
    with Engine(EngineConfig(str(exchanged), None, **options)) as engine:  # type: ignore[arg-type]
        new = engine.submit(PROMPT, PARAMS).result().token_ids
    assert old[:3] != new[:3]
    with Engine(EngineConfig(str(target), None, isolate=True, **options)) as engine:  # type: ignore[arg-type]
        begun, waiting = engine.submit(PROMPT, PARAMS), engine.submit(PROMPT, PARAMS)
        pieces = iter(begun)
        taken = [next(pieces).token_id for _ in range(3)]
        victim = process_of(engine)
        victim.suspend()  # it writes no more
        negate(target / "model.safetensors")
        victim.kill()
        with pytest.raises(EngineError, match="is another one now than the one that began this answer"):
            for piece in pieces:
                taken.append(piece.token_id)  # noqa: PERF401 - up to the error
        assert tuple(taken) == old[: len(taken)] and len(taken) < len(old)
        assert waiting.result().token_ids == new
        wait_until(lambda: pool_of(engine).processes[0].is_up)
