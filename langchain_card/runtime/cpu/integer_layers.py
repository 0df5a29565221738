"""Linear layers and norms whose output rows have the same bits whatever rows are beside them."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from langchain_card.runtime.cpu import row_layers
from langchain_card.runtime.cpu.compiled import Array, cores
from langchain_card.runtime.cpu.int8 import ACTIVATION_LEVELS
from langchain_card.runtime.cpu.integer_matmul import pack


class IntegerLinear(nn.Module):
    """A linear layer with integer weights.

    Args:
        weight: int8 [out_features, in_features] from `quantize_rows`; packed for the kernel and not kept.
        scale: float32 [out_features].
        bias: float32 [out_features] or None.

    Attributes:
        weights: the matrix as the kernel reads it; a draft's is rounded to 4 bits.
    """

    def __init__(self, weight: Tensor, scale: Tensor, bias: Tensor | None = None) -> None:
        super().__init__()
        self.out_features, self.in_features = weight.shape
        self.bias = bias
        self.weights = pack(weight.numpy(), scale.numpy()[:, None], ACTIVATION_LEVELS)

    def forward(self, x: Tensor) -> Tensor:
        """Multiply float32 [..., in_features] to float32 [..., out_features]."""
        rows = x.reshape(-1, self.in_features).contiguous().numpy()
        with cores() as threads:
            y = row_layers.linear(rows, self.weights, as_array(self.bias), threads)
        return torch.from_numpy(y).view(*x.shape[:-1], self.out_features)

    def first_rows(self, count: int) -> IntegerLinear:
        """Return a layer with the first `count` outputs."""
        weight, scales = self.weights.unpack()
        scale = torch.from_numpy(scales[:count, 0])
        return IntegerLinear(torch.from_numpy(weight[:count]), scale, None if self.bias is None else self.bias[:count])


class IntegerPart(nn.Module):
    """One of several layers that read the same input; the first call computes all of them in one kernel.

    Args:
        whole: a layer with the weights of all, one below the other.
        sizes: output features of each layer.
        index: index of this layer.
        last: [1] shared by the parts: the last input and all its outputs.
    """

    def __init__(
        self, whole: IntegerLinear, sizes: list[int], index: int, last: list[tuple[Tensor, Any] | None]
    ) -> None:
        super().__init__()
        self._whole, self._sizes, self._index, self._last = (whole,), sizes, index, last

    @property
    def whole(self) -> IntegerLinear:
        """The whole layer. It is no submodule of its parts, because it would belong to several modules."""
        return self._whole[0]

    def forward(self, x: Tensor) -> Tensor:
        """Multiply float32 [..., in_features] to float32 [..., sizes[index]], a view."""
        seen = self._last[0]
        if seen is None or seen[0] is not x:  # or another thread's input came between
            seen = (x, self.whole(x).split(self._sizes, dim=-1))
            self._last[0] = seen
        if self._index == len(self._sizes) - 1:
            self._last[0] = None
        part: Tensor = seen[1][self._index]
        return part


def split_by_layer(whole: IntegerLinear, sizes: list[int]) -> list[IntegerPart]:
    """Split a layer into the layers that it was stacked from, in order."""
    last: list[tuple[Tensor, Any] | None] = [None]
    return [IntegerPart(whole, sizes, index, last) for index in range(len(sizes))]


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
