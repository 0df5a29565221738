"""GGUF and safetensors -> the engine's forms: equal to what transformers itself loads, and whole or refused."""

from __future__ import annotations

import json
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from langchain_card.errors import CorruptModelError, ModelStoreError
from langchain_card.models.block_index import read_tensors
from langchain_card.models.gguf import open_gguf
from langchain_card.models.store import ModelStore
from tests.support.tiny import tiny_gguf
from tests.support.wheelhouse import Record, tensors

PARAGRAPH = (
    "The harbour master kept a diary for forty years. On 3 May he wrote that the ferry was late again, that fog lay "
    "over the pier, and that def add(a, b): return a + b was the only line his grandson had taught him to read."
)


@pytest.fixture(scope="module")
def store() -> ModelStore:
    """The user's own cache: the 98 MB model is downloaded and converted once, not once a run."""
    store = ModelStore()
    store.prepare("smollm2-135m", "float")
    store.prepare("smollm2-135m", "file")
    return store


@pytest.mark.parametrize("name", ["smollm2-135m", pytest.param("qwen2.5-coder-0.5b", marks=pytest.mark.pair)])
@pytest.mark.slow
def test_float_form_equals_what_transformers_loads(store: ModelStore, name: str) -> None:
    folder, source = store.prepare(name, "float"), store.path(name)
    theirs = AutoModelForCausalLM.from_pretrained(source.parent, gguf_file=source.name, dtype=torch.float32)
    ours = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    ids = AutoTokenizer.from_pretrained(folder)(PARAGRAPH, return_tensors="pt").input_ids
    with torch.inference_mode():
        reference, logits = theirs(ids).logits, ours(ids).logits
    assert ids.shape[1] > 40
    assert torch.equal(reference.argmax(-1), logits.argmax(-1))
    assert (reference - logits).abs().max() < 0.02 * reference.abs().max()
    expected = dict(theirs.named_parameters())
    for name, parameter in ours.named_parameters():
        torch.testing.assert_close(parameter, expected[name], rtol=2**-11, atol=2**-24)


def test_float_form_is_half_precision_matrices_and_full_vectors(store: ModelStore) -> None:
    stored = tensors(store.prepare("smollm2-135m", "float"))
    assert {t.dtype for t in stored.values() if t.dim() == 2} == {torch.float16}
    assert {t.dtype for t in stored.values() if t.dim() == 1} == {torch.float32}
    assert all(bool(torch.isfinite(t).all()) for t in stored.values())
    assert "lm_head.weight" not in stored  # tied


def test_file_form_is_the_dequantized_tensors(store: ModelStore) -> None:
    found = read_tensors(store.prepare("smollm2-135m", "file"))
    reader = gguf.GGUFReader(store.path("smollm2-135m"))
    raw = {t.name: torch.from_numpy(np.array(gguf.dequantize(t.data, t.tensor_type))) for t in reader.tensors}
    pairs = {
        "model.embed_tokens": "token_embd",
        "model.layers.0.mlp.down_proj": "blk.0.ffn_down",
        "model.layers.29.self_attn.v_proj": "blk.29.attn_v",
        "model.layers.7.self_attn.o_proj": "blk.7.attn_output",
        "model.norm": "output_norm",
    }
    for ours, theirs in pairs.items():
        assert torch.equal(found[f"{ours}.weight"].floats(), raw[f"{theirs}.weight"])
    in_float = tensors(store.prepare("smollm2-135m", "float"))
    for name in ("model.layers.0.self_attn.q_proj.weight", "model.layers.29.self_attn.k_proj.weight"):  # rows move
        assert torch.equal(found[name].floats().half(), in_float[name])
    assert sum(tensor.form is not None for tensor in found.values()) == 30 * 7 + 1


@pytest.mark.slow
def test_tokenizer_and_ends_match_the_metadata(store: ModelStore) -> None:
    folder = store.prepare("smollm2-135m", "file")
    fields = gguf.GGUFReader(store.path("smollm2-135m")).fields
    tokenizer = AutoTokenizer.from_pretrained(folder)
    ids = tokenizer("<|im_start|>user\nHello<|im_end|>").input_ids
    assert (ids[0], ids[-1]) == (1, 2)
    assert tokenizer.decode(tokenizer(PARAGRAPH).input_ids) == PARAGRAPH
    assert tokenizer.chat_template == fields["tokenizer.chat_template"].contents()
    assert "<|im_start|>user\nHi<|im_end|>" in tokenizer.apply_chat_template(
        [{"role": "user", "content": "Hi"}], tokenize=False
    )
    for ours in ("bos", "eos", "unk"):
        key = {"unk": "unknown"}.get(ours, ours)
        assert getattr(tokenizer, f"{ours}_token_id") == fields[f"tokenizer.ggml.{key}_token_id"].contents()
    assert json.loads((folder / "generation_config.json").read_text())["eos_token_id"] == [2, 0]


@pytest.mark.pair
@pytest.mark.parametrize("name", ["qwen2.5-coder-0.5b", "qwen2.5-coder-1.5b"])
def test_qwen_tokenizer_and_ends(store: ModelStore, name: str) -> None:
    folder = store.prepare(name, "file")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert tokenizer("<|im_start|>user\n1 + 23<|im_end|>").input_ids == [151644, 872, 198, 16, 488, 220, 17, 18, 151645]
    assert "<tool_call>" in tokenizer.chat_template
    assert tokenizer.convert_tokens_to_ids("<tool_call>") == 151657
    assert json.loads((folder / "generation_config.json").read_text())["eos_token_id"] == [151645, 151643]


def test_second_start_does_not_convert_again(store: ModelStore) -> None:
    before = (store.prepare("smollm2-135m", "file") / "model.safetensors").stat()
    record = Record()
    after = (ModelStore().prepare("smollm2-135m", "file", record) / "model.safetensors").stat()
    assert (before.st_ino, before.st_mtime_ns) == (after.st_ino, after.st_mtime_ns)
    assert record.calls == []


@pytest.mark.parametrize("keep", [0, 3, 20, 5_000, 3_000_000, 50_000_000, -1])
@pytest.mark.slow
def test_cut_gguf_is_refused(store: ModelStore, tmp_path: Path, keep: int) -> None:
    source, copy = store.path("smollm2-135m"), tmp_path / "cut.gguf"
    with source.open("rb") as data:
        copy.write_bytes(data.read(keep if keep >= 0 else source.stat().st_size - 1))
    with pytest.raises(CorruptModelError, match="whole GGUF"):
        ModelStore(tmp_path / "cache").prepare(str(copy), "float")


def test_noise_is_not_a_gguf(tmp_path: Path) -> None:
    (tmp_path / "a.gguf").write_bytes(np.random.default_rng(0).bytes(10_000))
    with pytest.raises(CorruptModelError):
        open_gguf(tmp_path / "a.gguf")


def test_gguf_without_its_tensors_is_refused_and_leaves_nothing(tmp_path: Path) -> None:
    source = tiny_gguf(tmp_path / "a.gguf")
    with pytest.raises(CorruptModelError, match="tensors of the model are missing"):
        ModelStore(tmp_path / "cache").prepare(str(source), "float")
    assert not list((tmp_path / "cache" / "converted").rglob("*.safetensors"))
    assert not list((tmp_path / "cache" / "converted").rglob(".float-*"))


def test_gguf_with_another_shape_is_refused(tmp_path: Path) -> None:
    source = tiny_gguf(tmp_path / "a.gguf", embedding_length=16)
    with pytest.raises(CorruptModelError, match="must have the shape"):
        ModelStore(tmp_path / "cache").prepare(str(source), "float")


def test_gguf_of_an_unknown_architecture_is_refused(tmp_path: Path) -> None:
    source = tiny_gguf(tmp_path / "a.gguf", "clip")
    with pytest.raises(ModelStoreError, match="transformers cannot read"):
        ModelStore(tmp_path / "cache").prepare(str(source), "float")
