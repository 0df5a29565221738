"""Round a draft's weights to 4 bits: a step reads half as much as with int8, in half the time.

A draft only guesses, so its weights may be inexact. They are made from the int8 form, which is rotated already, and
rounded to 16 levels with a scale for each 128 features of a row.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from langchain_card.runtime.cpu import integer_matmul as products
from langchain_card.runtime.cpu.compiled import Array, compiled
from langchain_card.runtime.cpu.integer_layers import IntegerLinear, IntegerPart

GROUP = 128
_LEVELS = 127


def to_4_bits(model: Any) -> None:
    """Round the integer layers of a model, also those inside fused layers, if their features are whole groups."""
    wholes = [module.whole if isinstance(module, IntegerPart) else module for module in model.modules()]
    for layer in dict.fromkeys(wholes):
        if isinstance(layer, IntegerLinear) and layer.in_features % GROUP == 0:
            weight, scales = layer.weights.unpack()
            rounded = np.empty_like(weight)
            group_scales = np.empty((len(weight), layer.in_features // GROUP), np.float32)
            _round(weight, scales, rounded, group_scales)
            layer.weights = products.pack(rounded, group_scales, _LEVELS, products.NIBBLE_OFFSET)


@compiled()
def _round(weight: Any, scales: Array, rounded: Any, group_scales: Array) -> None:
    """Round int8 [out, in] with scales [out, 1] to -8..7 with scales [out, groups]."""
    for o in range(len(weight)):
        for g in range(group_scales.shape[1]):
            own, out = weight[o, g * GROUP : (g + 1) * GROUP], rounded[o, g * GROUP : (g + 1) * GROUP]
            top = 1
            for i in range(GROUP):
                top = max(top, abs(np.int32(own[i])))
            step = np.float32(top) / np.float32(7.5)
            for i in range(GROUP):
                out[i] = min(max(np.int32(np.rint(own[i] / step)), -8), 7)
            group_scales[o, g] = step * scales[o, 0]
