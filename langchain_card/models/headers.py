"""Read a model's context length and chat template from its files, without torch, transformers or a network.

The head of a GGUF file is parsed here, too. `gguf.GGUFReader` parses the whole vocabulary, which takes seconds, and
trusts the counts of arrays; transformers builds as many layers as a file states.
"""

from __future__ import annotations

import contextlib
import json
import math
import mmap
import struct
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from langchain_card.errors import UnsafeModelError
from langchain_card.models.download import BUILTINS
from langchain_card.models.safety import BOUNDS, MAX_CONFIG_BYTES, MAX_JSON_BYTES

DEFAULT_MAX_LEN = 8192
"""Default positions of a sequence, if the model was trained for as many."""

_TEXT_CONFIGS = ("text_config", "decoder", "generator", "text_encoder")
_LENGTHS = ("max_position_embeddings", "n_positions", "max_seq_len", "model_max_length")
"""Config keys that state the number of positions, depending on the family."""

_TEMPLATE_FILES = ("chat_template.jinja", "tokenizer_config.json")
_STRING, _ARRAY = 8, 9
_MAX_DIMENSIONS = 4
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_DIMENSIONS = {
    "block_count": "num_hidden_layers",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "context_length": "max_position_embeddings",
    "vocab_size": "vocab_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    "attention.value_length": "head_dim",
}
"""Fields of a GGUF file by what transformers calls them."""


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


def weights_by_type(path: Path) -> Counter[str]:
    """Return the number of weights of each type in a GGUF file, all of whose tensors lie in it.

    Raises:
        ValueError, KeyError, struct.error: it is no whole GGUF file.
        UnsafeModelError: a dimension is out of bounds.
    """
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

    weights = Counter[str]()
    with _opened(path) as head:
        alignment = 32
        for key, value in head.fields():
            dimension = _DIMENSIONS.get(key.partition(".")[2])
            if dimension is not None:
                _check(key, value, BOUNDS[dimension])
            if key == "general.alignment":
                alignment = value
                _check(key, alignment, 1 << 20)
        tensors = [*head.tensors()]
        begin = -(-head.at // alignment) * alignment
        for name, shape, kind, offset in tensors:
            count, (features, size) = math.prod(shape), GGML_QUANT_SIZES[GGMLQuantizationType(kind)]
            if count % features:
                raise ValueError(f"tensor {name} has {count:,} weights, which are no whole blocks of {features}")
            end = begin + offset + count // features * size
            if end > head.size:
                raise ValueError(f"tensor {name} ends at byte {end:,} of {head.size:,}")
            weights[GGMLQuantizationType(kind).name] += count
    return weights


def _of_gguf(path: Path) -> Any:
    """Return the value of `<architecture>.context_length`, which stands near the beginning of the file."""
    with _opened(path) as head:
        return next((value for key, value in head.fields() if key.endswith(".context_length")), None)


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[_Head]:
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        yield _Head(data)


class _Head:
    """A reader of the beginning of a GGUF file: first all `fields`, then all `tensors`.

    Attributes:
        at: the next byte.
        size: bytes of the file.
    """

    def __init__(self, data: mmap.mmap) -> None:
        self._data, self.at, self.size = data, 0, len(data)
        magic, version = self.number("4s"), self.number("I")
        if magic != b"GGUF" or version not in (2, 3):
            raise ValueError(f"begins with {magic!r}, version {version}, where a little-endian GGUF has 2 or 3")
        self._num_tensors, self._num_fields = self.number("Q"), self.number("Q")

    def fields(self) -> Iterator[tuple[str, Any]]:
        """Yield names and values of the metadata; None for arrays of strings."""
        for _ in range(self._num_fields):
            yield self.text().decode(errors="replace"), self.value(self.number("I"))

    def tensors(self) -> Iterator[tuple[str, tuple[int, ...], int, int]]:
        """Yield name, shape, type and first byte of each tensor."""
        for _ in range(self._num_tensors):
            name = self.text().decode(errors="replace")
            shape = tuple(self.number("Q") for _ in range(self._small(self.number("I"))))
            yield name, shape, self.number("I"), self.number("Q")

    def _small(self, dimensions: int) -> int:
        if dimensions > _MAX_DIMENSIONS:
            raise ValueError(f"has a tensor of {dimensions:,} dimensions, where {_MAX_DIMENSIONS} are possible")
        return dimensions

    def number(self, form: str) -> Any:
        """Read a value of one of struct's forms."""
        (found,) = struct.unpack_from(f"<{form}", self._data, self.at)
        self.at += struct.calcsize(f"<{form}")
        return found

    def text(self) -> bytes:
        """Read a string."""
        return self._take(self.number("Q"))

    def value(self, kind: int) -> Any:
        """Read a value of a GGUF type; arrays of strings are skipped."""
        if kind == _STRING:
            return self.text()
        if kind != _ARRAY:
            return self.number(_SCALARS[kind])
        of, count = self.number("I"), self.number("Q")
        if of == _STRING:
            for _ in range(count):  # each moves on, to the end of the file at most
                self.text()
            return None
        if of == _ARRAY:
            raise ValueError("has arrays of arrays, which no model needs")
        size = struct.calcsize(_SCALARS[of])
        return [found for (found,) in struct.iter_unpack(f"<{_SCALARS[of]}", self._take(count * size))]

    def _take(self, size: int) -> bytes:
        if size > self.size - self.at:
            raise ValueError(f"states {size:,} bytes of metadata at byte {self.at:,} of {self.size:,}")
        self.at += size
        return self._data[self.at - size : self.at]


def _check(key: str, value: Any, bound: int) -> None:
    """Raise unless a dimension, or that of each layer, is in bounds; layers without attention have no heads."""
    least, numbers = (0, value) if isinstance(value, list) else (1, [value])
    if not all(isinstance(number, int) and least <= number <= bound for number in numbers):
        raise UnsafeModelError(f"GGUF field {key}", str(value)[:80], f"must be an integer in {least}..{bound}")
