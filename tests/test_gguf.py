"""GGUF and safetensors -> the engine's forms: equal to what transformers itself loads, and whole or refused."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from safetensors import safe_open
from transformers import AutoModelForCausalLM, AutoTokenizer, GPT2Config, LlamaConfig, LlamaForCausalLM

from langchain_card.errors import CorruptModelError, DiskSpaceError, InvalidInputError, ModelStoreError
from langchain_card.runtime.convert import WeightWriter
from langchain_card.runtime.gguf import open_gguf
from langchain_card.runtime.int8 import quantize_rows
from langchain_card.runtime.safety import check_safetensors, inspect_folder
from langchain_card.runtime.store import ModelStore

PARAGRAPH = (
    "The harbour master kept a diary for forty years. On 3 May he wrote that the ferry was late again, that fog lay "
    "over the pier, and that def add(a, b): return a + b was the only line his grandson had taught him to read."
)


@pytest.fixture(scope="module")
def store() -> ModelStore:
    """The user's own cache: the 98 MB model is downloaded and converted once, not once a run."""
    store = ModelStore()
    store.prepare("smollm2-135m", "float")
    store.prepare("smollm2-135m", "int8")
    return store


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    with safe_open(folder / "model.safetensors", framework="pt") as file:
        return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118


def test_float_form_equals_what_transformers_loads(store: ModelStore) -> None:
    source, folder = store.path("smollm2-135m"), store.prepare("smollm2-135m", "float")
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


def test_int8_form_quantizes_the_dequantized_tensors(store: ModelStore) -> None:
    folder = store.prepare("smollm2-135m", "int8")
    stored = tensors(folder)
    reader = gguf.GGUFReader(store.path("smollm2-135m"))
    raw = {t.name: torch.from_numpy(np.array(gguf.dequantize(t.data, t.tensor_type))) for t in reader.tensors}
    pairs = {
        "lm_head": "token_embd",
        "model.layers.0.mlp.down_proj": "blk.0.ffn_down",
        "model.layers.29.self_attn.v_proj": "blk.29.attn_v",
        "model.layers.7.self_attn.o_proj": "blk.7.attn_output",
    }
    for ours, theirs in pairs.items():
        values, scale = quantize_rows(raw[f"{theirs}.weight"])
        assert torch.equal(stored[f"{ours}.weight_int8"], values)
        assert torch.equal(stored[f"{ours}.weight_scale"], scale)
    assert torch.equal(stored["model.embed_tokens.weight"], raw["token_embd.weight"].half())
    assert torch.equal(stored["model.norm.weight"], raw["output_norm.weight"])
    assert sum(name.endswith("weight_int8") for name in stored) == 30 * 7 + 1
    assert check_safetensors(folder / "model.safetensors") == {"format": "langchain-card-int8"}


def test_tokenizer_and_ends_match_the_metadata(store: ModelStore) -> None:
    folder = store.prepare("smollm2-135m", "int8")
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


def test_second_start_does_not_convert_again(store: ModelStore) -> None:
    before = (store.prepare("smollm2-135m", "int8") / "model.safetensors").stat()
    seen: list[str] = []

    class Record:
        def update(self, stage: str, done: int, total: int) -> None:
            seen.append(stage)

    after = (ModelStore().prepare("smollm2-135m", "int8", Record()) / "model.safetensors").stat()
    assert (before.st_ino, before.st_mtime_ns) == (after.st_ino, after.st_mtime_ns)
    assert seen == []


@pytest.mark.parametrize("keep", [0, 3, 20, 5_000, 3_000_000, 50_000_000, -1])
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


def tiny_gguf(path: Path, architecture: str = "llama", **changes: Any) -> Path:
    """A GGUF of one layer without its tensors, but with all metadata a config needs."""
    writer = gguf.GGUFWriter(path, architecture)
    values = {"block_count": 1, "embedding_length": 8, "feed_forward_length": 16, "context_length": 32, **changes}
    for key, value in values.items():
        writer.add_uint32(f"{architecture}.{key}", value)
    writer.add_head_count(2)
    writer.add_head_count_kv(1)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(["a", "b", "<|im_end|>", "ab"])
    writer.add_token_types([1, 1, 3, 1])
    writer.add_token_merges(["a b"])
    writer.add_eos_token_id(2)
    writer.add_tensor("token_embd.weight", np.zeros((4, 8), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


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


@pytest.fixture(scope="module", params=["untied", "tied"])
def llama_folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, store: ModelStore) -> Path:
    """A random Llama with odd sizes, as a user's folder of two or more safetensors shards."""
    torch.manual_seed(1)
    config = LlamaConfig(
        hidden_size=12,
        intermediate_size=17,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        vocab_size=49152 if request.param == "tied" else 33,
        tie_word_embeddings=request.param == "tied",
    )
    folder = tmp_path_factory.mktemp(request.param)
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder, max_shard_size="1500KB")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(store.prepare("smollm2-135m", "float") / name, folder / name)
    return folder


def test_int8_of_a_users_folder(llama_folder: Path, tmp_path: Path) -> None:
    store = ModelStore(tmp_path)
    assert store.prepare(str(llama_folder), "float") == llama_folder
    folder = store.prepare(str(llama_folder), "int8")
    assert store.prepare(str(llama_folder), "int8") == folder == store.prepare(str(folder), "int8")
    stored, model = tensors(folder), AutoModelForCausalLM.from_pretrained(llama_folder, dtype=torch.float32)
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear):
            restored = stored[f"{name}.weight_int8"].float() * stored[f"{name}.weight_scale"][:, None]
            assert (restored - module.weight).abs().max() <= module.weight.abs().max() / 127
    assert stored["model.embed_tokens.weight"].dtype == torch.float16
    assert (folder / "tokenizer.json").exists()
    with pytest.raises(InvalidInputError, match="float ones were asked for"):
        store.prepare(str(folder), "float")


def test_changed_folder_is_converted_again_and_the_old_form_removed(llama_folder: Path, tmp_path: Path) -> None:
    store, copy = ModelStore(tmp_path / "cache"), tmp_path / "copy"
    shutil.copytree(llama_folder, copy)
    first = store.prepare(str(copy), "int8")
    (copy / "generation_config.json").write_text('{"eos_token_id": 1}')
    second = store.prepare(str(copy), "int8")
    assert first != second
    assert not first.exists()
    assert [model.name for model in store.list()[3:]] == [str(copy)]
    store.remove(str(copy))
    assert not second.exists()
    assert copy.exists()


def test_damaged_conversion_is_made_anew(llama_folder: Path, tmp_path: Path) -> None:
    store = ModelStore(tmp_path)
    weights = store.prepare(str(llama_folder), "int8") / "model.safetensors"
    whole = weights.read_bytes()
    weights.write_bytes(whole[:-5])
    assert (store.prepare(str(llama_folder), "int8") / "model.safetensors").read_bytes() == whole


def test_conversion_checks_the_disk(llama_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = shutil.disk_usage(tmp_path)._replace(free=1000)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    with pytest.raises(DiskSpaceError, match=r"needs \d+ bytes, 1000 are free"):
        ModelStore(tmp_path).prepare(str(llama_folder), "int8")


@pytest.mark.parametrize("problem", ["quantization_config", "encoder", "unknown type", "missing shard tensor"])
def test_folder_that_cannot_become_int8(llama_folder: Path, tmp_path: Path, problem: str) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(llama_folder, copy)
    config = json.loads((copy / "config.json").read_text())
    if problem == "quantization_config":
        config["quantization_config"] = {"quant_method": "awq", "bits": 4}
    elif problem == "encoder":
        config = {"model_type": "t5", "vocab_size": 33}
    elif problem == "unknown type":
        config["model_type"] = "no-such-model"
    else:
        config["num_hidden_layers"] = 3
    (copy / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelStoreError):
        ModelStore(tmp_path / "cache").prepare(str(copy), "int8")


def test_weights_beyond_half_precision_stay_full(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    model = AutoModelForCausalLM.from_config(GPT2Config(n_embd=8, n_layer=1, n_head=2, vocab_size=11, n_positions=16))
    with torch.no_grad():
        model.transformer.wpe.weight[0, 0] = 1e6
    model.save_pretrained(folder)
    stored = tensors(ModelStore(tmp_path / "cache").prepare(str(folder), "int8"))
    assert stored["transformer.wpe.weight"][0, 0] == 1e6
    assert stored["transformer.wte.weight"].dtype == torch.float16
    assert stored["transformer.h.0.attn.c_attn.weight"].dtype == torch.float16  # Conv1D is no linear layer
    assert "lm_head.weight_int8" in stored


def test_writer_keeps_every_tensor_aligned(tmp_path: Path) -> None:
    odd = {"a": torch.ones(3, 5, dtype=torch.int8), "b": torch.ones(3), "c": torch.ones(7, 3).half(), "d": torch.ones(4)}
    (tmp_path / "config.json").write_text("{}")
    writer = WeightWriter(tmp_path / "model.safetensors", odd, "int8")
    for name, tensor in odd.items():
        writer.add(name, tensor)
    writer.close()
    inspect_folder(tmp_path)
    assert all(torch.equal(tensor, odd[name]) for name, tensor in tensors(tmp_path).items())
