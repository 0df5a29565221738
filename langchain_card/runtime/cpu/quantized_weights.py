"""Read quantized weights into the layers that run them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from langchain_card.errors import CorruptModelError
from langchain_card.runtime.cpu.block_formats import FORMATS, Bytes, dequantize
from langchain_card.runtime.cpu.block_matmul import Weights, empty_bytes, pack_part, tile_bytes
from langchain_card.runtime.cpu.block_tiles import TILE
from langchain_card.runtime.cpu.fused_layers import fuse_layers
from langchain_card.runtime.cpu.quantized_layers import (
    QuantizedEmbedding,
    QuantizedLinear,
    fuse_norm,
    split_by_layer,
)
from langchain_card.runtime.threads import num_cores, use_threads

_SAME_INPUT = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))


class StoredTensor(NamedTuple):
    """A tensor of a file.

    Attributes:
        form: index of its blocks' format, or None for numbers.
        data: blocks [outputs, bytes], or an array of numbers in the tensor's shape.
    """

    form: int | None
    data: Any

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the tensor."""
        if self.form is None:
            return tuple(self.data.shape)
        form = FORMATS[self.form]
        return len(self.data), self.data.shape[1] // form.size * form.features

    def floats(self) -> Tensor:
        """Return its numbers, as float32 where they are in blocks."""
        return torch.as_tensor(self.data) if self.form is None else torch.from_numpy(dequantize(self.form, self.data))


class _Stack(NamedTuple):
    """Linear layers that read the same input, and their matrix.

    Attributes:
        names: of the layers.
        sizes: outputs of each.
        parts: format and blocks of each part of the matrix.
        features: of its rows.
    """

    names: tuple[str, ...]
    sizes: list[int]
    parts: list[tuple[int, Bytes]]
    features: int

    @property
    def bytes_of_parts(self) -> list[int]:
        """Bytes of each part's tiles."""
        return [-(-len(rows) // TILE) * tile_bytes(form, self.features) for form, rows in self.parts]


def read_weights(model: Any, tensors: Mapping[str, StoredTensor], dtype: torch.dtype, *, fused: bool = True) -> None:
    """Load weights into an empty model: matrices in blocks as they are, and the rest in `dtype`.

    Args:
        model: a model on the meta device, except for its buffers.
        tensors: the model's tensors by name. The head may be missing if it is the embedding table.
        dtype: type of norms, biases and of matrices that are not in blocks.
        fused: whether decoder layers of the common kind become one compiled call each.

    Raises:
        CorruptModelError: a tensor is missing or has another shape than the model's.
    """
    tensors = _with_head(model, tensors)
    linear = [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    blocks = [name for name in linear if f"{name}.weight" in tensors and tensors[f"{name}.weight"].form is not None]
    stacks = [_stack(tensors, names) for names in _stacks(blocks)]
    arena, begin = empty_bytes(sum(sum(stack.bytes_of_parts) for stack in stacks)), 0
    begins = []
    for stack in stacks:
        begins.append(begin)
        begin += sum(stack.bytes_of_parts)
    # Laying the blocks out is most of the time, and runs on one core.
    with ThreadPoolExecutor(num_cores(), initializer=use_threads, initargs=(1,)) as pool:
        packed = pool.map(_pack, stacks, begins, [arena] * len(stacks))
        for stack, weights in zip(stacks, packed, strict=True):
            for name, layer in zip(stack.names, _layers(tensors, stack, weights), strict=True):
                model.set_submodule(name, layer)
    for name, module in list(model.named_modules()):
        table = tensors.get(f"{name}.weight")
        if isinstance(module, nn.Embedding) and table is not None and table.form is not None:
            _check_shape(f"{name}.weight", table.shape, module.weight.shape)
            model.set_submodule(name, QuantizedEmbedding(table.form, table.data))
            continue
        _fill(module, name, tensors, dtype)
        if (norm := fuse_norm(module)) is not None:
            model.set_submodule(name, norm)
    if fused:
        fuse_layers(model.get_decoder())


def _with_head(model: Any, tensors: Mapping[str, StoredTensor]) -> Mapping[str, StoredTensor]:
    """Add the embedding table as the head if the file has none."""
    names = {module: f"{name}.weight" for name, module in model.named_modules()}
    head, table = (names.get(own, "") for own in (model.get_output_embeddings(), model.get_input_embeddings()))
    if head and head not in tensors and table in tensors:
        return {**tensors, head: tensors[table]}
    return tensors


def _stacks(names: list[str]) -> list[tuple[str, ...]]:
    """Group the names of layers that read the same input."""
    stacks = []
    for name in names:
        parent, _, last = name.rpartition(".")
        group = next((group for group in _SAME_INPUT if last in group), (last,))
        members = tuple(f"{parent}.{member}" if parent else member for member in group)
        stack = members if all(member in names for member in members) else (name,)
        if name == stack[0]:
            stacks.append(stack)
    return stacks


def _stack(tensors: Mapping[str, StoredTensor], names: tuple[str, ...]) -> _Stack:
    found = [tensors[f"{name}.weight"] for name in names]
    sizes, features = [tensor.shape[0] for tensor in found], found[0].shape[1]
    parts = [(tensor.form, tensor.data) for tensor in found if tensor.form is not None]
    if any(size % TILE for size in sizes[:-1]):
        forms = {form for form, _ in parts}
        if len(forms) > 1:
            raise CorruptModelError("weights", names, f"{sizes} outputs in several formats cannot share a matrix")
        parts = [(forms.pop(), np.concatenate([rows for _, rows in parts]))]
    return _Stack(names, sizes, parts, features)


def _pack(stack: _Stack, begin: int, arena: Bytes) -> Weights:
    """Lay out a stack's matrix in its place."""
    table, tile = [], 0
    for (form, rows), size in zip(stack.parts, stack.bytes_of_parts, strict=True):
        pack_part(form, rows, arena[begin : begin + size])
        tiles = -(-len(rows) // TILE)
        table.append((form, begin, tile, tiles))
        begin, tile = begin + size, tile + tiles
    return Weights(arena, np.array(table), stack.features, sum(stack.sizes))


def _layers(tensors: Mapping[str, StoredTensor], stack: _Stack, weights: Weights) -> Sequence[nn.Module]:
    biases = [tensors[f"{name}.bias"].floats().float() for name in stack.names if f"{name}.bias" in tensors]
    if len(biases) not in (0, len(stack.names)):
        raise CorruptModelError("weights", stack.names, "some of these layers have a bias and some have none")
    whole = QuantizedLinear(weights, torch.cat(biases) if biases else None)
    return [whole] if len(stack.names) == 1 else split_by_layer(whole, stack.sizes)


def _fill(module: nn.Module, name: str, tensors: Mapping[str, StoredTensor], dtype: torch.dtype) -> None:
    """Set a module's own parameters."""
    for key, parameter in list(module.named_parameters(recurse=False)):
        full = f"{name}.{key}" if name else key
        if full not in tensors:
            raise CorruptModelError("weights", full, "is missing", "remove the model and pull it again")
        # A copy: a view would keep the whole file mapped, and counted as memory.
        tensor = tensors[full].floats().to(dtype, copy=True)
        _check_shape(full, tensor.shape, parameter.shape)
        setattr(module, key, nn.Parameter(tensor, requires_grad=False))


def _check_shape(name: str, shape: Sequence[int], wanted: Sequence[int]) -> None:
    if tuple(shape) != tuple(wanted):
        raise CorruptModelError("weights", name, f"has shape {list(shape)}, not {list(wanted)}")
