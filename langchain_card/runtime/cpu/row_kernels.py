"""The operations of a decoder layer on a row between the matrix products, compiled by numba.

Each row is computed alone, so that its bits never depend on its neighbours. Arrays are float32 and contiguous. A
"scaled" row lies in [-1, 1] and is rotated in blocks by a Hadamard matrix, which spreads its largest values (QuaRot,
arXiv 2404.00456); its scale is the factor that was divided out.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from langchain_card.runtime.cpu.compiled import Array, row_wise

ROTATED_FEATURES = 64
"""Features of a block that is rotated."""

_ONE: np.float32 = np.float32(1.0)
_TINY, _HALF = np.float32(1e-30), np.float32(0.5)
_ROOT: np.float32 = np.float32(1 / 8)  # of ROTATED_FEATURES: the butterflies below leave each block 8 times too large
LOG2_E, LN2_HIGH, LN2_LOW = np.float32(1.44269504), np.float32(0.693359375), np.float32(-2.12194440e-4)
EXP_SERIES = tuple(np.float32(c) for c in (1.9875691e-4, 1.3981999e-3, 8.3334519e-3, 4.1665796e-2, 1.6666665e-1, 0.5))
EXP_LIMIT = np.float32(87.0)
_NO_SIGN = np.int32(0x7FFFFFFF)


@row_wise
def _largest_magnitude(bits: Any) -> np.float32:
    """Return the largest magnitude of floats, read as integers: without signs their order is the same, in vectors."""
    top = np.int32(0)
    for i in range(len(bits)):
        top = max(top, bits[i] & _NO_SIGN)
    one = np.empty(1, dtype=np.int32)
    one[0] = top
    found: np.float32 = one.view(np.float32)[0]
    return found


@row_wise
def rotate_row(row: Array) -> np.float32:
    """Rotate whole blocks in place, up to a factor; return the factor. Other rows stay as they are."""
    if len(row) % ROTATED_FEATURES:
        return _ONE
    half, other = ROTATED_FEATURES // 2, np.empty(ROTATED_FEATURES, dtype=np.float32)
    for start in range(len(row) // ROTATED_FEATURES):
        own = row[start * ROTATED_FEATURES : start * ROTATED_FEATURES + ROTATED_FEATURES]
        for _ in range(3):  # six times sums and differences of neighbours, to the two halves: all pairs have met
            for i in range(half):
                other[i] = own[2 * i] + own[2 * i + 1]
                other[half + i] = own[2 * i] - own[2 * i + 1]
            for i in range(half):
                own[i] = other[2 * i] + other[2 * i + 1]
                own[half + i] = other[2 * i] - other[2 * i + 1]
    return _ROOT


@row_wise
def scale_row(row: Array) -> np.float32:
    """Rotate whole blocks and divide by the largest magnitude, in place; return the scale."""
    factor = rotate_row(row)
    largest = max(_largest_magnitude(row.view(np.int32)), _TINY)
    shrink = _ONE / largest
    for i in range(len(row)):
        row[i] *= shrink
    grown: np.float32 = largest * factor
    return grown


@row_wise
def dot(x: Array, y: Array) -> np.float32:
    """Return the sum of products of two rows."""
    total: np.float32 = np.float32(0.0)
    for i in range(len(x)):
        total += x[i] * y[i]
    return total


@row_wise
def norm_factor(x: Array, eps: np.float32) -> np.float32:
    """Return the factor of an RMS norm for all features of a row."""
    total = np.float32(0.0)
    for i in range(len(x)):
        total += x[i] * x[i]
    factor: np.float32 = _ONE / np.sqrt(total / np.float32(len(x)) + eps)
    return factor


@row_wise
def norm_row(x: Array, weight: Array, factor: np.float32, out: Array) -> None:
    """Apply an RMS norm with its factor to some features of a row."""
    for i in range(len(x)):
        out[i] = weight[i] * (x[i] * factor)


@row_wise
def exp(row: Array, bits: Any) -> None:
    """Exponentiate float32 up to 87 in place, by Cephes' series, which runs in vectors. `bits` is scratch."""
    for i in range(len(row)):
        x = max(row[i], -EXP_LIMIT)
        k = np.floor(x * LOG2_E + _HALF)
        x = x - k * LN2_HIGH - k * LN2_LOW
        series = EXP_SERIES[0]
        series = series * x + EXP_SERIES[1]
        series = series * x + EXP_SERIES[2]
        series = series * x + EXP_SERIES[3]
        series = series * x + EXP_SERIES[4]
        series = series * x + EXP_SERIES[5]
        row[i] = series * x * x + x + _ONE
        bits[i] = (np.int32(k) + np.int32(127)) << np.int32(23)
    powers = bits.view(np.float32)
    for i in range(len(row)):
        row[i] *= powers[i]


@row_wise
def gate_row(gate: Array, up: Array, out: Array, bits: Any) -> None:
    """Compute SiLU(gate) * up.

    Args:
        gate: [features].
        up: [features].
        out: [features or more].
        bits: int32 [features or more], scratch.
    """
    own = out[: len(gate)]
    for i in range(len(own)):
        own[i] = min(-gate[i], EXP_LIMIT)
    exp(own, bits)
    for i in range(len(own)):
        own[i] = gate[i] / (_ONE + own[i]) * up[i]


@row_wise
def split_heads(
    y: Array, bias: Array, cos: Array, sin: Array, norms: Array, eps: np.float32,
    q: Array, k: Array, v: Array, h: int,
) -> None:  # fmt: skip
    """Compute a row's key and value of one head, and the queries of its group; keys and queries are rotated.

    Args:
        y: [at least all heads x head_dim] queries, keys, values.
        bias: [all heads x head_dim], or empty.
        cos: [head_dim], cosines of the row's position.
        sin: [head_dim], sines of the row's position.
        norms: [2, head_dim] weights of an RMS norm for queries and keys (Qwen 3), or empty.
        eps: epsilon of those norms.
        q: [heads, head_dim], output.
        k: [kv_heads, head_dim], output.
        v: [kv_heads, head_dim], output.
        h: head of keys and values.
    """
    (num_q, size), num_k = q.shape, len(k)
    half, group, row = size // 2, num_q // num_k, np.empty(size, np.float32)
    for i in range(group + 2):
        head = h * group + i if i < group else num_q + (i - group) * num_k + h
        for j in range(size):
            row[j] = y[head * size + j]
        if len(bias):
            for j in range(size):
                row[j] += bias[head * size + j]
        if head >= num_q + num_k:
            v[h] = row
            continue
        if len(norms):
            norm_row(row, norms[0 if i < group else 1], norm_factor(row, eps), row)
        out = q[head] if i < group else k[h]
        for j in range(half):
            out[j] = row[j] * cos[j] - row[j + half] * sin[j]
            out[j + half] = row[j + half] * cos[j + half] + row[j] * sin[j + half]
