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
        row_scale = torch.linalg.vector_norm(x, ord=torch.inf, dim=-1, keepdim=True).clamp_min_(1e-30)
        y = _kernel(x / row_scale, self._packed)
        return y.mul_(row_scale) if self.bias is None else torch.addcmul(self.bias, y, row_scale)

    def extra_repr(self) -> str:
        """Shape and whether there is a bias, as torch's own linear prints it."""
        return f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}"


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
