"""The answer is the target's own: equal to the naive loop, token for token, whatever the schedule and the drafter."""

from __future__ import annotations

import naive
import pytest
import torch

from langchain_card.config import EngineConfig
from langchain_card.core.request import SamplingParams
from langchain_card.engine.engine import Engine

PROMPTS = ["def add(a, b):\n    return a + b\n\ndef add(", "the quick brown fox; the quick brown", "x" * 130]
DRAFTERS = {"model": {"ngram": False}, "ngram": {"draft_model": "ngram"}, "both": {}}
NEAR_TIE = 1e-3


@pytest.mark.parametrize("dtype", ["float64", "float32"])
@pytest.mark.parametrize("drafters", DRAFTERS)
def test_equal_to_the_naive_loop(tiny_pair: tuple[str, str], drafters: str, dtype: str) -> None:
    target, draft = tiny_pair
    options = {"draft_model": draft, **DRAFTERS[drafters]}
    config = EngineConfig(model=target, dtype=dtype, max_model_len=512, **options)  # type: ignore[arg-type]
    reference = naive.load(target, getattr(torch, dtype))
    near_ties, accepted, rounds = 0, 0, 0
    with Engine(config) as engine:
        for text in PROMPTS:
            prompt_ids = engine.tokenizer(text).input_ids
            for temperature in (0.0, 0.7):
                sampling = SamplingParams(max_tokens=48, temperature=temperature, seed=7)
                wanted, gaps = naive.generate(reference, prompt_ids, sampling, engine.eos_ids)
                for schedule in ("plain", "sequential", "parallel"):
                    params = SamplingParams(max_tokens=48, temperature=temperature, seed=7, schedule=schedule)
                    got = engine.submit(prompt_ids, params).result()
                    first = next((i for i, (a, b) in enumerate(zip(got.token_ids, wanted)) if a != b), None)  # noqa: B905
                    if first is not None and dtype == "float32" and gaps[first] < NEAR_TIE:
                        near_ties += 1
                        continue
                    assert list(got.token_ids) == wanted, (schedule, temperature, first)
                    accepted += got.stats.accepted
                    rounds += got.stats.rounds if schedule != "plain" else 0
    print(f"{drafters} {dtype}: {accepted} accepted in {rounds} rounds, {near_ties} near-ties")
    assert near_ties <= 2
    if drafters != "ngram":
        assert 0 < accepted < rounds * 8, "the draft must match in part, or the accepted path was not tested"
