"""Row-exact int8 products for CPUs.

A row of the output never depends on its neighbours: each activation row is scaled to one common range, rounded and
scaled back. The integer sums are exact because activations keep 7 bits (|a| <= 63): AVX2 without VNNI adds pairs of
products in 16 bits, and 2 * 255 * 63 = 32,130 fits where 8-bit activations would saturate silently.

A few features of a language model are far larger than the rest, which would get hardly any of the 7 bits. So both
sides are rotated first, in blocks of 64 features, by a Hadamard matrix: the sums stay the same, and an outlier is
spread over its block (QuaRot, arXiv 2404.00456; docs/LOG.md, 2026-11-21).

`integer_matmul` computes the products themselves.
"""

from __future__ import annotations

import functools
import math

import torch
from torch import Tensor

ACTIVATION_LEVELS = 63  # 7 bits, signed
ROTATED_FEATURES = 64
"""Features of a block that is rotated."""


@functools.cache
def _hadamard(size: int) -> Tensor:
    """Return an orthogonal, symmetric matrix [size, size], its own inverse; `size` is a power of two."""
    matrix = torch.ones(1, 1)
    while len(matrix) < size:
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)])
    return matrix / math.sqrt(size)


def rotate(x: Tensor) -> Tensor:
    """Rotate each block of features. Applied twice it gives `x` back, up to rounding.

    Args:
        x: float32 [..., features]; returned unchanged if the features are not whole blocks.
    """
    if x.shape[-1] % ROTATED_FEATURES:
        return x
    return (x.reshape(-1, ROTATED_FEATURES) @ _hadamard(ROTATED_FEATURES)).view(x.shape)


def quantize_rows(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Quantize a rotated weight to symmetric int8, with one scale per output row.

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
