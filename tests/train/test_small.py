"""A training of a minute or two with a real model, which has nothing but itself to learn from."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from langchain_card import cli
from langchain_card.config import EngineConfig
from langchain_card.core.request import SamplingParams
from langchain_card.engine.engine import Engine
from tests.support import SMALL

QUESTION = "<|im_start|>user\nWhy is the sky blue?<|im_end|>\n<|im_start|>assistant\n"


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["eagle", "specformer"])
def test_six_thousand_tokens_make_a_head_that_is_right_at_times(kind: str, tmp_path: Path) -> None:
    """Half of it is for answers. The work is bounded and not the time, which depends on the machine."""
    out = tmp_path / "head"
    assert cli.main(["train", kind, "--model", SMALL, "--tokens", "6000", "--out", str(out)]) == 0
    described = json.loads((out / "head.json").read_text())
    untrained = described["curve"][0][2]
    assert described["accepted_length"] > untrained + 0.03
    answers = []
    for draft in (None, f"head?file={out}"):
        with Engine(EngineConfig(SMALL, draft, drafters=(), max_model_len=512)) as engine:
            prompt = engine.tokenizer(QUESTION, add_special_tokens=False).input_ids
            params = SamplingParams(max_tokens=100, schedule="plain" if draft is None else "sequential")
            answers.append(engine.submit(prompt, params).result())
    plain, done = answers
    assert done.token_ids == plain.token_ids and done.stats.accepted > 0
