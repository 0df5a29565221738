"""Tokenizers, read without weights."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

from langchain_card.errors import ModelStoreError
from langchain_card.runtime.safety import inspect_folder
from langchain_card.runtime.store import ModelStore, file_state


def load_tokenizer(name: str) -> Any:
    """The tokenizer of a model. Downloads the model if nothing of it is on this machine; reads no weights.

    Args:
        name: built-in name, folder, `.gguf` file or hub id.

    Raises:
        UnknownModelError: no such model.
        ModelStoreError: it could not be downloaded, or the tokenizer cannot be read.
    """
    return read_tokenizer(ModelStore().tokenizer_source(name))


def read_tokenizer(source: Path) -> Any:
    """The tokenizer in a model's folder or `.gguf` file; the last few stay in memory.

    Raises:
        ModelStoreError: transformers cannot read it, or the folder is not safe.
    """
    return _read(source, file_state(source))


@functools.lru_cache(maxsize=4)
def _read(source: Path, state: str) -> Any:
    from transformers import AutoTokenizer

    folder, file = (source, {}) if source.is_dir() else (source.parent, {"gguf_file": source.name})
    if not file:
        inspect_folder(folder)
    try:
        return AutoTokenizer.from_pretrained(folder, local_files_only=True, **file)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        reason = f"transformers cannot read it ({str(error)[:200]})"
        raise ModelStoreError("tokenizer", str(source), reason, "download the model again") from error
