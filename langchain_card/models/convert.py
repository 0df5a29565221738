"""Convert weights to a form that the engine runs, tensor by tensor.

"float": float16 matrices, float32 vectors, under transformers' names. "int8": each linear layer's `X.weight` becomes
`X.weight_int8` (int8, [out, in], rotated as in `int8.rotate`) and `X.weight_scale` (float32, [out]); tied heads are
written out; the embedding table stays float16.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import safe_open
from torch import Tensor, nn

from langchain_card.errors import CorruptModelError, ModelStoreError
from langchain_card.models.files import INT8_FORMAT, Progress, need_space
from langchain_card.runtime.cpu.int8 import quantize_rows
from langchain_card.runtime.threads import single_threaded

Form = Literal["float", "int8"]
METADATA: dict[Form, str] = {"float": "pt", "int8": INT8_FORMAT}
_DTYPES = {torch.float16: "F16", torch.float32: "F32", torch.int8: "I8"}
_BLOCK = 1 << 26  # elements quantized at a time; bounds the float32 temporaries


class Layout:
    """The tensors of a model, and how each is stored.

    Args:
        config: a transformers config. The model is built on the meta device, which takes no memory.
        form: the form of the stored weights.

    Raises:
        ModelStoreError: not a causal language model, or its weights are quantized already.
    """

    def __init__(self, config: Any, form: Form) -> None:
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
        self.form = form
        self.shapes = {name: tensor.shape for name, tensor in self.model.state_dict().items()}
        modules = dict(self.model.named_modules())
        self.linear = {f"{name}.weight" for name, module in modules.items() if isinstance(module, nn.Linear)}
        names = {module: f"{name}.weight" for name, module in modules.items()}
        self.embedding = names[self.model.get_input_embeddings()]
        head = names.get(self.model.get_output_embeddings(), "")
        self.tied_head = head if getattr(config, "tie_word_embeddings", False) else ""

    def stored(self, name: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
        """Yield the names and tensors to write for one full-precision tensor of the model."""
        if self.form == "int8" and name in self.linear:
            yield from _quantized(name, tensor)
            return
        yield name, _half(tensor) if tensor.dim() > 1 else tensor.float()
        if self.form == "int8" and self.tied_head and name == self.embedding:
            yield from _quantized(self.tied_head, tensor)

    def planned_bytes(self) -> int:
        """Return an upper estimate of the bytes of the stored weights."""
        total = 0
        for name, shape in self.shapes.items():
            if self.form == "int8" and name in self.linear:
                total += shape.numel() + 4 * shape[0]
            elif name != self.tied_head:
                total += shape.numel() * (2 if len(shape) > 1 else 4)
        return total


def _quantized(name: str, weight: Tensor) -> Iterator[tuple[str, Tensor]]:
    rows = max(1, _BLOCK // weight.shape[1])
    parts = [quantize_rows(weight[start : start + rows]) for start in range(0, weight.shape[0], rows)]
    yield f"{name}_int8", torch.cat([q for q, _ in parts])
    yield f"{name}_scale", torch.cat([scale for _, scale in parts])


def _half(tensor: Tensor) -> Tensor:
    half = tensor.to(torch.float16)
    return half if bool(torch.isfinite(half).all()) else tensor.float()


class WeightWriter:
    """A writer of one safetensors file that holds one tensor in memory.

    The header precedes the tensors but is known last: its space is reserved and padded with blanks, which the format
    allows. Tensors whose size would break the alignment of later ones are written last. Shards of `safetensors` would
    need no class, but converting a model of 2 GB with them took 1.5 to 1.9 times as long.

    Args:
        path: the file to write.
        names: the model's tensor names, which bound the size of the header.
        form: form of the weights, stored in the file's metadata as `format`.
    """

    def __init__(self, path: Path, names: Iterable[str], form: Form) -> None:
        self._room = 4096 + sum(2 * (len(name) + 160) for name in names)
        self._room += -self._room % 64
        self._header: dict[str, Any] = {"__metadata__": {"format": METADATA[form]}}
        self._late: list[tuple[str, Tensor]] = []
        self._file = path.open("wb")
        self._file.seek(8 + self._room)
        self.written = 0

    def add(self, name: str, tensor: Tensor) -> None:
        """Append a tensor (float16, float32 or int8; any shape)."""
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


def folder_tensors(files: Iterable[Path]) -> Iterator[tuple[str, Tensor]]:
    """Yield names and tensors of safetensors files, one at a time."""
    for path in files:
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118 (not a mapping)
                yield name, file.get_tensor(name)


def write_weights(tensors: Iterable[tuple[str, Any]], layout: Layout, folder: Path, progress: Progress) -> None:
    """Write weights to `model.safetensors` in a layout's form.

    Args:
        tensors: name and array or tensor of every parameter, in any float dtype; unknown names are skipped.
        layout: the layout of the same model.
        folder: an existing folder; gets the file.
        progress: receives the bytes written.

    Raises:
        CorruptModelError: a tensor of the model is missing or has another shape.
        DiskSpaceError: the disk is too full.
    """
    total = layout.planned_bytes()
    need_space(folder, total)
    missing = set(layout.shapes) - {layout.tied_head}
    writer = WeightWriter(folder / "model.safetensors", layout.shapes, layout.form)
    with contextlib.closing(writer), single_threaded():
        for name, array in tensors:
            if name not in missing:
                continue
            tensor = torch.as_tensor(array)
            if tensor.shape != layout.shapes[name]:
                limit = f"must have the shape {list(layout.shapes[name])} of the config"
                raise CorruptModelError(name, list(tensor.shape), limit)
            missing.discard(name)
            for stored_name, stored in layout.stored(name, tensor):
                writer.add(stored_name, stored)
            progress.update("convert", min(writer.written, total), total)
    if missing:
        hint = "the files do not belong together, or this architecture cannot be converted"
        raise CorruptModelError(
            "weights", sorted(missing)[:3], f"{len(missing)} tensors of the model are missing", hint
        )
