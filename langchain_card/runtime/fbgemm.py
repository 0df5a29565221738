"""Products of rows with int8 weights by torch's own kernel, fbgemm, where `vnni` does not run.

What makes torch's quantized tensors is marked deprecated; it is used in this file only.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from langchain_card.runtime.int8 import ACTIVATION_LEVELS

if TYPE_CHECKING:  # a compiler comes with it, which float weights do not need
    from langchain_card.runtime.row_kernels import Array

_ZERO_POINT = 64

with warnings.catch_warnings(action="ignore"):  # torch says it once; several threads may not silence it together
    torch._make_per_channel_quantized_tensor(torch.zeros(1, 1, dtype=torch.int8), torch.ones(1), torch.zeros(1), 0)


def runs_here() -> bool:
    """Whether this build of torch has the kernel."""
    return bool({"fbgemm", "x86"} & set(torch.backends.quantized.supported_engines))


@dataclass(frozen=True, slots=True)
class Weights:
    """A matrix as the kernel reads it; see `vnni.Weights`."""

    packed: Any

    def multiply(self, rows: Array) -> Array:
        """See `vnni.Weights`."""
        product = torch.ops.quantized.linear_with_input_q_dq_qweight_dq_output_fp32.default
        found: Array = product(torch.from_numpy(rows), 1 / ACTIVATION_LEVELS, _ZERO_POINT, self.packed).numpy()
        return found

    def unpack(self) -> tuple[Any, Array]:
        """See `vnni.Weights`."""
        weight, _ = torch.ops.quantized.linear_unpack(self.packed)
        return weight.int_repr().numpy(), weight.q_per_channel_scales().float().numpy()[:, None]


def pack(weight: Any, scales: Array) -> Weights:
    """Lays a matrix out for the kernel.

    Args:
        weight: int8 [outputs, features].
        scales: float32 [outputs, 1].
    """
    zero_points = torch.zeros(len(weight), dtype=torch.long)
    scale = torch.from_numpy(np.ravel(scales)).double()
    quantized = torch._make_per_channel_quantized_tensor(torch.from_numpy(weight), scale, zero_points, 0)
    return Weights(torch.ops.quantized.linear_prepack(quantized, None))
