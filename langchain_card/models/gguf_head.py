"""Check the head of a GGUF file before a library parses it: counts and dimensions that would take memory.

`gguf.GGUFReader` trusts the counts of arrays, and transformers builds as many layers as a file states.
"""

from __future__ import annotations

import mmap
import struct
from pathlib import Path
from typing import Any

from langchain_card.errors import UnsafeModelError
from langchain_card.models.safety import BOUNDS

_STRING, _ARRAY = 8, 9
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


def check_head(path: Path) -> None:
    """Raise unless a file's metadata lies in it and its dimensions are plausible.

    Raises:
        ValueError, KeyError, struct.error: it is no whole GGUF file.
        UnsafeModelError: a dimension is out of bounds.
    """
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        head = _Head(data)
        magic, version = head.number("4s"), head.number("I")
        if magic != b"GGUF" or version not in (2, 3):
            raise ValueError(f"begins with {magic!r}, version {version}, where a little-endian GGUF has 2 or 3")
        _, count = head.number("Q"), head.number("Q")
        for _ in range(count):
            key, value = head.text().decode(errors="replace"), head.value(head.number("I"))
            dimension = _DIMENSIONS.get(key.partition(".")[2])
            if dimension is not None:
                _check(key, value, BOUNDS[dimension])


class _Head:
    """A reader of metadata from the beginning of a file."""

    def __init__(self, data: mmap.mmap) -> None:
        self._data, self._at = data, 0

    def number(self, form: str) -> Any:
        """Read a value of one of struct's forms."""
        (found,) = struct.unpack_from(f"<{form}", self._data, self._at)
        self._at += struct.calcsize(f"<{form}")
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
        if size > len(self._data) - self._at:
            raise ValueError(f"ends before {size:,} bytes of metadata")
        self._at += size
        return self._data[self._at - size : self._at]


def _check(key: str, value: Any, bound: int) -> None:
    """Raise unless a dimension, or that of each layer, is in bounds; layers without attention have no heads."""
    least, numbers = (0, value) if isinstance(value, list) else (1, [value])
    if not all(isinstance(number, int) and least <= number <= bound for number in numbers):
        raise UnsafeModelError(f"GGUF field {key}", str(value)[:80], f"must be an integer in {least}..{bound}")
