"""`exact="strict"`: in any dtype the same bits as plain decoding, whatever the schedule, the batch and the past."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from langchain_card.config import EngineConfig
from langchain_card.core.request import SamplingParams
from langchain_card.engine import build
from langchain_card.engine.engine import Engine
from langchain_card.limits import Limits
from langchain_card.runtime import threads
from tests.simulation import FixedPolicy
from tests.support import tiny

Pairs = dict[str, tuple[str, str]]
PROMPTS = ["def add(a, b):\n    return a + b\n\ndef add(", "the quick brown fox; the quick brown", "x" * 70]
ALLOWED: Any = {"banned_ids": tuple(range(256, tiny.VOCAB))}  # not all ids are the tokenizer's


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> Any:
    """One thread, and as many candidates as there are: what a controller would verify depends on the hour."""
    monkeypatch.setattr(build, "Controller", lambda **_: FixedPolicy())
    monkeypatch.setattr(threads, "num_cores", lambda: 1)
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("arch", ["qwen2", pytest.param("gemma3", marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "dtype", ["bfloat16", *(pytest.param(d, marks=pytest.mark.slow) for d in ("float16", "float32"))]
)
def test_equal_to_plain_decoding_in_any_dtype(tiny_pairs: Pairs, arch: str, dtype: str) -> None:
    limits = Limits(max_window=8, max_num_seqs=3)
    config = EngineConfig(*tiny_pairs[arch], dtype=dtype, exact="strict", max_model_len=384, limits=limits)
    asked = [tiny.byte_tokenizer()(text).input_ids for text in PROMPTS]
    accepted = 0
    with Engine(config) as engine:
        options: list[Any] = [{}, {"temperature": 0.8, "seed": 4}, {"repetition_penalty": 1.2}]
        plain = [
            engine.submit(ids, SamplingParams(max_tokens=40, schedule="plain", **own, **ALLOWED)).result().token_ids
            for ids, own in zip(asked, options, strict=True)
        ]
        for schedule in ("sequential", "parallel"):
            running = [
                engine.submit(ids, SamplingParams(max_tokens=40, schedule=schedule, **own, **ALLOWED))  # type: ignore[arg-type]
                for ids, own in zip(asked, options, strict=True)
            ]
            for generation, wanted in zip(running, plain, strict=True):
                completion = generation.result()
                accepted += completion.stats.accepted
                assert completion.token_ids == wanted
        again = engine.submit([*asked[0], *plain[0]], SamplingParams(max_tokens=20, **ALLOWED)).result()
    with Engine(config) as engine:
        fresh = engine.submit([*asked[0], *plain[0]], SamplingParams(max_tokens=20, **ALLOWED)).result()
    assert again.stats.cached_tokens > fresh.stats.cached_tokens == 0
    assert again.token_ids == fresh.token_ids
    assert accepted > 60
