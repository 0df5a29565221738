"""GGUF and safetensors -> the engine's forms: equal to what transformers itself loads, and whole or refused."""

from __future__ import annotations

import json
import shutil
import struct
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from langchain_card.errors import CorruptModelError, ModelStoreError, UnsafeModelError
from langchain_card.models.block_index import read_tensors
from langchain_card.models.gguf import load_config, open_gguf
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


def test_a_tokenizer_that_names_its_added_tokens_is_the_same(store: ModelStore, tmp_path: Path) -> None:
    shutil.copytree(store.prepare("smollm2-135m", "file"), tmp_path / "copy")
    config = tmp_path / "copy" / "tokenizer_config.json"
    fields = json.loads(config.read_text(encoding="utf-8"))
    assert len(fields.pop("added_tokens_decoder")) == 17
    named = AutoTokenizer.from_pretrained(tmp_path / "copy")
    config.write_text(json.dumps(fields))
    read = AutoTokenizer.from_pretrained(tmp_path / "copy")
    assert named.backend_tokenizer.to_str() == read.backend_tokenizer.to_str()
    assert named.special_tokens_map == read.special_tokens_map
    assert {n: repr(token) for n, token in named.added_tokens_decoder.items()} == {
        n: repr(token) for n, token in read.added_tokens_decoder.items()
    }


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


def head(*fields: bytes) -> bytes:
    """The head of a GGUF file without tensors."""
    return b"GGUF" + struct.pack("<IQQ", 3, 0, len(fields)) + b"".join(fields)


def field(key: str, kind: int, value: bytes) -> bytes:
    return struct.pack("<Q", len(key)) + key.encode() + struct.pack("<I", kind) + value


def with_tensor(name: str, shape: tuple[int, ...], kind: int, offset: int) -> bytes:
    """The head of a GGUF file with a tensor that has no bytes."""
    tensor = struct.pack("<Q", len(name)) + name.encode() + struct.pack("<I", len(shape))
    tensor += struct.pack(f"<{len(shape)}Q", *shape) + struct.pack("<IQ", kind, offset)
    return b"GGUF" + struct.pack("<IQQ", 3, 1, 0) + tensor


ENDLESS = struct.pack("<IQ", 0, 1 << 40)
DEEP = struct.pack("<IQ", 9, 1) * 3000


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (head(field("a.list", 9, ENDLESS)), "states 1,099,511,627,776 bytes of metadata at byte"),
        (head(field("a.names", 9, struct.pack("<IQ", 8, 1 << 40))), "not a whole GGUF file"),
        (head(field("a.text", 8, struct.pack("<Q", 1 << 62))), "states 4,611"),
        (head(field("a.deep", 9, DEEP)), "arrays of arrays"),
        (head(field("a.what", 99, b"")), "not a whole GGUF file"),
        (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "little-endian"),
        (b"", "not a whole GGUF file"),
        (with_tensor("w", (64, 2), 0, 0), "tensor w ends at byte 608 of 65"),
        (with_tensor("w", (33, 1), 2, 0), "33 weights, which are no whole blocks of 32"),
        (with_tensor("w", (64, 2), 99, 0), "99 is not a valid"),
        (with_tensor("w", (1,) * 9, 0, 0), "9 dimensions, where 4"),
    ],
)
def test_a_hostile_head_is_refused(tmp_path: Path, data: bytes, words: str) -> None:
    (tmp_path / "a.gguf").write_bytes(data)
    with pytest.raises(CorruptModelError, match=words):
        open_gguf(tmp_path / "a.gguf")


@pytest.mark.parametrize("key", ["block_count", "embedding_length", "feed_forward_length", "attention.head_count_kv"])
def test_dimensions_out_of_bounds_are_refused_before_a_model_is_built(tmp_path: Path, key: str) -> None:
    value = struct.pack("<I", (1 << 32) - 1)
    (tmp_path / "a.gguf").write_bytes(head(field(f"qwen2.{key}", 4, value)))
    with pytest.raises(UnsafeModelError, match=rf"GGUF field qwen2.{key} = .4294967295.: must be an integer in 1"):
        open_gguf(tmp_path / "a.gguf")


ROPE = {"embedding_length": 128, "rope.freq_base": 500000.0}


def config_of(path: Path) -> Any:
    return load_config(path, open_gguf(path))


@pytest.mark.parametrize("factor", [8.0, 32.0])
def test_rope_factors_of_llama_3_become_its_config(tmp_path: Path, factor: float) -> None:
    rope = {"rope_type": "llama3", "rope_theta": 500000.0, "factor": factor, "low_freq_factor": 1.0}
    rope |= {"high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
    config = LlamaConfig(hidden_size=128, num_attention_heads=2, rope_parameters=rope)
    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](config, "cpu")
    plain = 1.0 / 500000.0 ** (torch.arange(0, 64, 2).float() / 64)
    factors = {"rope_freqs.weight": ("F32", (plain / scaled).numpy())}
    assert not (plain == scaled).all()
    assert config_of(tiny_gguf(tmp_path / "a.gguf", tensors=factors, **ROPE)).rope_parameters == rope
    other = {"rope_freqs.weight": ("F32", (plain / scaled).numpy() ** 2)}
    with pytest.raises(ModelStoreError, match=r"rope_freqs.weight.: is not known in llama GGUF files"):
        config_of(tiny_gguf(tmp_path / "b.gguf", tensors=other, **ROPE))
    ones = {"rope_freqs.weight": ("F32", np.ones(32, np.float32))}
    assert config_of(tiny_gguf(tmp_path / "c.gguf", tensors=ones, **ROPE)).rope_parameters["rope_type"] == "default"


def test_stated_scaling_is_kept_or_refused(tmp_path: Path) -> None:
    linear = {"rope.scaling.type": "linear", "rope.scaling.factor": 4.0}
    found = config_of(tiny_gguf(tmp_path / "a.gguf", **linear)).rope_parameters
    assert (found["rope_type"], found["factor"]) == ("linear", 4.0)
    yarn = {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0, "rope.scaling.original_context_length": 4096}
    found = config_of(tiny_gguf(tmp_path / "b.gguf", **yarn)).rope_parameters
    assert (found["rope_type"], found["original_max_position_embeddings"]) == ("yarn", 4096)
    with pytest.raises(ModelStoreError, match=r"yarn.: is not known"):
        config_of(tiny_gguf(tmp_path / "c.gguf", **yarn, **{"rope.scaling.yarn_log_multiplier": 0.1}))
    with pytest.raises(ModelStoreError, match=r"longrope.: is not known"):
        config_of(tiny_gguf(tmp_path / "d.gguf", **{**linear, "rope.scaling.type": "longrope"}))


def test_a_tensor_without_a_place_in_the_model_is_refused(tmp_path: Path) -> None:
    named = {"token_embd.weight": ("F32", np.zeros((4, 8), np.float32)), "blk.0.attn_q.bias": ("F32", np.ones(8, "f"))}
    source = tiny_gguf(tmp_path / "a.gguf", tensors=named)
    with pytest.raises(ModelStoreError, match=r"blk.0.attn_q.bias.: 1 tensors of the file have no place in a llama"):
        ModelStore(tmp_path / "cache").prepare(str(source), "float")


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
