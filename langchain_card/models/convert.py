"""Convert weights to a form that the engine runs, tensor by tensor.

"float": float16 matrices, float32 vectors, under transformers' names. "int8": each linear layer's `X.weight` becomes
`X.weight_int8` (int8, [out, in], rotated as in `int8.rotate`) and `X.weight_scale` (float32, [out]); tied heads are
written out; the embedding table stays float16.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from langchain_card.errors import CorruptModelError, ModelStoreError
from langchain_card.models.files import INT8_FORMAT, Progress, need_space
from langchain_card.models.safety import INDEX
from langchain_card.runtime.cpu.int8 import quantize_rows
from langchain_card.runtime.threads import single_threaded

Form = Literal["float", "int8"]
METADATA: dict[Form, str] = {"float": "pt", "int8": INT8_FORMAT}
SHARD_BYTES = 1 << 30
"""Approximate bytes of a shard, which a conversion holds in memory until it is written."""

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


def folder_tensors(files: Iterable[Path]) -> Iterator[tuple[str, Tensor]]:
    """Yield names and tensors of safetensors files, one at a time."""
    for path in files:
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118 (not a mapping)
                yield name, file.get_tensor(name)


def write_weights(tensors: Iterable[tuple[str, Any]], layout: Layout, folder: Path, progress: Progress) -> None:
    """Write weights in a layout's form: `model.safetensors`, or shards of about `SHARD_BYTES` and their index.

    Args:
        tensors: name and array or tensor of every parameter, in any float dtype; unknown names are skipped.
        layout: the layout of the same model.
        folder: an existing folder; gets the files.
        progress: receives the bytes converted.

    Raises:
        CorruptModelError: a tensor of the model is missing or has another shape.
        DiskSpaceError: the disk is too full.
    """
    need_space(folder, layout.planned_bytes())
    written = 0
    weight_map: dict[str, str] = {}
    with single_threaded():
        for number, shard in enumerate(_shards(_converted(tensors, layout, progress)), 1):
            file = f"model-{number:05}.safetensors"
            save_file(shard, folder / file, {"format": METADATA[layout.form]})
            weight_map |= dict.fromkeys(shard, file)
            written += sum(tensor.nbytes for tensor in shard.values())
    if len(files := set(weight_map.values())) == 1:
        (folder / files.pop()).rename(folder / "model.safetensors")
    else:
        index = {"metadata": {"total_size": written}, "weight_map": weight_map}
        (folder / INDEX).write_text(json.dumps(index, indent=2))


def _converted(tensors: Iterable[tuple[str, Any]], layout: Layout, progress: Progress) -> Iterator[tuple[str, Tensor]]:
    """Yield the stored tensors of a whole model; raise if one is missing or has another shape."""
    missing, done, total = set(layout.shapes) - {layout.tied_head}, 0, layout.planned_bytes()
    for name, array in tensors:
        if name not in missing:
            continue
        tensor = torch.as_tensor(array)
        if tensor.shape != layout.shapes[name]:
            limit = f"must have the shape {list(layout.shapes[name])} of the config"
            raise CorruptModelError(name, list(tensor.shape), limit)
        missing.discard(name)
        for stored_name, stored in layout.stored(name, tensor):
            yield stored_name, stored
            done += stored.nbytes
        progress.update("convert", min(done, total), total)
    if missing:
        limit = f"{len(missing)} tensors of the model are missing"
        hint = "the files do not belong together, or this architecture cannot be converted"
        raise CorruptModelError("weights", sorted(missing)[:3], limit, hint)


def _shards(tensors: Iterable[tuple[str, Tensor]]) -> Iterator[dict[str, Tensor]]:
    """Group tensors into shards; each is emptied before the next one is filled, so that memory holds one."""
    shard, size = dict[str, Tensor](), 0
    for name, tensor in tensors:
        if shard and size + tensor.nbytes > SHARD_BYTES:
            yield shard
            shard.clear()
            size = 0
        shard[name] = tensor.contiguous()
        size += tensor.nbytes
    yield shard
