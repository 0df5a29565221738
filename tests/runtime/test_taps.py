"""States between layers: those of transformers in float64, and in int8 the same bits whatever rows are beside."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from langchain_card.config import EngineConfig
from langchain_card.errors import InvalidInputError
from langchain_card.models.loader import acquire_model, load_model, release_model, resolve
from langchain_card.runtime.kv_cache import KVCache
from langchain_card.runtime.rows import Rows
from langchain_card.runtime.runner import ModelRunner
from langchain_card.runtime.taps import Taps

pytestmark = pytest.mark.usefixtures("one_thread")

LAYERS = (0,)  # of two; after the last one, transformers has the states behind the norm
TEXTS = [[random.Random(seed).randrange(256) for _ in range(length)] for seed, length in enumerate((150, 20, 43))]


class Reference:
    """States by transformers, of whole texts."""

    def __init__(self, folder: str) -> None:
        self._model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)

    @torch.inference_mode()
    def states(self, token_ids: list[int]) -> Tensor:
        """Return the states of each token, [tokens, features]."""
        found: Tensor = self._model(torch.tensor([token_ids]), output_hidden_states=True).hidden_states[LAYERS[0] + 1]
        return found[0]


def equal(runner: ModelRunner, rows: slice, wanted: Tensor) -> None:
    assert runner.states is not None
    torch.testing.assert_close(runner.states[0, rows], wanted, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("form", ["rows", "grids", "width"])
@pytest.mark.parametrize("arch", ["llama", "qwen3", "gemma3"])
def test_states_are_those_of_transformers(tiny_pairs: dict[str, tuple[str, str]], arch: str, form: str) -> None:
    """Texts in chunks, beside windows and each other; trees; kept rows and forgotten ones; a prefix that is known."""
    folder = tiny_pairs[arch][0]
    reference, model = Reference(folder), load_model(resolve(EngineConfig(folder, None, dtype="float64")).target)
    forms: dict[str, dict[str, Any]] = {"rows": {}, "grids": {"execution": "eager"}, "width": {"width": 16}}
    options = forms[form]
    runner = ModelRunner(model, max_len=512, num_scratch=16, num_seqs=3, taps=Taps(model, LAYERS), **options)
    long, short, third = TEXTS
    cache, other = runner.open(), runner.open()
    runner.step([Rows(cache, long[:70], 0)])
    equal(runner, slice(0, 70), reference.states(long[:70]))
    runner.step([Rows(cache, long[70:], 70), Rows(other, short, 0)])
    equal(runner, slice(0, 80), reference.states(long)[70:])
    equal(runner, slice(80, 100), reference.states(short))

    paths, tokens = [(2,), (2, 5), (2, 5, 9), (2, 0), (2, 5, 1)], [7, 8, 9, 10, 11]
    chains = [[7], [7, 8], [7, 8, 9], [7, 10], [7, 8, 11]]
    late = runner.open()
    runner.step([Rows(other, [3], len(short), [(4,)]), Rows(cache, tokens, len(long), paths), Rows(late, third, 0)])
    equal(runner, slice(0, 1), reference.states([*short, 3])[-1:])
    for row, chain in enumerate(chains, 1):
        equal(runner, slice(row, row + 1), reference.states([*long, *chain])[-1:])
    equal(runner, slice(6, 49), reference.states(third))

    cache.keep([2, 5, 1], [7, 8, 11])  # the others are forgotten
    runner.step([Rows(cache, [12, 13], cache.length, [(0,), (0, 2)])])
    equal(runner, slice(0, 2), reference.states([*long, 7, 8, 11, 12, 13])[-2:])
    for each in (cache, other, late):
        runner.close(each)
    again: KVCache = runner.open([*long, 7, 8, 1, 2])
    assert again.length == len(long) + 2
    runner.step([Rows(again, [1, 2], again.length)])
    equal(runner, slice(0, 2), reference.states([*long, 7, 8, 1, 2])[-2:])


def test_a_model_is_shared_by_runners_with_other_taps(tiny_pairs: dict[str, tuple[str, str]]) -> None:
    folder = tiny_pairs["llama"][0]
    model, text = load_model(resolve(EngineConfig(folder, None, dtype="float64")).target), TEXTS[1]
    taps = Taps(model, (0, 1))
    tapped, plain = (ModelRunner(model, max_len=64, num_scratch=4, num_seqs=2, taps=each) for each in (taps, None))
    for runner in (tapped, plain):
        runner.prefill(runner.open(), text)
    assert tapped.states is not None and tapped.states.shape == (2, len(text), 64) and plain.states is None
    before = tapped.states.clone()
    plain.prefill(plain.open(), text[::-1])
    assert torch.equal(tapped.states, before)
    taps.remove()
    with pytest.raises(InvalidInputError, match="taps = 2: must be a whole number between 0 and 1"):
        Taps(model, (2,))


def test_states_of_quantized_layers_have_the_same_bits_beside_any_rows() -> None:
    """SmolLM2 in int8, whose layers run in one call: alone, beside a text and a window; logits do not change."""
    pair = resolve(EngineConfig(model="smollm2-135m", draft_model=None))
    model, text = acquire_model(pair.target), pair.tokenizer("def mean(numbers):\n    return sum(numbers)").input_ids
    try:
        plain = ModelRunner(model, max_len=256, num_scratch=16, num_seqs=2, integer_kv=True)
        taps = Taps(model, (2, 15, 29))
        tapped = ModelRunner(model, max_len=256, num_scratch=16, num_seqs=2, integer_kv=True, taps=taps)
        found, logits = [], []
        for runner, count, beside in ((plain, 0, False), (tapped, 0, False), (tapped, 6, False), (tapped, 9, True)):
            runner.pool.forget()
            cache, other = runner.open(), runner.open()
            runner.prefill(cache, text)
            paths = [(0,), (0, 1), (0, 2), *((0, 3 + n) for n in range(count))]
            window = Rows(cache, [10, 20, 30, *range(40, 40 + count)], len(text), paths)
            logits.append(runner.step([*([Rows(other, text[::-1], 0)] * beside), window])[:3])
            if runner is tapped:
                assert runner.states is not None
                found.append(runner.states[:, len(text) * beside :][:, :3])
        assert all(torch.equal(found[0], other) for other in found[1:])
        assert all(torch.equal(logits[0], other) for other in logits[1:])
        with torch.inference_mode():
            last = model.lm_head(model.get_decoder().norm(found[0][2][None]))[0]
        torch.testing.assert_close(last, logits[0])
        taps.remove()
    finally:
        release_model(pair.target)
