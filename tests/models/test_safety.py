"""Hostile and damaged model folders are refused before transformers sees them."""

from __future__ import annotations

import json
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from langchain_card.config import EngineConfig
from langchain_card.core.request import SamplingParams
from langchain_card.engine.engine import Engine
from langchain_card.errors import CorruptModelError, UnsafeModelError
from langchain_card.models.safety import inspect_folder
from langchain_card.models.store import ModelStore
from tests.support import tiny

INDEX = "model.safetensors.index.json"
CONFIG = {"model_type": "llama", "hidden_size": 8, "num_hidden_layers": 1, "vocab_size": 32, "head_dim": None}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    path = tmp_path / "model"
    path.mkdir()
    (path / "config.json").write_text(json.dumps(CONFIG))
    (path / "tokenizer_config.json").write_text("{}")
    save_file({"weight": np.arange(12, dtype=np.float32).reshape(3, 4)}, path / "model.safetensors")
    return path


def set_json(name: str, **fields: Any) -> Callable[[Path], object]:
    def change(path: Path) -> None:
        old = json.loads((path / name).read_text()) if (path / name).exists() else {}
        (path / name).write_text(json.dumps({**old, **fields}))

    return change


def write(name: str, data: bytes) -> Callable[[Path], object]:
    def change(path: Path) -> None:
        (path / name).parent.mkdir(exist_ok=True)
        (path / name).write_bytes(data)

    return change


def only_pickle(name: str) -> Callable[[Path], object]:
    def change(path: Path) -> None:
        (path / "model.safetensors").unlink()
        (path / name).write_bytes(pickle.dumps({"weight": [0.0]}))

    return change


def index(*names: Any) -> Callable[[Path], object]:
    return set_json(INDEX, weight_map={f"w{i}": name for i, name in enumerate(names)})


UNSAFE: dict[str, tuple[Callable[[Path], object], str]] = {
    "pickle bin": (only_pickle("pytorch_model.bin"), "pytorch_model.bin"),
    "pickle pt": (only_pickle("model.pt"), "model.pt"),
    "pickle pth": (only_pickle("model.pth"), "model.pth"),
    "pickle pkl": (only_pickle("model.pkl"), "model.pkl"),
    "pickle ckpt": (only_pickle("model.ckpt"), "model.ckpt"),
    "index of pickles": (index("pytorch_model-00001.bin"), "pytorch_model-00001.bin"),
    "index climbs": (index("../elsewhere.safetensors"), "../elsewhere.safetensors"),
    "index absolute": (index("/etc/model.safetensors"), "/etc/model.safetensors"),
    "index below": (index("sub/model.safetensors"), "sub/model.safetensors"),
    "index backslash": (index("..\\model.safetensors"), "same folder"),
    "index of numbers": (index(1), "weight_map"),
    "index empty": (index(), "weight_map"),
    "index a list": (write(INDEX, b"[]"), "weight_map"),
    "auto_map": (set_json("config.json", auto_map={"AutoModel": "evil.Model"}), "config.json: auto_map"),
    "auto_map nested": (set_json("config.json", text_config={"auto_map": {}}), "config.json: auto_map"),
    "auto_map tokenizer": (set_json("tokenizer_config.json", auto_map={}), "tokenizer_config.json: auto_map"),
    "auto_map processor": (set_json("preprocessor_config.json", auto_map={}), "preprocessor_config.json: auto_map"),
    "auto_map generation": (set_json("generation_config.json", auto_map={}), "generation_config.json: auto_map"),
    "hub kernel": (set_json("config.json", _attn_implementation="someone/kernel"), "someone/kernel"),
    "code that no config names": (write("custom_generate/generate.py", b"import os"), "delete it; the model answers"),
    "what to do": (set_json("config.json", auto_map={"AutoModel": "evil.Model"}), "delete auto_map from config.json"),
    "adapter": (set_json("adapter_config.json", base_model_name_or_path="someone/else"), "adapter_config.json"),
    "no config": (lambda path: (path / "config.json").unlink(), "has no config.json"),
    "config a list": (write("config.json", b"[1, 2]"), "must be a JSON object"),
    "config not JSON": (write("config.json", b"\x80\x04pickle"), "must be JSON"),
    "config too deep": (write("config.json", b"[" * 200_000), "must be JSON"),
    "config too big": (set_json("config.json", padding="x" * (1 << 20)), "must be at most 1048576 bytes"),
    "huge hidden": (set_json("config.json", hidden_size=10**9), "hidden_size = 1000000000"),
    "negative layers": (set_json("config.json", num_hidden_layers=-1), "num_hidden_layers = -1"),
    "zero vocabulary": (set_json("config.json", vocab_size=0), "vocab_size = 0"),
    "text for a number": (set_json("config.json", vocab_size="32"), "vocab_size = '32'"),
    "true for a number": (set_json("config.json", vocab_size=True), "vocab_size = True"),
    "huge nested": (set_json("config.json", text_config={"hidden_size": 10**12}), "hidden_size"),
}


@pytest.mark.parametrize("case", UNSAFE)
def test_hostile_folder_is_refused(folder: Path, case: str) -> None:
    change, named = UNSAFE[case]
    change(folder)
    with pytest.raises(UnsafeModelError) as caught:
        inspect_folder(folder)
    assert named in str(caught.value)


def header(text: bytes, data: bytes = b"") -> Callable[[Path], object]:
    return write("model.safetensors", len(text).to_bytes(8, "little") + text + data)


def entry(shape: list[int], start: int, end: int) -> bytes:
    return json.dumps({"w": {"dtype": "F32", "shape": shape, "data_offsets": [start, end]}}).encode()


def cut(path: Path) -> None:
    file = path / "model.safetensors"
    os.truncate(file, file.stat().st_size - 1)


CORRUPT: dict[str, Callable[[Path], object]] = {
    "cut": cut,
    "empty": write("model.safetensors", b""),
    "longer than its header says": header(entry([1], 0, 4), b"12345"),
    "huge header length": write("model.safetensors", (1 << 62).to_bytes(8, "little") + b"{}"),
    "header not JSON": header(b"{nonsense"),
    "offsets beyond the file": header(entry([100], 0, 400), b"1234"),
    "shape and offsets differ": header(entry([2], 0, 4), b"1234"),
    "negative offset": header(entry([1], -4, 0), b"1234"),
    "shape overflows": header(entry([1 << 40, 1 << 40], 0, 4), b"1234"),
    "no weights": lambda path: (path / "model.safetensors").unlink(),
    "missing shard": index("model-00001-of-00002.safetensors"),
}


@pytest.mark.parametrize("case", CORRUPT)
def test_damaged_weights_are_refused(folder: Path, case: str) -> None:
    CORRUPT[case](folder)
    with pytest.raises(CorruptModelError):
        inspect_folder(folder)


@pytest.mark.parametrize("name", ["modeling_evil.py", "tools/run.py", "fast.so", "__init__.py", "tokenization_evil.py"])
def test_code_beside_safetensors_never_runs(name: str, tmp_path: Path) -> None:
    """A real model, loaded and asked: code that no config names is neither refused nor run."""
    model = Path(tiny.make_target("llama", tmp_path / "model"))
    write(name, f"open({str(tmp_path / 'ran')!r}, 'w')".encode())(model)
    with Engine(EngineConfig(model=str(model), draft_model=None, max_model_len=64)) as engine:
        assert engine.submit([5, 6, 7], SamplingParams(max_tokens=3)).result().token_ids
    assert not (tmp_path / "ran").exists()


def test_pickle_beside_safetensors_is_ignored(folder: Path) -> None:
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps(1))
    assert inspect_folder(folder) == [folder / "model.safetensors"]


def test_shards_are_returned_in_order(folder: Path) -> None:
    for number in (2, 1):
        save_file({f"w{number}": np.zeros(2, np.float32)}, folder / f"part-{number}.safetensors")
    index("part-2.safetensors", "part-1.safetensors", "part-2.safetensors")(folder)
    assert inspect_folder(folder) == [folder / "part-1.safetensors", folder / "part-2.safetensors"]


def test_gguf_folder_gets_a_hint(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "model.gguf")
    with pytest.raises(CorruptModelError, match="path of the file itself"):
        inspect_folder(folder)


@pytest.mark.parametrize("form", ["float", "int8"])
def test_the_store_inspects_before_transformers_loads(folder: Path, tmp_path: Path, form: Any) -> None:
    set_json("config.json", auto_map={"AutoConfig": "evil.Config"})(folder)
    (folder / "evil.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    with pytest.raises(UnsafeModelError):
        ModelStore(tmp_path / "cache").prepare(str(folder), form)
    assert not (tmp_path / "ran").exists()
    assert not (tmp_path / "cache" / "converted").exists()
