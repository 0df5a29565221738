"""Row-exact int8 linear layers for CPUs.

A row of the output never depends on its neighbours: every activation row is scaled to one common range, the integer
kernel runs with one fixed activation scale, and the rows are scaled back. The integer sums are exact because
activations keep 7 bits (|a| <= 63, zero point 64): AVX2 without VNNI adds pairs of products in 16 bits, and
2 * 127 * 128 = 32,512 fits where 8-bit activations would saturate silently.

The functions that make torch's quantized tensors are marked deprecated; they are used in this file only.
"""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import Tensor, nn

ACTIVATION_LEVELS = 63  # 7 bits: -63..63 around the zero point
ACTIVATION_ZERO_POINT = 64


def quantize_rows(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Symmetric int8, one scale per output row.

    Args:
        weight: [out_features, in_features], any float dtype.

    Returns:
        int8 [out_features, in_features] in -127..127, and float32 scales [out_features] with
        `weight ~= q * scale[:, None]`. A row of zeros gets scale 1.
    """
    weight = weight.float()
    scale = weight.abs().amax(dim=1) / 127
    scale = torch.where(scale == 0, torch.ones_like(scale), scale)
    return torch.round(weight / scale[:, None]).to(torch.int8), scale
