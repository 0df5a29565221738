"""Read a model's context length and chat template from its files, without torch, transformers or a network.

The head of a GGUF file is parsed here: `gguf.GGUFReader` parses the whole vocabulary, which takes seconds.
"""

from __future__ import annotations

import io
import json
import struct
from pathlib import Path
from typing import Any

from langchain_card.models.download import BUILTINS
from langchain_card.models.safety import MAX_CONFIG_BYTES, MAX_JSON_BYTES

DEFAULT_MAX_LEN = 8192
"""Default positions of a sequence, if the model was trained for as many."""

_TEXT_CONFIGS = ("text_config", "decoder", "generator", "text_encoder")
_LENGTHS = ("max_position_embeddings", "n_positions", "max_seq_len", "model_max_length")
"""Config keys that state the number of positions, depending on the family."""

_TEMPLATE_FILES = ("chat_template.jinja", "tokenizer_config.json")
_GGUF_HEAD = 1 << 16  # bytes to read: the model's numbers precede its vocabulary
_GGUF_STRING, _GGUF_ARRAY = 8, 9
_GGUF_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}


def context_length(name: str) -> int | None:
    """Return the positions over which a model computes a row alike (see `families.context_length`).

    Args:
        name: built-in name, folder, `.gguf` file or hub id.

    Returns:
        None if no file on this machine states a valid number.
    """
    if name in BUILTINS:
        return BUILTINS[name].context_length
    path = Path(name).expanduser()
    try:
        if path.is_file():
            length = _of_gguf(path)
        else:
            length = _of_config(path / "config.json" if path.is_dir() else cached_hub_file(name, "config.json"))
    except (OSError, ValueError, LookupError, TypeError, AttributeError, struct.error, RecursionError, OverflowError):
        return None
    return length if isinstance(length, int) and not isinstance(length, bool) and length > 0 else None


def chat_template(name: str) -> str:
    """Return the text of the files with the chat template of a folder or a cached hub repository; "" for others."""
    if name in BUILTINS or Path(name).expanduser().is_file():
        return ""
    folder = Path(name).expanduser()
    candidates = (folder / file if folder.is_dir() else cached_hub_file(name, file) for file in _TEMPLATE_FILES)
    try:
        files = [path for path in candidates if path is not None and path.is_file()]
        return "".join(path.read_text() for path in files if path.stat().st_size <= MAX_JSON_BYTES)
    except (OSError, ValueError):
        return ""


def cached_hub_file(repo_id: str, file: str) -> Path | None:
    """Return the path of a hub repository's file, if the cache of the hub's client holds it."""
    from huggingface_hub import try_to_load_from_cache

    path = try_to_load_from_cache(repo_id, file)
    return Path(path) if isinstance(path, str) else None


def _of_config(path: Path | None) -> Any:
    if path is None or path.stat().st_size > MAX_CONFIG_BYTES:
        return None
    config = json.loads(path.read_bytes())
    text = next((config[key] for key in _TEXT_CONFIGS if config.get(key)), config)
    rope = text.get("rope_parameters") or text.get("rope_scaling") or {}
    kinds = [rope, *(kind for kind in rope.values() if isinstance(kind, dict))]
    original = text.get("original_max_position_embeddings")
    switches = [
        kind.get("original_max_position_embeddings") or original
        for kind in kinds
        if kind.get("rope_type", kind.get("type")) in ("longrope", "su")
    ]
    return min(
        [next((text[key] for key in _LENGTHS if text.get(key)), None), *(length for length in switches if length)]
    )


def _of_gguf(path: Path) -> Any:
    """Return the value of `<architecture>.context_length`, which stands near the beginning of the file."""
    with path.open("rb") as file:
        head = io.BytesIO(file.read(_GGUF_HEAD))
    magic, _, _, count = struct.unpack("<4sIQQ", head.read(24))
    if magic != b"GGUF":
        return None
    for _ in range(count):
        key, value = _gguf_value(head, _GGUF_STRING), _gguf_value(head, _number(head, "I"))
        if key.endswith(b".context_length"):
            return value
    return None


def _gguf_value(head: io.BytesIO, kind: int) -> Any:
    if kind == _GGUF_STRING:
        return head.read(_number(head, "Q"))
    if kind == _GGUF_ARRAY:
        of, count = _number(head, "I"), _number(head, "Q")
        return [_gguf_value(head, of) for _ in range(count)]
    return _number(head, _GGUF_SCALARS[kind])


def _number(head: io.BytesIO, form: str) -> Any:
    return struct.unpack(f"<{form}", head.read(struct.calcsize(f"<{form}")))[0]
