"""The weights of a peer: their files, number formats and bytes, and whether there is room for them."""

from __future__ import annotations

import functools
from dataclasses import replace
from pathlib import Path

from langchain_card.bench.machine import number_format
from langchain_card.bench.method_table import PEERS
from langchain_card.config import EngineConfig
from langchain_card.errors import DeviceError, InvalidInputError
from langchain_card.models.budget import free_bytes, weight_bytes
from langchain_card.models.gguf import form_of, open_gguf
from langchain_card.models.loader import resolve
from langchain_card.models.store import ModelStore, file_state


def gguf_file(name: str, model: str) -> Path:
    """Return the GGUF file of a model, which the peer `name` reads.

    Raises:
        InvalidInputError: the model has none.
    """
    path = ModelStore().path(model)
    if path.suffix != ".gguf":
        raise InvalidInputError("--methods", name, f"reads GGUF files, {model} is none", "leave it out")
    return path


def gguf_files(name: str, config: EngineConfig) -> list[Path]:
    """Return the GGUF files that the peer `name` reads: the target's, and the draft's if it uses one.

    Raises:
        InvalidInputError: a model has none.
    """
    models = [config.model]
    if PEERS[name].drafts and config.draft_model is not None:
        models.append(config.draft_model)
    return [gguf_file(name, model) for model in models]


def peer_weights(name: str, config: EngineConfig) -> tuple[str, int]:
    """Return a peer's number formats, in words, and the bytes of its weights.

    Raises:
        InvalidInputError: the peer cannot run this pair.
    """
    kind = PEERS[name]
    if kind.weights == "gguf":
        files = gguf_files(name, config)
        forms = (_form(file, file_state(file)) for file in files)
        return ", draft ".join(f"{form} of the file" for form in forms), sum(file.stat().st_size for file in files)
    pair = resolve(replace(config, quantization=None, dtype="float32") if kind.weights == "float32" else config)
    if kind.drafts and pair.vocabulary is not None:
        limit = f"is measured with drafts of the target's own vocabulary, not {config.draft_model}"
        raise InvalidInputError("--methods", name, limit, "leave it out")
    words, needed = number_format(pair.target), weight_bytes(pair.target)
    if kind.drafts and pair.draft is not None:
        words, needed = f"{words}, draft {number_format(pair.draft)}", needed + weight_bytes(pair.draft)
    return words, needed


@functools.lru_cache
def _form(file: Path, state: str) -> str:
    """Return the number format of a file, which takes seconds to open; `state` changes with the file."""
    return form_of(open_gguf(file))


def check_room(name: str, weights: int, config: EngineConfig) -> None:
    """Raise `DeviceError` unless the target's device has room for a peer with this many bytes of weights."""
    needed, free = PEERS[name].room * weights, free_bytes(resolve(config).target.device)
    if needed > free:
        limit = f"needs {needed / 2**30:.1f} GiB for weights of its own, {free / 2**30:.1f} GiB are free"
        raise DeviceError("--methods", name, limit, "compare fewer at once")
