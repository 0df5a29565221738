"""GGUF files that run as they are: every format in one small file, and odd files, which are refused by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from langchain_card.config import EngineConfig
from langchain_card.errors import CARDError, CorruptModelError, ModelStoreError
from langchain_card.models import loader
from langchain_card.models.block_index import INDEX, read_tensors
from langchain_card.models.loader import load_model, resolve
from langchain_card.models.store import ModelStore
from langchain_card.runtime.cpu.blocks.formats import FORMATS
from langchain_card.runtime.cpu.quantized_layers import FloatLinear, LinearPart, QuantizedLinear
from langchain_card.runtime.runner import ModelRunner
from tests.support.blocks import blocks
from tests.support.tiny import tiny_gguf

SHAPES = {
    "token_embd": ("Q6_K", 4, 256),
    "blk.0.attn_q": ("Q4_K", 256, 256),
    "blk.0.attn_k": ("Q5_K", 128, 256),
    "blk.0.attn_v": ("Q6_K", 128, 256),
    "blk.0.attn_output": ("Q4_0", 256, 256),
    "blk.0.ffn_gate": ("Q4_1", 512, 256),
    "blk.0.ffn_up": ("Q5_0", 512, 256),
    "blk.0.ffn_down": ("F16", 256, 512),
    "output": ("Q5_1", 4, 256),
}
OURS = {
    "token_embd": "model.embed_tokens",
    "blk.0.attn_v": "model.layers.0.self_attn.v_proj",
    "blk.0.attn_output": "model.layers.0.self_attn.o_proj",
    "blk.0.ffn_gate": "model.layers.0.mlp.gate_proj",
    "blk.0.ffn_up": "model.layers.0.mlp.up_proj",
    "blk.0.ffn_down": "model.layers.0.mlp.down_proj",
    "output": "lm_head",
}


def data_of(kind: str, rows: int, features: int, seed: int) -> Any:
    """Random blocks with small factors, or float16."""
    own = next((form for form in FORMATS if form.name == kind), None)
    if own is not None:
        return blocks(own, rows, seed, features=features, size=4e-4 if own.features == 256 else 5e-3)
    rng = np.random.default_rng(seed)
    if kind == "F16":
        return (0.05 * rng.standard_normal((rows, features))).astype(np.float16)
    count, size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
    return rng.integers(0, 256, (rows, features // count * size), dtype=np.uint8)


def small_file(path: Path, changed: dict[str, str | None]) -> Path:
    """A file with every format; a changed matrix has another one, or is left out."""
    tensors: dict[str, tuple[str, Any]] = {
        f"{name}.weight": ("F32", np.ones(256, np.float32))
        for name in ("blk.0.attn_norm", "blk.0.ffn_norm", "output_norm")
    }
    for seed, (name, (kind, rows, features)) in enumerate(SHAPES.items()):
        if (own := changed.get(name, kind)) is not None:
            tensors[f"{name}.weight"] = (own, data_of(own, rows, features, seed))
    return tiny_gguf(path, tensors=tensors, embedding_length=256, feed_forward_length=512)


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LANGCHAIN_CARD_HOME", str(tmp_path / "cache"))


def test_every_format_in_one_file(tmp_path: Path) -> None:
    path = small_file(tmp_path / "a.gguf", {})
    spec = resolve(EngineConfig(str(path), None)).target
    assert spec.form == "file"
    assert not list((tmp_path / "cache").rglob("*.blocks")), "the blocks stay where they are"
    found = read_tensors(spec.folder)
    for tensor in gguf.GGUFReader(path).tensors:
        if (ours := OURS.get(tensor.name.removesuffix(".weight"))) is not None:
            expected = torch.from_numpy(np.array(gguf.dequantize(tensor.data, tensor.tensor_type)))
            assert torch.equal(found[f"{ours}.weight"].floats().float(), expected), tensor.name
    model = load_model(spec)
    layer = model.model.layers[0]
    assert isinstance(layer.mlp.down_proj, FloatLinear) and isinstance(model.lm_head, QuantizedLinear)
    assert isinstance(layer.self_attn.q_proj, LinearPart)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file="a.gguf", dtype=torch.float32)
    ids = [0, 3, 1, 1, 2, 0, 3, 3]
    runner = ModelRunner(model, max_len=32, num_scratch=16)
    logits = torch.cat([*runner.follow(runner.open(), ids)])
    with torch.inference_mode():
        expected = theirs(torch.tensor([ids])).logits[0]
    assert (logits - expected).norm() < 0.03 * expected.norm()


@pytest.mark.parametrize("rows", [1, 2, 7])
def test_rows_of_float_matrices_have_the_same_bits_beside_others(rows: int) -> None:
    torch.manual_seed(0)
    layer, x = FloatLinear(torch.randn(33, 100), torch.randn(33)), torch.randn(7, 100)
    expected = torch.nn.functional.linear(x, layer.weight, layer.bias)
    torch.testing.assert_close(layer(x), expected, rtol=1e-5, atol=1e-4)
    for threads in (1, 2):
        torch.set_num_threads(threads)
        assert torch.equal(layer(x[:rows]), torch.cat([layer(x[n : n + 1]) for n in range(rows)]))


@pytest.mark.parametrize("kinds", [{}, {"token_embd": "F16"}])
def test_a_file_of_numbers_is_rounded_once(tmp_path: Path, kinds: dict[str, str]) -> None:
    path = small_file(tmp_path / "a.gguf", dict.fromkeys(SHAPES, "F16") | kinds)
    spec = resolve(EngineConfig(str(path), None)).target
    assert spec.form == "int8"
    assert ModelStore().is_in_blocks(str(path)) is False
    assert isinstance(load_model(spec).lm_head, QuantizedLinear)


def refused(path: Path, monkeypatch: pytest.MonkeyPatch) -> CARDError:
    monkeypatch.setattr(loader, "load_model", lambda spec: pytest.fail("weights were read"))
    with pytest.raises(CARDError) as caught:
        resolve(EngineConfig(str(path), None, quantization="file"))
    assert not list((path.parent / "cache").rglob("blocks.json"))
    return caught.value


def test_a_format_without_a_kernel_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    error = refused(small_file(tmp_path / "a.gguf", {"blk.0.ffn_up": "IQ4_XS"}), monkeypatch)
    assert isinstance(error, ModelStoreError)
    assert str(error).startswith("format of blk.0.ffn_up.weight = 'IQ4_XS': must be one of Q4_0, Q4_1")


def test_a_missing_matrix_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    error = refused(small_file(tmp_path / "a.gguf", {"blk.0.ffn_up": None}), monkeypatch)
    assert isinstance(error, CorruptModelError) and "up_proj" in str(error)


@pytest.mark.parametrize("left", [100, 3_000, 100_000])
def test_a_cut_file_is_refused(tmp_path: Path, left: int, monkeypatch: pytest.MonkeyPatch) -> None:
    path = small_file(tmp_path / "a.gguf", {})
    path.write_bytes(path.read_bytes()[:left])
    error = refused(path, monkeypatch)
    assert isinstance(error, CorruptModelError) and "not a whole GGUF file" in str(error)


def test_a_width_that_is_no_whole_number_of_blocks_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = small_file(tmp_path / "a.gguf", {})
    data, name = path.read_bytes(), b"blk.0.attn_q.weight"
    at = data.index(name) + len(name) + 4  # behind the number of dimensions
    path.write_bytes(data[:at] + (250).to_bytes(8, "little") + data[at + 8 :])
    error = refused(path, monkeypatch)
    assert isinstance(error, CorruptModelError) and "250" in str(error)


@pytest.mark.parametrize("spoilt", ["order", "rows", "size", "offset"])
def test_a_damaged_index_is_refused(tmp_path: Path, spoilt: str) -> None:
    folder = resolve(EngineConfig(str(small_file(tmp_path / "a.gguf", {})), None)).target.folder
    index = json.loads((folder / INDEX).read_text())
    place = index["tensors"]["model.layers.0.self_attn.q_proj.weight"]
    at, value = {"order": (4, [10**9] * 256), "rows": (1, "256"), "size": (2, 143), "offset": (3, 1 << 40)}[spoilt]
    place[at] = value
    (folder / INDEX).write_text(json.dumps(index))
    with pytest.raises(CorruptModelError, match="q_proj"):
        read_tensors(folder)


def test_a_file_that_changed_beneath_its_index_is_refused(tmp_path: Path) -> None:
    path = small_file(tmp_path / "a.gguf", {})
    folder = resolve(EngineConfig(str(path), None)).target.folder
    with path.open("ab") as file:
        file.write(b"more")
    with pytest.raises(CorruptModelError, match="must have the"):
        read_tensors(folder)
