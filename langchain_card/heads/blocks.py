"""A head's matrices in blocks: on disk, and in memory beside a target whose matrices are in blocks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor, nn

from langchain_card.heads.model import HeadModel, Mixture
from langchain_card.runtime.cpu import row_layers
from langchain_card.runtime.cpu.blocks.formats import FORMATS, Q4_K, Q8_0, dequantize
from langchain_card.runtime.cpu.blocks.packing import MatrixPart, StoredRows, pack
from langchain_card.runtime.cpu.blocks.rounding import quantize
from langchain_card.runtime.cpu.fused_layers import fuse_layers, stack_layers
from langchain_card.runtime.cpu.quantized_layers import QuantizedLinear, fuse_norm, split_by_layer
from langchain_card.runtime.cpu.team import cores

_READ_TOGETHER = ("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj")
"""Linear layers of a decoder layer that read the same input, in the order in which the kernel has them."""


FORMS: Mapping[int, int] = {8: Q8_0, 4: Q4_K}
"""Formats of blocks by their bits."""


def round_to_blocks(weight: Tensor, bits: int) -> StoredRows:
    """Round a matrix, float32 [outputs, features]. Features that are no whole blocks of `bits` get 8 bits."""
    form = FORMS[bits] if weight.shape[1] % FORMATS[FORMS[bits]].features == 0 else Q8_0
    return StoredRows(form, quantize(form, weight.detach().float().cpu().numpy()))


def numbers(stored: StoredRows) -> Tensor:
    """Return a matrix in blocks as float32 [outputs, features]."""
    return torch.from_numpy(dequantize(stored.form, stored.rows))


@torch.inference_mode()
def to_blocks(head: HeadModel, stored: Mapping[str, StoredRows]) -> None:
    """Replace a head's matrices by matrices in blocks, and its parts by compiled ones.

    Args:
        head: with weights in float32.
        stored: matrices that are in blocks already, by the names of the weights; others are rounded to 8 bits.
    """

    def blocks(name: str) -> StoredRows:
        found = stored.get(f"{name}.weight")
        return round_to_blocks(head.get_submodule(name).weight, 8) if found is None else found  # type: ignore[arg-type]

    for prefix, module in list(head.named_modules()):
        for names in _READ_TOGETHER:
            if all(isinstance(getattr(module, name, None), nn.Linear) for name in names):
                whole = _layer([blocks(f"{prefix}.{name}") for name in names])
                outputs = [getattr(module, name).out_features for name in names]
                for name, part in zip(names, split_by_layer(whole, outputs), strict=True):
                    setattr(module, name, part)
    head.set_submodule("fusion", _CompiledFusion(_layer([blocks("fusion.matrix")]), head.fusion.eps))
    head.set_submodule("mixture", _CompiledMixture(_layer([blocks("mixture.matrix")]), head.mixture))
    for name, module in list(head.named_modules()):
        if isinstance(module, nn.Linear):
            head.set_submodule(name, _layer([blocks(name)], module.bias))
        elif (fused := fuse_norm(module)) is not None:
            head.set_submodule(name, fused)
    fuse_layers(head)
    stack_layers(head)


class _CompiledFusion(nn.Module):
    def __init__(self, matrix: QuantizedLinear, eps: float) -> None:
        super().__init__()
        self._matrix, self._eps = matrix, np.float32(eps)

    def forward(self, states: Tensor) -> Tensor:
        """Fuse states as `Fusion` does."""
        with cores() as team:
            return torch.from_numpy(row_layers.fuse(states.numpy(), self._eps, self._matrix.weights, team))


class _CompiledMixture(nn.Module):
    def __init__(self, matrix: QuantizedLinear, mixture: Mixture) -> None:
        super().__init__()
        self._matrix, self._eps = matrix, np.float32(mixture.eps)
        self._norms = torch.stack([mixture.token_norm.weight, mixture.feature_norm.weight]).numpy()

    def forward(self, features: Tensor, embedded: Tensor) -> Tensor:
        """Mix as `Mixture` does."""
        own = features[0].numpy(), embedded[0].numpy()
        with cores() as team:
            return torch.from_numpy(row_layers.mix(*own, self._norms, self._eps, self._matrix.weights, team))[None]


def _layer(matrices: Sequence[StoredRows], bias: Tensor | None = None) -> QuantizedLinear:
    """Return a layer whose matrix is made of some matrices, one after the other."""
    whole = pack([MatrixPart(matrices[0].form, matrices)])
    return QuantizedLinear(whole, None if bias is None else bias.detach())
