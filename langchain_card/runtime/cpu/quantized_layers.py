"""Linear layers and norms whose output rows have the same bits whatever rows are beside them."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from langchain_card.runtime.cpu import row_layers
from langchain_card.runtime.cpu.blocks.formats import FORMATS, dequantize
from langchain_card.runtime.cpu.blocks.matmul import Weights
from langchain_card.runtime.cpu.compiled import Array, Bytes
from langchain_card.runtime.cpu.team import cores


class QuantizedLinear(nn.Module):
    """A linear layer with blocks of quantized weights.

    Args:
        weights: the matrix as the kernel reads it.
        bias: float32 [out_features] or None.
    """

    def __init__(self, weights: Weights, bias: Tensor | None = None) -> None:
        super().__init__()
        self.weights, self.bias = weights, bias
        self.in_features, self.out_features = weights.features, weights.outputs

    def forward(self, x: Tensor) -> Tensor:
        """Multiply float32 [..., in_features] to float32 [..., out_features]."""
        rows = x.reshape(-1, x.shape[-1]).contiguous().numpy()
        with cores() as team:
            y = row_layers.linear(rows, self.weights, as_array(self.bias), team)
        return torch.from_numpy(y).view(*x.shape[:-1], self.out_features)


class FloatLinear(nn.Module):
    """A linear layer of float32, for the matrices that a file of blocks holds as numbers.

    Args:
        weight: float32 [out_features, in_features].
        bias: float32 [out_features] or None.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(weight, requires_grad=False), bias
        self.out_features, self.in_features = weight.shape

    def forward(self, x: Tensor) -> Tensor:
        """Multiply float32 [..., in_features] to float32 [..., out_features]."""
        rows = x.reshape(-1, x.shape[-1]).contiguous().numpy()
        with cores() as team:
            y = row_layers.float_linear(rows, self.weight.numpy(), as_array(self.bias), team)
        return torch.from_numpy(y).view(*x.shape[:-1], self.out_features)


class QuantizedEmbedding(nn.Module):
    """An embedding table whose rows are read from the blocks of a file.

    Args:
        form: number of the blocks' format.
        rows: [tokens, bytes]; a view of a mapped file takes memory only for the tokens that are used.
        scale: factor of all rows, as Gemma has one.
    """

    def __init__(self, form: int, rows: Bytes, scale: float = 1.0) -> None:
        super().__init__()
        self._form, self._rows, self._scale = form, rows, scale
        self.num_embeddings = len(rows)
        self.embedding_dim = rows.shape[1] // FORMATS[form].size * FORMATS[form].features

    def forward(self, token_ids: Tensor) -> Tensor:
        """Look up [...] token ids: float32 [..., embedding_dim]."""
        found = dequantize(self._form, self._rows[token_ids.reshape(-1).numpy()])
        return torch.from_numpy(found).mul_(self._scale).view(*token_ids.shape, self.embedding_dim)


class LinearPart(nn.Module):
    """One of several layers that read the same input; the first call computes all of them in one kernel.

    Args:
        whole: a layer with the weights of all, one below the other.
        sizes: output features of each layer.
        index: index of this layer.
        last: [1] shared by the parts: the last input and all its outputs.
    """

    def __init__(
        self, whole: QuantizedLinear, sizes: list[int], index: int, last: list[tuple[Tensor, Any] | None]
    ) -> None:
        super().__init__()
        self._whole, self.sizes, self._index, self._last = (whole,), sizes, index, last
        self.in_features, self.out_features = whole.in_features, sizes[index]

    @property
    def whole(self) -> QuantizedLinear:
        """The whole layer. It is no submodule of its parts, because it would belong to several modules."""
        return self._whole[0]

    def forward(self, x: Tensor) -> Tensor:
        """Multiply float32 [..., in_features] to float32 [..., sizes[index]], a view."""
        seen = self._last[0]
        if seen is None or seen[0] is not x:  # or another thread's input came between
            seen = (x, self.whole(x).split(self.sizes, dim=-1))
            self._last[0] = seen
        if self._index == len(self.sizes) - 1:
            self._last[0] = None
        part: Tensor = seen[1][self._index]
        return part


def split_by_layer(whole: QuantizedLinear, sizes: list[int]) -> list[LinearPart]:
    """Split a layer into the layers that it was stacked from, in order."""
    last: list[tuple[Tensor, Any] | None] = [None]
    return [LinearPart(whole, sizes, index, last) for index in range(len(sizes))]


class FusedRMSNorm(nn.Module):
    """An RMS norm in one call; see `fuse_norm`."""

    def __init__(self, weight: Tensor, eps: float) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(weight, requires_grad=False), eps

    def forward(self, x: Tensor) -> Tensor:
        """Normalise [..., features]."""
        return F.rms_norm(x, self.weight.shape, self.weight, self.eps)


def fuse_norm(module: nn.Module) -> FusedRMSNorm | None:
    """Return a one-call replacement if `module` is an RMS norm by its name and its results; else None."""
    eps = getattr(module, "variance_epsilon", None)
    if not type(module).__name__.endswith("RMSNorm") or eps is None:
        return None
    fused = FusedRMSNorm(module.weight, eps)  # type: ignore[arg-type]
    probe = torch.linspace(-3, 3, fused.weight.numel())
    return fused if torch.allclose(module(probe), fused(probe), rtol=1e-5, atol=1e-6) else None


def as_array(vector: Tensor | None) -> Array:
    """Return a bias as an array for compiled code, empty for None."""
    return np.empty(0, np.float32) if vector is None else vector.numpy()
