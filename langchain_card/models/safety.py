"""Inspect a model folder before transformers opens it: no pickle, no code, no escaping paths, no absurd sizes.

Nothing in the folder is executed or unpickled. JSON files are parsed within size limits; of weight files only the
headers are read. Code and pickles that lie beside safetensors are never opened. Code would run only where a config
names it, or from a folder in which transformers looks for it; both are refused.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from langchain_card.errors import CorruptModelError, UnsafeModelError

PICKLES = (".bin", ".pt", ".pth", ".pkl", ".pickle", ".ckpt")
CODE_FOLDER = "custom_generate"
"""Folder from which some versions of transformers import code that no config names."""

MAX_CONFIG_BYTES = 1 << 20
MAX_JSON_BYTES = 1 << 26
INDEX = "model.safetensors.index.json"
BOUNDS = {
    "hidden_size": 1_000_000,
    "intermediate_size": 10_000_000,
    "vocab_size": 10_000_000,
    "num_hidden_layers": 10_000,
    "num_attention_heads": 100_000,
    "num_key_value_heads": 100_000,
    "head_dim": 100_000,
    "max_position_embeddings": 1_000_000_000,
}
"""Largest dimensions of a model's config."""


def inspect_folder(path: Path) -> list[Path]:
    """Raise if a folder could run code, leads outside itself, or is damaged.

    Returns:
        The safetensors files that make up the model's weights.

    Raises:
        UnsafeModelError: only pickle weights, `auto_map`, a `CODE_FOLDER`, an escaping path, or a config out of bounds.
        CorruptModelError: weights are missing or truncated.
    """
    _refuse_code(path)
    config = read_json(path / "config.json", MAX_CONFIG_BYTES)
    if not isinstance(config, dict):
        raise UnsafeModelError("config.json", str(path), "must be a JSON object")
    _check_dimensions(config)
    for file in sorted(path.glob("*config.json")):
        _check_fields(file.name, read_json(file, MAX_CONFIG_BYTES if file.name == "config.json" else MAX_JSON_BYTES))
    files = weight_files(path)
    for file in files:
        check_safetensors(file)
    return files


def weight_files(path: Path) -> list[Path]:
    """Return the safetensors files of a folder: those of its index, or the single `model.safetensors`.

    Raises:
        UnsafeModelError: the index names files outside this folder or of another format, or there are only pickle
            weights.
        CorruptModelError: there are no weights, or a file of the index is missing.
    """
    if (path / INDEX).exists():
        names = _index_names(path)
    elif (path / "model.safetensors").exists():
        names = ["model.safetensors"]
    else:
        pickles = [p.name for p in path.iterdir() if p.suffix in PICKLES]
        if pickles:
            hint = "convert the weights to safetensors, or use a release that has them"
            raise UnsafeModelError(
                "weights", sorted(pickles)[0], "pickle files can run code when they are loaded", hint
            )
        hint = "for a GGUF file give the path of the file itself" if list(path.glob("*.gguf")) else "download it again"
        raise CorruptModelError("weights", str(path), "no model.safetensors and no index in this folder", hint)
    for name in names:
        if not (path / name).is_file():
            raise CorruptModelError(INDEX, name, "this file of the index is missing", "download the folder again")
    return [path / name for name in names]


def check_safetensors(path: Path) -> dict[str, str]:
    """Raise unless a file has a valid header and the length that the header states.

    Returns:
        The metadata of the file.

    Raises:
        CorruptModelError: the file is damaged.
    """
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="np") as file:
            return dict(file.metadata() or {})
    except (SafetensorError, OSError, ValueError) as error:
        reason = f"not a whole safetensors file ({str(error)[:120]})"
        raise CorruptModelError("weights", path.name, reason, "download or convert the model again") from error


def _refuse_code(path: Path) -> None:
    if (path / CODE_FOLDER).exists():
        limit = "is a folder from which transformers may run code of the model's author"
        raise UnsafeModelError("model folder", CODE_FOLDER, limit, "delete it; the model answers without it")
    if (path / "adapter_config.json").exists():
        limit = "an adapter names another model to load"
        raise UnsafeModelError("model folder", "adapter_config.json", limit, "merge the adapter into its base model")


def read_json(path: Path, limit: int) -> Any:
    """Return the content of a JSON file of a model.

    Raises:
        UnsafeModelError: the file is missing, larger than `limit` bytes, or not JSON.
    """
    if not path.is_file():
        raise UnsafeModelError("model folder", str(path.parent), f"has no {path.name}", "check the path")
    if path.stat().st_size > limit:
        raise UnsafeModelError(path.name, path.stat().st_size, f"must be at most {limit} bytes")
    try:
        return json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise UnsafeModelError(path.name, str(error)[:80], "must be JSON") from error


def _index_names(path: Path) -> list[str]:
    index = read_json(path / INDEX, MAX_JSON_BYTES)
    names = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(names, dict) or not names or not all(isinstance(name, str) for name in names.values()):
        raise UnsafeModelError(INDEX, type(index).__name__, "weight_map must map tensor names to file names")
    for name in names.values():
        if "/" in name or "\\" in name or ".." in name or not name.endswith(".safetensors"):
            raise UnsafeModelError(INDEX, name, "must name safetensors files of the same folder")
    return sorted(set(names.values()))


def _walk(value: Any) -> Iterator[tuple[str, Any]]:
    pending = [value]
    while pending:
        item = pending.pop()
        if isinstance(item, dict):
            yield from item.items()
            pending.extend(item.values())
        elif isinstance(item, list):
            pending.extend(item)


def _check_fields(file: str, document: Any) -> None:
    """Raise if a field would make transformers fetch or import code."""
    for key, value in _walk(document):
        if key in ("auto_map", "custom_pipelines"):
            limit = "would import code of the model's author, which this package never runs"
            hint = f"if transformers knows the model_type itself, delete {key} from {file}; else use another release"
            raise UnsafeModelError(f"{file}: {key}", value, limit, hint)
        if "attn_implementation" in key and isinstance(value, str) and "/" in value:
            raise UnsafeModelError(f"{file}: {key}", value, "would fetch a kernel from the hub", "remove it")


def _check_dimensions(config: dict[str, Any]) -> None:
    for key, value in _walk(config):
        bound = BOUNDS.get(key)
        if bound is None or value is None:
            continue
        for number in value if isinstance(value, list) else [value]:
            if not isinstance(number, int) or isinstance(number, bool) or not 1 <= number <= bound:
                raise UnsafeModelError(f"config.json: {key}", value, f"must be an integer in 1..{bound}")
