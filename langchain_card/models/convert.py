"""Write weights tensor by tensor, under transformers' names: as safetensors, or matrices in blocks."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import safe_open
from torch import Tensor, nn

from langchain_card.errors import CorruptModelError, ModelStoreError
from langchain_card.models.files import Progress, need_space
from langchain_card.runtime.threads import single_threaded

_DTYPES = {torch.float16: "F16", torch.float32: "F32"}


class Layout:
    """The tensors of a model, and how each is stored.

    Args:
        config: a transformers config. The model is built on the meta device, which takes no memory.

    Raises:
        ModelStoreError: not a causal language model, or its weights are quantized already.
    """

    def __init__(self, config: Any) -> None:
        from transformers import AutoModelForCausalLM

        if getattr(config, "quantization_config", None):
            limit = "weights that are quantized already cannot be converted"
            raise ModelStoreError("quantization_config", config.model_type, limit, "use the float release of the model")
        try:
            with torch.device("meta"):
                self.model = AutoModelForCausalLM.from_config(config)
        except ValueError as error:
            limit = f"must be a causal language model ({str(error)[:100]})"
            raise ModelStoreError("model_type", config.model_type, limit) from error
        self.shapes = {name: tensor.shape for name, tensor in self.model.state_dict().items()}
        names = {module: f"{name}.weight" for name, module in self.model.named_modules()}
        self.head = names.get(self.model.get_output_embeddings(), "")
        self.table = names.get(self.model.get_input_embeddings(), "")
        self.linear = {names[module] for module in names if isinstance(module, nn.Linear)}
        self.tied_head = self.head if getattr(config, "tie_word_embeddings", False) else ""

    def stored(self) -> Iterator[tuple[str, torch.Size]]:
        """Yield names and shapes of the tensors that files have."""
        return ((name, shape) for name, shape in self.shapes.items() if name != self.tied_head)


class FloatWriter:
    """A writer of one safetensors file that holds one tensor in memory.

    The header precedes the tensors but is known last: its space is reserved and padded with blanks, which the format
    allows. Tensors whose size would break the alignment of later ones are written last. Shards of `safetensors` would
    need no class, but converting a model of 2 GB with them took 1.5 to 1.9 times as long.

    Args:
        path: the file to write.
        names: the model's tensor names, which bound the size of the header.
    """

    def __init__(self, path: Path, names: Iterable[str]) -> None:
        self._room = 4096 + sum(2 * (len(name) + 160) for name in names)
        self._room += -self._room % 64
        self._header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        self._late: list[tuple[str, Tensor]] = []
        self._file = path.open("wb")
        self._file.seek(8 + self._room)
        self.written = 0

    def planned_bytes(self, layout: Layout) -> int:
        """Return an upper estimate of the bytes of a layout's weights."""
        return sum(shape.numel() * (2 if len(shape) > 1 else 4) for _, shape in layout.stored())

    def add(self, name: str, found: Any) -> None:
        """Append a tensor or an array: matrices in float16 where they fit, vectors in float32."""
        tensor = torch.as_tensor(found)
        self.write(name, _half(tensor) if tensor.dim() > 1 else tensor.float())

    def write(self, name: str, tensor: Tensor) -> None:
        """Append a tensor as it is (float16 or float32; any shape)."""
        if tensor.nbytes % 8:
            self._late.append((name, tensor))
        else:
            self._write(name, tensor)

    def _write(self, name: str, tensor: Tensor) -> None:
        end = self.written + tensor.nbytes
        shape = list(tensor.shape)
        self._header[name] = {"dtype": _DTYPES[tensor.dtype], "shape": shape, "data_offsets": [self.written, end]}
        self._file.write(tensor.contiguous().numpy().data)
        self.written = end

    def close(self) -> None:
        """Write the remaining tensors, then the header."""
        for name, tensor in sorted(self._late, key=lambda entry: -entry[1].element_size()):
            self._write(name, tensor)
        header = json.dumps(self._header, separators=(",", ":")).encode().ljust(self._room)
        assert len(header) == self._room
        self._file.seek(0)
        self._file.write(self._room.to_bytes(8, "little") + header)
        self._file.close()


class Writer(Protocol):
    """A writer of a model's tensors."""

    @property
    def written(self) -> int:
        """Bytes that were written."""
        ...

    def planned_bytes(self, layout: Layout) -> int:
        """Return an upper estimate of the bytes of a layout's weights."""
        ...

    def add(self, name: str, found: Any) -> None:
        """Append a tensor or an array (any float type and shape)."""
        ...

    def close(self) -> None:
        """Complete the files."""
        ...


def folder_tensors(files: Iterable[Path]) -> Iterator[tuple[str, Tensor]]:
    """Yield names and tensors of safetensors files, one at a time."""
    for path in files:
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118 (not a mapping)
                yield name, file.get_tensor(name)


def write_weights(
    tensors: Iterable[tuple[str, Any]], layout: Layout, writer: Writer, folder: Path, progress: Progress
) -> None:
    """Write the weights of a layout, and close the writer.

    Args:
        tensors: name of every parameter, and what the writer takes for it; unknown names are skipped.
        layout: the layout of the same model.
        writer: receives the tensors.
        folder: the writer's.
        progress: receives the bytes written.

    Raises:
        CorruptModelError: a tensor of the model is missing or has another shape.
        DiskSpaceError: the disk is too full.
    """
    total = writer.planned_bytes(layout)
    missing = set(layout.shapes) - {layout.tied_head}
    with contextlib.closing(writer), single_threaded():
        need_space(folder, total)
        for name, found in tensors:
            if name not in missing:
                continue
            if tuple(found.shape) != tuple(layout.shapes[name]):
                limit = f"must have the shape {list(layout.shapes[name])} of the config"
                raise CorruptModelError(name, list(found.shape), limit)
            missing.discard(name)
            writer.add(name, found)
            progress.update("convert", min(writer.written, total), total)
    if missing:
        hint = "the files do not belong together, or this architecture cannot be converted"
        limit = f"{len(missing)} tensors of the model are missing"
        raise CorruptModelError("weights", sorted(missing)[:3], limit, hint)


def _half(tensor: Tensor) -> Tensor:
    half = tensor.to(torch.float16)
    return half if bool(torch.isfinite(half).all()) else tensor.float()
