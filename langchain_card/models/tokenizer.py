"""Load tokenizers, without weights, and convert tokens to bytes."""

from __future__ import annotations

import functools
import re
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from langchain_card.errors import ModelStoreError
from langchain_card.models.safety import inspect_folder
from langchain_card.models.store import ModelStore, file_state


def load_tokenizer(name: str) -> Any:
    """Load the tokenizer of a model. The model is downloaded if nothing of it is here; no weights are read.

    Args:
        name: built-in name, folder, `.gguf` file or hub id.

    Raises:
        UnknownModelError: no such model.
        ModelStoreError: the model could not be downloaded, or its tokenizer cannot be read.
    """
    return read_tokenizer(ModelStore().tokenizer_source(name))


def read_tokenizer(source: Path) -> Any:
    """Load the tokenizer in a model's folder or `.gguf` file; the last few stay in memory.

    Raises:
        ModelStoreError: transformers cannot read it, or the folder is not safe.
    """
    return _read(source, file_state(source))


@functools.lru_cache(maxsize=4)
def _read(source: Path, state: str) -> Any:
    folder, file = (source, {}) if source.is_dir() else (source.parent, {"gguf_file": source.name})
    if not file:
        inspect_folder(folder)
    return _from_pretrained(folder, **file)


def _from_pretrained(folder: Path, **file: str) -> Any:
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(folder, local_files_only=True, **file)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        reason = f"transformers cannot read it ({str(error)[:200]})"
        source = folder / file.get("gguf_file", "")
        raise ModelStoreError("tokenizer", str(source), reason, "download the model again") from error


def tokenizer_files(folder: Path) -> dict[str, bytes]:
    """Return the files of a model's folder that its tokenizer needs, by name."""
    return {
        path.name: path.read_bytes()
        for path in sorted(folder.iterdir())
        if path.suffix in (".json", ".jinja", ".model", ".txt") and not path.name.endswith(".index.json")
    }


def tokenizer_of(files: Mapping[str, bytes]) -> Any:
    """Load a tokenizer from its files (`tokenizer_files`), without the model's folder.

    Raises:
        ModelStoreError: transformers cannot read it.
    """
    with tempfile.TemporaryDirectory() as folder:
        for name, content in files.items():
            (Path(folder) / Path(name).name).write_bytes(content)
        return _from_pretrained(Path(folder))


class Spelling:
    """A codec between bytes and a tokenizer's tokens: GPT-2's characters for bytes, or text with `<0xE4>` for bytes.

    Args:
        tokenizer: a tokenizer of transformers with a `tokenizers` backend.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._by_bytes = "ByteLevel" in repr(tokenizer.backend_tokenizer.decoder)

    def bytes_of(self, token: str) -> bytes:
        """Return the bytes of a token; they need not be whole characters."""
        if self._by_bytes:
            try:
                return token.translate(_byte_level()).encode("latin-1")
            except UnicodeEncodeError:  # an added token, which is plain text
                return token.encode()
        if token.startswith("<0x") and re.fullmatch(r"<0x[0-9A-F]{2}>", token):  # byte fallback of sentencepiece
            return bytes([int(token[3:5], 16)])
        return token.replace("\u2581", " ").encode()

    def text_of(self, raw: bytes) -> str:
        """Return the text of bytes as the tokenizer's model reads it; "" if it needs whole characters and gets none."""
        if self._by_bytes:
            return raw.decode("latin-1").translate(_characters())
        try:
            return raw.decode().replace(" ", "\u2581")
        except UnicodeDecodeError:
            return ""


def token_bytes(tokenizer: Any, token_id: int) -> bytes:
    """Return the bytes of a token id; b"" if the tokenizer has no such token."""
    return Spelling(tokenizer).bytes_of(tokenizer.convert_ids_to_tokens(token_id) or "")


@functools.cache
def _byte_level() -> dict[int, int]:
    """Map the characters in which byte-level tokenizers write their tokens to bytes (GPT-2)."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {byte: byte for byte in printable} | {256 + i: byte for i, byte in enumerate(others)}


@functools.cache
def _characters() -> dict[int, int]:
    return {byte: char for char, byte in _byte_level().items()}
