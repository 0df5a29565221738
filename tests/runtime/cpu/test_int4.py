"""4-bit products of drafts: the kernel against plain arithmetic on the same levels, and a draft that uses it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
import transformers as t
from langchain_card.runtime.cpu.integer_layers import IntegerLinear, IntegerPart

from langchain_card.config import EngineConfig
from langchain_card.core.request import SamplingParams
from langchain_card.engine import build
from langchain_card.engine.engine import Engine
from langchain_card.models import draft_form
from langchain_card.models.loader import load_model, resolve
from langchain_card.runtime.cpu import fused_layers, int4, matmul_kernel
from langchain_card.runtime.cpu import integer_matmul as products
from langchain_card.runtime.cpu.int8 import quantize_rows
from tests.simulation import FixedPolicy
from tests.support import tiny

pytestmark = pytest.mark.skipif(matmul_kernel.instructions() is None, reason="this CPU lacks AVX2")


def layers(out: int, features: int) -> tuple[IntegerLinear, IntegerLinear]:
    """One in 8 bits and in 4."""
    weight = quantize_rows(torch.randn(out, features, generator=torch.Generator().manual_seed(out)))
    rounded = IntegerLinear(*weight)
    int4.to_4_bits(rounded)
    return IntegerLinear(*weight), rounded


def matrix(layer: IntegerLinear) -> np.ndarray:
    weight, scales = layer.weights.unpack()
    groups = weight.reshape(len(weight), scales.shape[1], -1).astype(np.float64) * scales[..., None]
    return groups.reshape(weight.shape)


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("rows", range(1, 18))
@pytest.mark.parametrize("shape", [(4, 128), (52, 256), (1152, 896)])
def test_products_are_those_of_the_levels(shape: tuple[int, int], rows: int, threads: int) -> None:
    _, layer = layers(*shape)
    x = np.random.default_rng(rows).uniform(-1, 1, (rows, shape[1])).astype(np.float32)
    x[0, 0], x[-1, -1] = -1, 1
    levels, begin = products.empty_levels(rows, layer.weights)
    for n in range(rows):
        products.set_levels(x[n], n, layer.weights, levels, begin)
    got = products.multiply(levels, begin, layer.weights, threads)[:, : shape[0]]
    wanted = np.rint(x * np.float32(127)).astype(np.float64) @ matrix(layer).T / 127
    assert abs(got - wanted).max() < 1e-6 * abs(wanted).max()


def test_weights_are_rounded_to_the_next_of_sixteen_levels() -> None:
    whole, layer = (matrix(layer) for layer in layers(64, 256))
    step = layers(64, 256)[1].weights.unpack()[1].repeat(int4.GROUP, axis=1)
    assert (abs(layer - whole) <= 0.5001 * step).mean() > 0.99
    assert (abs(layer - whole) <= 1.0001 * step).all(), "the largest may be cut by half a level"


def test_features_that_are_no_whole_groups_stay_in_int8() -> None:
    whole, layer = layers(52, 192)
    x = torch.randn(3, 192)
    assert torch.equal(layer(x), whole(x))


@pytest.fixture
def pair(tmp_path: Path) -> tuple[str, str]:
    config = t.Qwen2Config(**{**tiny.SHAPE, "hidden_size": 128, "intermediate_size": 256})
    target = tiny.save_random(config, tmp_path / "target")
    return target, tiny.make_draft(target, tmp_path / "draft", noise=0.02)


def num_nibbles(model: torch.nn.Module) -> int:
    linear = [module for module in model.modules() if isinstance(module, IntegerLinear)]
    return sum(layer.weights.offset == products.NIBBLE_OFFSET for layer in linear)


def test_drafts_get_it_and_targets_do_not(pair: tuple[str, str]) -> None:
    found = resolve(EngineConfig(*pair, quantization="int8"))
    assert found.draft is not None
    draft, target = load_model(found.draft), load_model(found.target)
    assert (num_nibbles(draft), num_nibbles(target)) == (2 * 4 + 1, 0)
    assert all(isinstance(layer, fused_layers.FusedStack) for layer in draft.get_decoder().layers)


def test_stacked_layers_of_unfused_models_get_it(tmp_path: Path) -> None:
    shape = {**tiny.SHAPE, "hidden_size": 128, "intermediate_size": 256}
    target = tiny.save_random(t.Gemma2Config(**shape, head_dim=32), tmp_path / "target")
    draft_model = tiny.make_draft(target, tmp_path / "draft", noise=0.02)
    found = resolve(EngineConfig(target, draft_model, quantization="int8"))
    assert found.draft is not None
    draft = load_model(found.draft)
    wholes = {id(part.whole): part.whole for part in draft.modules() if isinstance(part, IntegerPart)}
    assert len(wholes) == 2 * 2
    assert all(whole.weights.offset == products.NIBBLE_OFFSET for whole in wholes.values())


@pytest.mark.parametrize("transport", ["thread", "process"])
@pytest.mark.slow
def test_a_draft_in_4_bits_changes_no_answer(
    pair: tuple[str, str], transport: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(build, "Controller", lambda **_: FixedPolicy())
    config = EngineConfig(*pair, quantization="int8", drafters=(), draft_transport=transport)  # type: ignore[arg-type]
    with Engine(config) as opened:
        plain = opened.submit(range(40), SamplingParams(max_tokens=80, schedule="plain")).result()
        for schedule in ("sequential", "parallel"):
            done = opened.submit(range(40), SamplingParams(max_tokens=80, schedule=schedule)).result()  # type: ignore[arg-type]
            assert done.token_ids == plain.token_ids
            assert done.stats.accepted > 5


def test_float_drafts_stay_what_they_are(pair: tuple[str, str]) -> None:
    found = resolve(EngineConfig(*pair, dtype="float64"))
    assert found.draft is not None and not found.draft.draft
    assert draft_form.HEAD > tiny.VOCAB
