"""Read quantized weights into the layers that run them."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from langchain_card.errors import CorruptModelError
from langchain_card.runtime.cpu.blocks.formats import FORMATS, dequantize
from langchain_card.runtime.cpu.blocks.kernel import BLOCK
from langchain_card.runtime.cpu.blocks.matmul import Weights
from langchain_card.runtime.cpu.blocks.packing import MatrixPart, Packer, StoredRows
from langchain_card.runtime.cpu.blocks.tiles import TILE
from langchain_card.runtime.cpu.compiled import Bytes
from langchain_card.runtime.cpu.quantized_layers import (
    FloatLinear,
    QuantizedEmbedding,
    QuantizedLinear,
    fuse_norm,
    split_by_layer,
)
from langchain_card.runtime.threads import num_cores

_HINT = "remove the model and load it again"
_SAME_INPUT = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))


class FileBlocks(NamedTuple):
    """Blocks in a file.

    Attributes:
        path: of the file.
        offset: first byte.
        rows: number of rows.
        size: bytes of a row.
    """

    path: Path
    offset: int
    rows: int
    size: int

    def map(self) -> Bytes:
        """Return the blocks [rows, size], mapped. What was read of them counts as memory while the result lives."""
        # Copy on write, though nothing is written: compiled code has another form for arrays that cannot be.
        return np.asarray(np.memmap(self.path, np.uint8, "c", self.offset, (self.rows, self.size)))


class StoredTensor(NamedTuple):
    """A tensor of a file.

    Attributes:
        form: number of its blocks' format, or None for numbers.
        data: `FileBlocks`, or a tensor of numbers.
        order: which of the blocks' rows the tensor has, in order; empty for all of them as they are.
    """

    form: int | None
    data: Any
    order: tuple[int, ...] = ()

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the tensor."""
        if self.form is None:
            return tuple(self.data.shape)
        form = FORMATS[self.form]
        return len(self.order) or self.data.rows, self.data.size // form.size * form.features

    def floats(self, start: int = 0, end: int | None = None) -> Tensor:
        """Return its numbers, or those of some rows; float32 where they are in blocks."""
        if self.form is None:
            return torch.as_tensor(self.data[start:end]) if self.data.ndim else torch.as_tensor(self.data)
        return torch.from_numpy(dequantize(self.form, self.rows()[start:end]))

    def rows(self) -> Bytes:
        """Return the blocks in the tensor's order; a copy if that is not the file's."""
        blocks: Bytes = self.data.map()
        return blocks[list(self.order)] if self.order else blocks

    def blocks(self) -> StoredRows:
        """Return the blocks in the file's order."""
        assert self.form is not None
        return StoredRows(self.form, self.data.map(), self.order, mapped=True)

    def head(self, outputs: int | None) -> StoredTensor:
        """Return the first outputs; all for None."""
        if outputs is None or outputs >= self.shape[0]:
            return self
        if self.order:
            return self._replace(order=self.order[:outputs])
        return self._replace(data=self.data[:outputs] if self.form is None else self.data._replace(rows=outputs))


class _Stack(NamedTuple):
    """Linear layers that read the same input, and their matrix.

    Attributes:
        names: of the layers.
        sizes: outputs of each.
        parts: of the matrix.
    """

    names: tuple[str, ...]
    sizes: list[int]
    parts: list[MatrixPart]


class StoredTensors(dict[str, StoredTensor]):
    """A model's tensors by name.

    Args:
        tensors: the head may be missing if it is the embedding table.
        linear: names of the matrices of linear layers, in the model's order.
        head: name of the head's matrix, or "".
        table: name of the embedding table, or "".
    """

    def __init__(self, tensors: Mapping[str, StoredTensor], linear: Sequence[str], head: str, table: str) -> None:
        super().__init__(tensors)
        self.linear, self.head, self.table = linear, head, table

    def with_head(self, outputs: int | None) -> StoredTensors:
        """Return the tensors with the head's first outputs; if there is no head, it is the embedding table."""
        found = self.get(self.head, self.get(self.table))
        if not self.head or found is None:
            return self
        return StoredTensors({**self, self.head: found.head(outputs)}, self.linear, self.head, self.table)


class Packing:
    """The matrices of a model's linear layers, which threads lay out for the kernel from the moment that this is made.

    That is most of the time of loading, and needs no model: other work goes on meanwhile.

    Args:
        tensors: of the model.
        form: format to which blocks are rounded that have more bits; None to take them as they are.
        max_outputs: rows of the head to keep; None for all.
    """

    def __init__(self, tensors: StoredTensors, form: int | None = None, max_outputs: int | None = None) -> None:
        self.tensors, self.max_outputs = tensors.with_head(max_outputs), max_outputs
        found = [name for name in tensors.linear if name in self.tensors and self.tensors[name].form is not None]
        names = [name.removesuffix(".weight") for name in found]
        self._stacks = [_stack(self.tensors, group, form) for group in _stacks(self.tensors, names)]
        self._packer, count = Packer([stack.parts for stack in self._stacks]), num_cores()
        pool = ThreadPoolExecutor(count)
        self._threads = [pool.submit(self._packer.run) for _ in range(count)]
        pool.shutdown(wait=False)

    @property
    def matrices(self) -> list[tuple[str, ...]]:
        """Names of the linear layers in blocks, those that are one matrix together."""
        return [stack.names for stack in self._stacks]

    def layers(self) -> Iterator[tuple[str, nn.Module]]:
        """Yield names and layers when all matrices are laid out."""
        for thread in self._threads:
            thread.result()
        for stack, weights in zip(self._stacks, self._packer.weights(), strict=True):
            yield from zip(stack.names, _layers(self.tensors, stack, weights), strict=True)

    def close(self) -> None:
        """Lay out no more matrices."""
        self._packer.stop()


def read_weights(model: Any, packing: Packing, dtype: torch.dtype) -> None:
    """Load weights into an empty model: matrices of linear layers as they are stored, and the rest in `dtype`.

    Args:
        model: a model on the meta device, except for its buffers.
        packing: of the model's tensors.
        dtype: type of norms, biases and embedding tables that are not in blocks.

    Raises:
        CorruptModelError: a tensor is missing or has another shape than the model's.
    """
    tensors = packing.tensors
    for name, module in [(name, module) for name, module in model.named_modules() if isinstance(module, nn.Linear)]:
        _check(tensors, name, module, packing.max_outputs if module is model.get_output_embeddings() else None)
        if tensors[f"{name}.weight"].form is None:
            weight, bias = tensors[f"{name}.weight"].floats().float(), tensors.get(f"{name}.bias")
            model.set_submodule(name, FloatLinear(weight, None if bias is None else bias.floats().float()))
    for name, layer in packing.layers():
        model.set_submodule(name, layer)
    for name, module in list(model.named_modules()):
        table = tensors.get(f"{name}.weight")
        scale = _table_scale(module)
        if scale is not None and table is not None and table.form is not None:
            _check_shape(f"{name}.weight", table.shape, (module.num_embeddings, module.embedding_dim))
            model.set_submodule(name, QuantizedEmbedding(table.form, table.rows(), scale))
            continue
        _fill(module, name, tensors, dtype)
        if (norm := fuse_norm(module)) is not None:
            model.set_submodule(name, norm)


def _table_scale(module: nn.Module) -> float | None:
    """Return the factor of a table of embeddings; None if a module is none, or does more with its rows than that."""
    if not isinstance(module, nn.Embedding):
        return None
    if type(module).forward is nn.Embedding.forward:
        return 1.0
    scale: Any = getattr(module, "embed_scale", None)
    return None if scale is None else float(scale)


def _check(tensors: StoredTensors, name: str, module: nn.Linear, most: int | None) -> None:
    """Raise unless a layer's matrix is there in its shape. Blocks have whole groups of features."""
    own, features = f"{name}.weight", module.in_features
    if own not in tensors or own not in tensors.linear:
        raise CorruptModelError("weights", own, "is missing", _HINT)
    if tensors[own].form is not None:
        features = tensors[own].shape[1] if 0 <= tensors[own].shape[1] - features < BLOCK else features
    outputs = module.out_features if most is None else min(most, module.out_features)
    _check_shape(own, tensors[own].shape, (outputs, features))


def _stacks(tensors: Mapping[str, StoredTensor], names: Collection[str]) -> list[tuple[str, ...]]:
    """Group the names of layers that read the same input, if their matrices can be one."""
    stacks = []
    for name in names:
        parent, _, last = name.rpartition(".")
        group = next((group for group in _SAME_INPUT if last in group), (last,))
        members = tuple(f"{parent}.{member}" if parent else member for member in group)
        stack = members if all(member in names for member in members) and _fit(tensors, members) else (name,)
        if name == stack[0]:
            stacks.append(stack)
    return stacks


def _fit(tensors: Mapping[str, StoredTensor], names: Sequence[str]) -> bool:
    """Return whether matrices can be one below the other: in one format or whole tiles, with or without biases."""
    own = [tensors[f"{name}.weight"] for name in names]
    whole_tiles = all(tensor.shape[0] % TILE == 0 for tensor in own[:-1])
    return (
        len({tensor.shape[1] for tensor in own}) == 1
        and (whole_tiles or len({tensor.form for tensor in own}) == 1)
        and len({f"{name}.bias" in tensors for name in names}) == 1
    )


def _stack(tensors: Mapping[str, StoredTensor], names: tuple[str, ...], most: int | None) -> _Stack:
    """Plan a matrix, whose blocks get the format `most` if they have more bits."""
    found = [tensors[f"{name}.weight"] for name in names]
    sizes = [tensor.shape[0] for tensor in found]
    parts = [MatrixPart(_form(tensor, most), [tensor.blocks()]) for tensor in found]
    if any(size % TILE for size in sizes[:-1]):  # then outputs of several layers share a tile
        parts = [MatrixPart(parts[0].form, [tensor.blocks() for tensor in found])]
    return _Stack(names, sizes, parts)


def _form(tensor: StoredTensor, most: int | None) -> int:
    """Return the format in which a matrix is run."""
    assert tensor.form is not None
    return tensor.form if most is None or FORMATS[tensor.form].bits <= FORMATS[most].bits else most


def _layers(tensors: Mapping[str, StoredTensor], stack: _Stack, weights: Weights) -> Sequence[nn.Module]:
    biases = [tensors[f"{name}.bias"].floats().float() for name in stack.names if f"{name}.bias" in tensors]
    whole = QuantizedLinear(weights, torch.cat(biases) if biases else None)
    return [whole] if len(stack.names) == 1 else split_by_layer(whole, stack.sizes)


def _fill(module: nn.Module, name: str, tensors: Mapping[str, StoredTensor], dtype: torch.dtype) -> None:
    """Set a module's own parameters."""
    for key, parameter in list(module.named_parameters(recurse=False)):
        full = f"{name}.{key}" if name else key
        if full not in tensors:
            raise CorruptModelError("weights", full, "is missing", _HINT)
        # A copy: a view would keep the whole file mapped, and counted as memory.
        tensor = tensors[full].floats().to(dtype, copy=True)
        _check_shape(full, tensor.shape, parameter.shape)
        setattr(module, key, nn.Parameter(tensor, requires_grad=False))


def _check_shape(name: str, shape: Sequence[int], wanted: Sequence[int]) -> None:
    if tuple(shape) != tuple(wanted):
        raise CorruptModelError("weights", name, f"has shape {list(shape)}, not {list(wanted)}")
