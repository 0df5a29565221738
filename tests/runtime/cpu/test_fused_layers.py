"""Decoder layers in compiled passes: which are replaced, what they compute, and that a row's bits are its own."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import transformers as t

from langchain_card.config import EngineConfig
from langchain_card.models import loader
from langchain_card.models.loader import load_model, resolve
from langchain_card.runtime.cpu import row_attention, row_kernels
from langchain_card.runtime.cpu.common_model import CommonModel
from langchain_card.runtime.cpu.fused_layers import FusedLayer, FusedStack
from langchain_card.runtime.cpu.team import cores
from langchain_card.runtime.rows import Rows
from langchain_card.runtime.runner import ModelRunner
from langchain_card.runtime.threads import use_threads
from tests.support import tiny
from tests.support.integer_kv import rotate

TEXT = [(7 * i * i + 3 * i) % 250 for i in range(70)]
SHAPE = tiny.SHAPE
ODD: dict[str, Any] = {
    "another activation": lambda: t.LlamaConfig(**SHAPE, hidden_act="gelu"),
    "a bias after attention": lambda: t.LlamaConfig(**SHAPE, attention_bias=True),
    "scaled residuals": lambda: t.GraniteConfig(**SHAPE, residual_multiplier=0.5),
    "norms behind": lambda: t.Olmo2Config(**SHAPE),
    "norms of one more": lambda: t.Gemma2Config(**SHAPE, head_dim=32, sliding_window=24),
    "queries scaled by position": lambda: t.Ministral3Config(**SHAPE, head_dim=16),
    "one matrix for three": lambda: t.Phi3Config(**SHAPE, pad_token_id=0),
}


@pytest.fixture
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """A random model of an architecture."""
    config = (tiny.FAMILIES if request.param.endswith("sliding") else tiny.CONFIGS)[request.param.split()[0]]()
    return random_model(config, tmp_path)


def random_model(config: Any, tmp_path: Path) -> str:
    """A random model, its norms and biases random, too."""
    torch.manual_seed(0)
    config.eos_token_id = 0
    model = t.AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.uniform_(-1, 2)
    return tiny.save(model, tmp_path / "model")


def logits(model: Any) -> torch.Tensor:
    """After each token of a text, in windows of 16 rows."""
    runner = ModelRunner(model, max_len=128, num_scratch=16)
    return torch.cat([*runner.follow(runner.open(), TEXT)])


def both(folder: str) -> tuple[Any, Any]:
    """The model as it is loaded, and with transformers' own decoder layers over the same linear ones."""
    spec = resolve(EngineConfig(folder, None, quantization="int8")).target
    return load_model(spec), load_model(spec, fused=False)


def num_fused(model: Any) -> int:
    return sum(isinstance(module, FusedLayer) for module in model.modules())


@pytest.mark.parametrize("folder", ["llama", "qwen2", "qwen3", "mistral"], indirect=True)
def test_layers_of_the_common_kind_are_replaced(folder: str) -> None:
    got, wanted = both(folder)
    assert (num_fused(got), num_fused(wanted)) == (2, 0)
    a, b = logits(got), logits(wanted)
    assert (a - b).norm() < 0.02 * b.norm()


WIDE: dict[str, Any] = {"sliding_window": None}
COMMON: dict[str, Any] = {
    "llama": lambda: t.LlamaConfig(**SHAPE, tie_word_embeddings=True),
    "heads of four": lambda: t.LlamaConfig(**{**SHAPE, "hidden_size": 16, "num_key_value_heads": 4}),
    "three heads": lambda: t.LlamaConfig(
        **{**SHAPE, "hidden_size": 48, "num_attention_heads": 3, "num_key_value_heads": 1}
    ),
    "qwen2": lambda: t.Qwen2Config(**SHAPE),
    "qwen3": lambda: t.Qwen3Config(**SHAPE, head_dim=32),
    "mistral": lambda: t.MistralConfig(**SHAPE, **WIDE),
}


@pytest.mark.parametrize("name", COMMON)
def test_a_common_model_has_the_bits_of_transformers_own_class(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = resolve(EngineConfig(random_model(COMMON[name](), tmp_path), None, quantization="int8")).target
    common = load_model(spec)
    monkeypatch.setattr(loader, "is_common", lambda config: False)
    assert isinstance(common, CommonModel) and not isinstance(wanted := load_model(spec), CommonModel)
    assert logits(common).equal(logits(wanted))


@pytest.mark.parametrize("folder", ["qwen2", "qwen3", "mistral", "qwen2 sliding", "qwen3 sliding"], indirect=True)
def test_one_by_one_they_give_the_same_bits_as_in_one_call(folder: str) -> None:
    model = load_model(resolve(EngineConfig(folder, None, quantization="int8")).target)
    (stack,) = model.get_decoder().layers
    assert isinstance(stack, FusedStack)
    together = logits(model)
    model.get_decoder().layers = stack.stacked_layers
    assert torch.equal(logits(model), together)


@pytest.mark.parametrize("name", ODD)
def test_others_stay_what_they_are(name: str, tmp_path: Any) -> None:
    folder = tiny.save_random(ODD[name](), tmp_path)
    model = load_model(resolve(EngineConfig(folder, None, quantization="int8")).target)
    assert num_fused(model) == 0


@pytest.mark.parametrize("planted", ["norms", "rotation", "bias", "scaling"])
@pytest.mark.parametrize("folder", ["qwen2 sliding"], indirect=True)
def test_planted_layer_that_computes_something_else_is_not_taken(
    folder: str, planted: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    init = FusedLayer.__init__

    def spoil(self: Any, *args: Any) -> None:
        init(self, *args)
        if planted == "norms":
            self._norms.reverse()
        elif planted == "rotation":
            own = self.forward
            self.forward = lambda x, position_embeddings, step: own(
                x, position_embeddings=(position_embeddings[0], -position_embeddings[1]), step=step
            )
        elif planted == "bias":
            self._bias = self._bias * 0
        else:
            self._options = self._options._replace(scaling=0.1)

    spec = resolve(EngineConfig(folder, None, quantization="int8")).target
    assert num_fused(load_model(spec)) == 2
    monkeypatch.setattr(FusedLayer, "__init__", spoil)
    assert num_fused(load_model(spec)) == 0


def test_passes_compute_what_torch_does() -> None:
    generator = torch.Generator().manual_seed(0)
    for size in (64, 96, 896):
        x = torch.randn(5, size, generator=generator) * torch.logspace(-3, 3, 5)[:, None]
        weight = torch.rand(size, generator=generator)
        out, scale = np.empty((5, size), np.float32), np.empty(5, np.float32)
        for n in range(5):
            factor = row_kernels.norm_factor(x[n].numpy(), np.float32(1e-6))
            row_kernels.norm_row(x[n].numpy(), weight.numpy(), factor, out[n])
            scale[n] = row_kernels.scale_row(out[n])
        assert abs(out).max() == pytest.approx(1)
        wanted = rotate(F.rms_norm(x, (size,), weight, 1e-6))
        torch.testing.assert_close(torch.from_numpy(out * scale[:, None]), wanted, rtol=1e-4, atol=1e-5)
        y = 9 * torch.randn(5, 2 * size, generator=generator)
        for n in range(5):
            row_kernels.gate_row(y[n, :size].numpy(), y[n, size:].numpy(), out[n], np.empty(size, np.int32))
            scale[n] = row_kernels.scale_row(out[n])
        gate, up = y.split(size, dim=1)
        wanted = rotate(F.silu(gate) * up)
        torch.testing.assert_close(torch.from_numpy(out * scale[:, None]), wanted, rtol=1e-4, atol=1e-4)


def test_exponentials_over_all_that_may_come() -> None:
    x = np.linspace(-200, 87, 10_001, dtype=np.float32)
    got = x.copy()
    row_kernels.exp(got, np.empty(len(x), np.int32))
    wanted = np.exp(np.maximum(x, -87).astype(np.float64))
    assert abs(got / wanted - 1).max() < 3e-7


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize(("softcap", "shift"), [(0.0, 0.0), (3.0, 0.0), (200.0, -110.0)])
@pytest.mark.parametrize("window", [1 << 62, 7])
@pytest.mark.parametrize("threads", [1, 2])
def test_attention_is_that_of_torch(dtype: Any, softcap: float, shift: float, window: int, threads: int) -> None:
    """Two rows on a path of four, behind 21 positions; the others' slots hold what must not be seen."""
    generator = np.random.default_rng(0)
    q = generator.standard_normal((2, 6, 16)).astype(dtype)
    kv = np.full((2, 3, 64, 16), math.nan, dtype)
    seen = [[*range(10, 31), 2, 5], [*range(10, 31), 2, 7, 8, 3]]
    for slot in {slot for path in seen for slot in path}:
        kv[:, :, slot] = generator.standard_normal((2, 3, 16))
    q[..., 0], kv[0, ..., 0] = 1, shift / 0.3  # moves all scores far from the cap, where exponentials end
    own = np.array([path[-1] for path in seen])
    k, v = kv[:, :, own].transpose(0, 2, 1, 3).copy()
    kv[:, :, own] = math.nan
    rows = row_attention.Seen(
        own, np.array([10, 10]), np.array([21, 21]), np.array([2, 5, 2, 7, 8, 3]), np.array([2, 6])
    )
    heads = row_attention.Heads(window, 0.3, softcap)
    use_threads(threads)
    with cores() as team:
        out = row_attention.attend(q, k, v, kv, rows, heads, team)
    for row in range(2):
        key, value = torch.from_numpy(kv[:, :, seen[row][-window:]]).repeat_interleave(2, dim=1)
        scores = torch.einsum("hd,hkd->hk", torch.from_numpy(q[row]), key) * 0.3
        scores = torch.tanh(scores / softcap) * softcap if softcap else scores
        wanted = torch.einsum("hk,hkd->hd", scores.softmax(-1), value)
        torch.testing.assert_close(torch.from_numpy(out[row]), wanted, rtol=1e-5, atol=1e-4 if shift else 1e-6)


@pytest.mark.parametrize("folder", ["qwen3"], indirect=True)
def test_a_rows_bits_are_its_own(folder: str) -> None:
    model = load_model(resolve(EngineConfig(folder, None, quantization="int8")).target)
    runner = ModelRunner(model, max_len=128, num_scratch=16)
    cache = runner.open()
    runner.prefill(cache, TEXT[:40])
    paths = [tuple(range(i + 1)) for i in range(9)]
    whole = runner.step([Rows(cache, TEXT[40:49], 40, paths)])
    other = runner.step([Rows(cache, [*TEXT[40:44], 3, *TEXT[44:49]], 40, [*paths[:4], (0, 1, 12), *paths[4:]])])
    assert torch.equal(torch.cat([other[:4], other[5:]]), whole)
    runner.step([Rows(cache, TEXT[40:49], 40)])
    read = runner.step([Rows(cache, TEXT[49:50], 49, [(0,)])])
    runner.pool.forget()
    cache = runner.open()
    rows = list(runner.follow(cache, TEXT[:49]))
    assert torch.equal(runner.step([Rows(cache, TEXT[49:50], 49, [(0,)])]), read)
    assert torch.equal(torch.cat(rows)[40:49], whole)
