"""A user's safetensors folder -> blocks, once; the writer of weight files."""

from __future__ import annotations

import json
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, GPT2Config, LlamaConfig, LlamaForCausalLM

from langchain_card.errors import CorruptModelError, DiskSpaceError, InvalidInputError, ModelStoreError
from langchain_card.models.block_index import read_tensors
from langchain_card.models.convert import FloatWriter
from langchain_card.models.download import BUILTINS
from langchain_card.models.safety import inspect_folder
from langchain_card.models.store import ModelStore
from tests.support.wheelhouse import Record, tensors


@pytest.fixture(scope="module", params=["untied", "tied"])
def llama_folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Llama with odd sizes, as a user's folder of two or more safetensors shards."""
    torch.manual_seed(1)
    config = LlamaConfig(
        hidden_size=12,
        intermediate_size=17,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        vocab_size=33,
        tie_word_embeddings=request.param == "tied",
    )
    folder = tmp_path_factory.mktemp(request.param)
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder, max_shard_size="1KB")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).write_text("{}")
    return folder


@pytest.mark.parametrize(("form", "error"), [("int8", 1 / 127), ("int4", 2 / 15)])
def test_blocks_of_a_users_folder(llama_folder: Path, tmp_path: Path, form: str, error: float) -> None:
    store = ModelStore(tmp_path)
    assert store.prepare(str(llama_folder), "float") == llama_folder
    folder = store.prepare(str(llama_folder), form)  # type: ignore[arg-type]
    assert store.prepare(str(llama_folder), form) == folder  # type: ignore[arg-type]
    stored, model = read_tensors(folder), AutoModelForCausalLM.from_pretrained(llama_folder, dtype=torch.float32)
    tied = model.config.tie_word_embeddings
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear) and not (tied and name == "lm_head"):
            padded = stored[f"{name}.weight"].floats()
            restored, beyond = padded[:, : module.in_features], padded[:, module.in_features :]
            assert (restored - module.weight).abs().max() <= error * module.weight.abs().max()
            assert not beyond.any()
    assert torch.equal(stored["model.embed_tokens.weight"].floats().float(), half(model.get_input_embeddings().weight))
    assert (folder / "tokenizer.json").exists()
    with pytest.raises(InvalidInputError, match="has no blocks"):
        store.prepare(str(llama_folder), "file")


def test_weights_that_are_not_finite_are_not_rounded(tmp_path: Path) -> None:
    config = LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2
    )
    model = LlamaForCausalLM(config)
    model.model.layers[0].mlp.up_proj.weight.data[3, 4] = torch.nan
    model.save_pretrained(tmp_path / "model")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / "model" / name).write_text("{}")
    with pytest.raises(CorruptModelError, match=r"layers\.0\.mlp\.up_proj\.weight.*not finite.*quantization=None"):
        ModelStore(tmp_path / "cache").prepare(str(tmp_path / "model"), "int8")


def half(weight: torch.Tensor) -> torch.Tensor:
    return weight.detach().half().float()


def test_changed_folder_is_converted_again_and_the_old_form_removed(llama_folder: Path, tmp_path: Path) -> None:
    store, copy = ModelStore(tmp_path / "cache"), tmp_path / "copy"
    shutil.copytree(llama_folder, copy)
    first = store.prepare(str(copy), "int8")
    (copy / "generation_config.json").write_text('{"eos_token_id": 1}')
    second = store.prepare(str(copy), "int8")
    assert first != second
    assert not first.exists()
    assert [model.name for model in store.list() if model.name not in BUILTINS] == [str(copy)]
    store.remove(str(copy))
    assert not second.exists()
    assert copy.exists()


def test_two_starts_at_once_convert_once(llama_folder: Path, tmp_path: Path) -> None:
    record = Record()
    with ThreadPoolExecutor(2) as pool:
        folders = list(pool.map(lambda _: ModelStore(tmp_path).prepare(str(llama_folder), "int8", record), range(2)))
    assert folders[0] == folders[1]
    assert record.stages().count("read config and tokenizer") == 1


def test_leftovers_of_a_killed_conversion_are_removed(llama_folder: Path, tmp_path: Path) -> None:
    store = ModelStore(tmp_path)
    folder = store.prepare(str(llama_folder), "int8")
    leftover = folder.parent / ".int8-99999999"
    folder.rename(leftover)
    (leftover / "model.safetensors").write_bytes(b"half")
    store.prepare(str(llama_folder), "int8")
    assert [p.name for p in folder.parent.iterdir()] == ["int8"]


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
    assert "lm_head.weight" not in stored


def test_writer_keeps_every_tensor_aligned(tmp_path: Path) -> None:
    odd = {
        "a": torch.ones(3, 5).half(),
        "b": torch.ones(3),
        "c": torch.ones(7, 3).half(),
        "d": torch.ones(4),
    }
    (tmp_path / "config.json").write_text("{}")
    writer = FloatWriter(tmp_path / "model.safetensors", odd)
    for name, tensor in odd.items():
        writer.write(name, tensor)
    writer.close()
    inspect_folder(tmp_path)
    assert all(torch.equal(tensor, odd[name]) for name, tensor in tensors(tmp_path).items())


def test_half_precision_folder_is_converted(tmp_path: Path) -> None:
    """Tensors that need no conversion are views of one mapped file."""
    config = LlamaConfig(
        hidden_size=12, intermediate_size=17, num_hidden_layers=1, num_attention_heads=2, vocab_size=33
    )
    model = LlamaForCausalLM(config).half()
    model.save_pretrained(tmp_path / "model")
    stored = tensors(ModelStore(tmp_path / "cache").prepare(str(tmp_path / "model"), "int8"))
    assert torch.equal(stored["model.embed_tokens.weight"], model.get_input_embeddings().weight)
