"""Row-exact int8 linear layers for CPUs.

A row of the output never depends on its neighbours: every activation row is scaled to one common range, the integer
kernel runs with one fixed activation scale, and the rows are scaled back. The integer sums are exact because
activations keep 7 bits (|a| <= 63, zero point 64): AVX2 without VNNI adds pairs of products in 16 bits, and
2 * 127 * 128 = 32,512 fits where 8-bit activations would saturate silently.

A few features of a language model are far larger than the rest and would leave them hardly any of the 7 bits. So both
sides are rotated first, in blocks of 64 features, by a Hadamard matrix: the sums stay what they were, and an outlier
is shared by its block (QuaRot, arXiv 2404.00456; what it gains here is in docs/LOG.md).

The functions that make torch's quantized tensors are marked deprecated; they are used in this file only.
"""

from __future__ import annotations

import functools
import math
import warnings
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from langchain_card.runtime.threads import single_threaded

ACTIVATION_LEVELS = 63  # 7 bits: -63..63 around the zero point
ACTIVATION_ZERO_POINT = 64
ROTATED_BLOCK = 64


@functools.cache
def _hadamard(size: int) -> Tensor:
    """[size, size], orthogonal and symmetric, so that it is its own inverse; `size` is a power of two."""
    matrix = torch.ones(1, 1)
    while len(matrix) < size:
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)])
    return matrix / math.sqrt(size)


def rotate(x: Tensor) -> Tensor:
    """Rotates each block of features; one that is applied twice gives `x` back, up to rounding.

    Args:
        x: float32 [..., features]; left as it is when the features are not whole blocks.
    """
    if x.shape[-1] % ROTATED_BLOCK:
        return x
    with single_threaded():  # split between threads, a row's bits depend on how many rows there are
        return (x.reshape(-1, ROTATED_BLOCK) @ _hadamard(ROTATED_BLOCK)).view(x.shape)


def quantize_rows(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Symmetric int8 of the rotated weight, one scale per output row.

    Args:
        weight: [out_features, in_features], any float dtype.

    Returns:
        int8 [out_features, in_features] in -127..127, and float32 scales [out_features] with
        `rotate(weight) ~= q * scale[:, None]`. A row of zeros gets scale 1.
    """
    weight = rotate(weight.float())
    scale = weight.abs().amax(dim=1) / 127
    scale = torch.where(scale == 0, torch.ones_like(scale), scale)
    return torch.round(weight / scale[:, None]).to(torch.int8), scale


class Int8Linear(nn.Module):
    """A linear layer with int8 weights whose output rows are independent of each other, bit for bit.

    Args:
        weight: int8 [out_features, in_features] from `quantize_rows`; packed for the kernel and not kept.
        scale: float32 [out_features].
        bias: float32 [out_features] or None.
    """

    def __init__(self, weight: Tensor, scale: Tensor, bias: Tensor | None = None) -> None:
        super().__init__()
        self.out_features, self.in_features = weight.shape
        self.bias = bias
        self._packed = _pack(weight, scale)

    def forward(self, x: Tensor) -> Tensor:
        """Float32 [..., in_features] -> float32 [..., out_features]."""
        x = rotate(x)
        row_scale = x.abs().amax(dim=-1, keepdim=True).clamp_min_(1e-30)
        y = _kernel(x / row_scale, self._packed)
        return y.mul_(row_scale) if self.bias is None else torch.addcmul(self.bias, y, row_scale)

    def extra_repr(self) -> str:
        """Shape and whether there is a bias, as torch's own linear prints it."""
        return f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}"


class Int8Part(nn.Module):
    """One of several layers that read the same input: the first that is called computes all of them in one kernel.

    Args:
        whole: the layers' weights, one below the other.
        sizes: output features of each layer.
        index: which of them this is.
        last: [1] shared by the parts: the input seen last, and all outputs for it.
    """

    def __init__(self, whole: Int8Linear, sizes: list[int], index: int, last: list[tuple[Tensor, Any] | None]) -> None:
        super().__init__()
        self._whole, self._sizes, self._index, self._last = (whole,), sizes, index, last

    def forward(self, x: Tensor) -> Tensor:
        """Float32 [..., in_features] -> float32 [..., sizes[index]], a view."""
        seen = self._last[0]
        if seen is None or seen[0] is not x:  # also when another thread's input came between: then it is computed anew
            seen = (x, self._whole[0](x).split(self._sizes, dim=-1))
            self._last[0] = seen
        if self._index == len(self._sizes) - 1:
            self._last[0] = None
        part: Tensor = seen[1][self._index]
        return part


def split_by_layer(whole: Int8Linear, sizes: list[int]) -> list[Int8Part]:
    """The layers that `whole` was stacked from, in order."""
    last: list[tuple[Tensor, Any] | None] = [None]
    return [Int8Part(whole, sizes, index, last) for index in range(len(sizes))]


class FusedRMSNorm(nn.Module):
    """RMS normalisation in one call; see `fuse_norm`."""

    def __init__(self, weight: Tensor, eps: float) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(weight, requires_grad=False), eps

    def forward(self, x: Tensor) -> Tensor:
        """[..., features] -> the same."""
        return F.rms_norm(x, self.weight.shape, self.weight, self.eps)


def fuse_norm(module: nn.Module) -> FusedRMSNorm | None:
    """A one-call replacement, when `module` is an RMS norm by name and by what it computes; else None."""
    eps = getattr(module, "variance_epsilon", None)
    if not type(module).__name__.endswith("RMSNorm") or eps is None:
        return None
    fused = FusedRMSNorm(module.weight, eps)  # type: ignore[arg-type]
    probe = torch.linspace(-3, 3, fused.weight.numel())
    return fused if torch.allclose(module(probe), fused(probe), rtol=1e-5, atol=1e-6) else None


def kernel_name() -> str | None:
    """The integer kernel that runs here, or None where this build of torch has none."""
    engines = torch.backends.quantized.supported_engines
    return next((name for name in ("fbgemm", "x86") if name in engines), None)


def _pack(weight: Tensor, scale: Tensor) -> Any:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*quantized tensor creation functions.*")
        zero_points = torch.zeros(weight.shape[0], dtype=torch.long)
        quantized = torch._make_per_channel_quantized_tensor(weight, scale.double(), zero_points, 0)
        return torch.ops.quantized.linear_prepack(quantized, None)


def _kernel(x: Tensor, packed: Any) -> Tensor:
    """[-1, 1] float32 rows -> float32; quantizes to 7 bits, multiplies in integers, scales by the weight's scales."""
    out: Tensor = torch.ops.quantized.linear_with_input_q_dq_qweight_dq_output_fp32.default(
        x, 1 / ACTIVATION_LEVELS, ACTIVATION_ZERO_POINT, packed
    )
    return out
