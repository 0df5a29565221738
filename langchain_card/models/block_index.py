"""The index of a model's matrices in blocks: where they lie in a file, so that they are loaded without parsing it.

`GGUFReader` parses a vocabulary in Python, which takes seconds. A folder of blocks holds `blocks.json`, the index;
`model.safetensors`, the tensors that are not in blocks; and `matrices.blocks` if the blocks are not those of a GGUF
file.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from langchain_card.errors import CorruptModelError
from langchain_card.models.convert import FloatWriter, Layout
from langchain_card.models.gguf import BlockPlace
from langchain_card.models.safety import weight_files
from langchain_card.runtime.cpu.blocks.formats import FORMATS, Q4_0, Q4_K, Q8_0
from langchain_card.runtime.cpu.blocks.rounding import quantize
from langchain_card.runtime.cpu.quantized_weights import FileBlocks, StoredTensor, StoredTensors

INDEX, BLOCKS = "blocks.json", "matrices.blocks"
_HINT = "remove the model and load it again"
_CHUNK = 4096
"""Rows of a matrix that are rounded at a time."""


class BlockWriter:
    """A writer of a folder of blocks.

    Args:
        folder: an existing folder; gets the files.
        layout: of the model.
        form: "file", whose blocks stay where they are; or "int8" or "int4", to which matrices are rounded. The head
            and the table of embeddings have 8 bits in any case.
        source: the GGUF file, for the form "file".
    """

    def __init__(self, folder: Path, layout: Layout, form: str, source: Path) -> None:
        self._folder, self._layout, self._form, self._source = folder, layout, form, source
        self._floats = FloatWriter(folder / "model.safetensors", layout.shapes)
        self._table = dict[str, BlockPlace]()
        self._size = 0
        if form != "file":
            self._source = folder / BLOCKS
            self._file = self._source.open("wb")

    @property
    def written(self) -> int:
        """Bytes that were written."""
        return self._floats.written + self._size

    def planned_bytes(self, layout: Layout) -> int:
        """Return an upper estimate of the bytes of a layout's weights, without those that stay in a GGUF file."""
        total = 0
        for name, shape in layout.stored():
            kind = None if self._form == "file" or len(shape) != 2 else self._kind(name)
            if kind is not None:
                total += shape[0] * -(-shape[1] // FORMATS[kind].features) * FORMATS[kind].size
            elif len(shape) != 2 or self._form != "file":
                total += shape.numel() * (2 if len(shape) > 1 else 4)
        return total

    def add(self, name: str, found: Any) -> None:
        """Append a tensor: a `BlockPlace`, or a tensor or an array of any float type and shape."""
        if isinstance(found, BlockPlace):
            self._table[name] = found
        elif self._form == "file":
            self._floats.write(name, torch.as_tensor(found))
        elif (kind := self._kind(name)) is None:
            self._floats.add(name, found)
        else:
            self._round(name, kind, torch.as_tensor(found))

    def _kind(self, name: str) -> int | None:
        """Return the format of a matrix, or None for numbers."""
        features = self._layout.shapes[name][-1]
        if name == self._layout.head or (name == self._layout.table and features % FORMATS[Q8_0].features == 0):
            return Q8_0
        if name not in self._layout.linear:
            return None
        return Q8_0 if self._form == "int8" else Q4_0 if features % FORMATS[Q4_K].features else Q4_K

    def _round(self, name: str, kind: int, matrix: torch.Tensor) -> None:
        group = FORMATS[kind].features
        missing = -matrix.shape[1] % group
        size = (matrix.shape[1] + missing) // group * FORMATS[kind].size
        self._table[name] = BlockPlace(FORMATS[kind].name, len(matrix), size, self._size, [])
        for start in range(0, len(matrix), _CHUNK):
            part = matrix[start : start + _CHUNK]
            padded = torch.nn.functional.pad(part.float(), (0, missing))
            if not torch.isfinite(padded).all():
                hint = f"it cannot be rounded to {self._form}; use quantization=None, or another copy of the model"
                raise CorruptModelError("weights", name, "has numbers that are not finite", hint)
            self._size += self._file.write(quantize(kind, padded.numpy()).data)

    def close(self) -> None:
        """Complete the files."""
        self._floats.close()
        if self._form != "file":
            self._file.close()
        beside = self._source.parent in (self._folder, self._folder.parent)  # both may be moved
        name = os.path.relpath(self._source, self._folder) if beside else str(self._source)
        index = {"source": name, "size": self._source.stat().st_size, "tensors": self._table}
        index |= {"linear": [name for name in self._layout.shapes if name in self._layout.linear]}
        index |= {"head": self._layout.head, "table": self._layout.table}
        (self._folder / INDEX).write_text(json.dumps(index, separators=(",", ":")))


def outer_file(folder: Path) -> Path | None:
    """Return the file with a folder's blocks if it lies outside the folder; None if there is none."""
    if not (folder / INDEX).is_file():
        return None
    source: Path = folder / json.loads((folder / INDEX).read_text())["source"]
    return None if source.parent == folder else source


def read_tensors(folder: Path) -> StoredTensors:
    """Return the tensors of a folder of blocks; blocks are mapped when they are used.

    Raises:
        CorruptModelError: the index is damaged, or the file that it describes is gone or has another size.
    """
    tensors = dict[str, StoredTensor]()
    for path in weight_files(folder):
        file: Any = safe_open(path, framework="pt")
        tensors |= {name: StoredTensor(None, file.get_tensor(name)) for name in file.keys()}  # noqa: SIM118
    path = folder / INDEX
    try:
        index = json.loads(path.read_text())
        source, size = folder / index["source"], index["size"]
        places = {name: BlockPlace(*place) for name, place in index["tensors"].items()}
        names = index["linear"], index["head"], index["table"]
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise CorruptModelError("index", str(path), f"cannot be read ({error})", _HINT) from error
    if not source.is_file() or source.stat().st_size != size:
        raise CorruptModelError("model", str(source), f"must have the {size:,} bytes that it had", _HINT)
    forms = {form.name: form.number for form in FORMATS}
    for name, (kind, rows, row_size, offset, order) in places.items():
        inside = all(type(number) is int and number >= 0 for number in (rows, row_size, offset, *order))
        if not inside or offset + rows * row_size > size or kind not in forms or max(order, default=0) >= max(rows, 1):
            raise CorruptModelError(name, kind, "its blocks do not lie in the file", _HINT)
        if row_size % FORMATS[forms[kind]].size:
            raise CorruptModelError(name, row_size, f"must be whole blocks of {FORMATS[forms[kind]].size} bytes", _HINT)
        tensors[name] = StoredTensor(forms[kind], FileBlocks(source, offset, rows, row_size), tuple(order))
    return StoredTensors(tensors, *names)
