"""The index of a GGUF file's matrices: where their blocks lie, so that a model is loaded without parsing the file.

`GGUFReader` parses a vocabulary in Python, which takes seconds.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import safe_open
from safetensors.numpy import save_file

from langchain_card.errors import CorruptModelError
from langchain_card.models.safety import weight_files
from langchain_card.runtime.cpu.block_formats import FORMATS
from langchain_card.runtime.cpu.quantized_weights import StoredTensor

INDEX = "blocks.json"
_HINT = "remove the model and load it again"


def write_index(source: Path, blocks: Mapping[str, Any], numbers: Mapping[str, Any], folder: Path) -> None:
    """Write the index of a GGUF file, and its tensors that are not in blocks, to a folder.

    Args:
        source: the file.
        blocks: a result of `gguf.blocks_and_numbers`.
        numbers: the same.
        folder: gets `blocks.json` and `model.safetensors`.
    """
    save_file(dict(numbers), folder / "model.safetensors", metadata={"format": "pt"})
    beside = source.parent == folder.parent  # both may be moved
    name = os.path.relpath(source, folder) if beside else str(source)
    index = {"source": name, "size": source.stat().st_size, "tensors": blocks}
    (folder / INDEX).write_text(json.dumps(index, separators=(",", ":")))


def read_tensors(folder: Path, *, indexed: bool) -> dict[str, StoredTensor]:
    """Return the tensors of a folder: those of its safetensors files, and those of its index, views of a mapped file.

    Args:
        folder: a model's folder.
        indexed: whether it has an index. A user's folder has none that could be trusted.

    Raises:
        CorruptModelError: the index is damaged, or the file that it describes is gone or has another size.
    """
    tensors = dict[str, StoredTensor]()
    for path in weight_files(folder):
        file: Any = safe_open(path, framework="pt")
        tensors |= {name: StoredTensor(None, file.get_tensor(name)) for name in file.keys()}  # noqa: SIM118
    if indexed:
        tensors |= _blocks(folder / INDEX)
    return tensors


def _blocks(path: Path) -> dict[str, StoredTensor]:
    try:
        index = json.loads(path.read_text())
        source, size, table = path.parent / index["source"], index["size"], dict(index["tensors"])
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise CorruptModelError("index", str(path), f"cannot be read ({error})", _HINT) from error
    if not source.is_file() or source.stat().st_size != size:
        raise CorruptModelError("model", str(source), f"must have the {size:,} bytes that it had", _HINT)
    whole, forms = np.memmap(source, np.uint8, "r"), {form.name: form.number for form in FORMATS}
    tensors = dict[str, StoredTensor]()
    for name, (kind, rows, row_size, offset, order) in table.items():
        if offset < 0 or offset + rows * row_size > size or kind not in forms:
            raise CorruptModelError(name, kind, "its blocks do not lie in the file", _HINT)
        data = np.asarray(whole[offset : offset + rows * row_size]).reshape(rows, row_size)
        tensors[name] = StoredTensor(forms[kind], data, tuple(order))
    return tensors
