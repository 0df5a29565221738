"""What a decoder layer does to its rows between the matrix products, each in one pass over a row; compiled by numba.

On a CPU a step of a small model is half small operations: dozens a layer, each with its own dispatch, and all of them
cold, because the weights have just been read through the caches. Here a row is normed, rotated and scaled to the range
of the integer kernel at once, and every row by itself, so that its bits never depend on its neighbours.

Arrays are float32 and contiguous. "Scaled" rows lie in [-1, 1] and are rotated in blocks (`int8.rotate`); `scale`, one
number a row, takes them back.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numba
import numpy as np

Array = np.ndarray[Any, np.dtype[np.float32]]

BLOCK = 64  # features rotated together; `int8.ROTATED_BLOCK`


def compiled(**options: Any) -> Callable[[Callable[..., Any]], Any]:
    """Compiles a function that leaves Python's lock; what was compiled is kept on disk, where there is a place."""

    def compile_now(function: Callable[..., Any]) -> Any:
        try:
            return numba.njit(nogil=True, cache=True, **options)(function)
        except RuntimeError:  # no such place
            return numba.njit(nogil=True, **options)(function)

    return compile_now


# Sums may be split over vector lanes, the same way for every row; nobody asks which NaN or zero it was.
row_wise = compiled(error_model="numpy", fastmath={"reassoc", "contract", "nnan", "nsz"})

_ONE, _TINY, _HALF = np.float32(1.0), np.float32(1e-30), np.float32(0.5)
_ROOT = np.float32(1 / 8)  # of BLOCK: the butterflies below leave each block 8 times too large
_LOG2_E, _LN2_HIGH, _LN2_LOW = np.float32(1.44269504), np.float32(0.693359375), np.float32(-2.12194440e-4)
_EXP = tuple(np.float32(c) for c in (1.9875691e-4, 1.3981999e-3, 8.3334519e-3, 4.1665796e-2, 1.6666665e-1, 0.5))
_EXP_LIMIT = np.float32(87.0)
_NO_SIGN = np.int32(0x7FFFFFFF)


@row_wise
def _largest_magnitude(bits: Any) -> np.float32:
    """Of floats, given as integers: without their signs both are in the same order, and this one runs in vectors."""
    top = np.int32(0)
    for i in range(len(bits)):
        top = max(top, bits[i] & _NO_SIGN)
    one = np.empty(1, dtype=np.int32)
    one[0] = top
    found: np.float32 = one.view(np.float32)[0]
    return found


@row_wise
def _rotate_and_scale(row: Array) -> np.float32:
    """In place: rotates whole blocks and divides by the largest magnitude, which is returned."""
    factor, half = _ONE, BLOCK // 2
    if len(row) % BLOCK == 0:
        factor, other = _ROOT, np.empty(BLOCK, dtype=np.float32)
        for start in range(len(row) // BLOCK):
            own = row[start * BLOCK : start * BLOCK + BLOCK]
            for _ in range(3):  # six times sums and differences of neighbours, to the two halves: all pairs have met
                for i in range(half):
                    other[i] = own[2 * i] + own[2 * i + 1]
                    other[half + i] = own[2 * i] - own[2 * i + 1]
                for i in range(half):
                    own[i] = other[2 * i] + other[2 * i + 1]
                    own[half + i] = other[2 * i] - other[2 * i + 1]
    largest = max(_largest_magnitude(row.view(np.int32)), _TINY)
    shrink = _ONE / largest
    for i in range(len(row)):
        row[i] *= shrink
    grown: np.float32 = largest * factor
    return grown


@row_wise
def scaled(x: Array, out: Array, scale: Array) -> None:
    """Scaled rows of `x` [rows, features] into `out`, and their scales [rows]."""
    for n in range(len(x)):
        row = out[n]
        for i in range(len(row)):
            row[i] = x[n, i]
        scale[n] = _rotate_and_scale(row)


@row_wise
def _norm_row(x: Array, weight: Array, eps: np.float32, out: Array) -> None:
    total = np.float32(0.0)
    for i in range(len(x)):
        total += x[i] * x[i]
    factor = _ONE / np.sqrt(total / np.float32(len(x)) + eps)
    for i in range(len(x)):
        out[i] = weight[i] * (x[i] * factor)


@row_wise
def normed(x: Array, weight: Array, eps: np.float32, out: Array, scale: Array) -> None:
    """RMS-normed, then scaled rows of `x` [rows, features]."""
    for n in range(len(x)):
        _norm_row(x[n], weight, eps, out[n])
        scale[n] = _rotate_and_scale(out[n])


@row_wise
def add(x: Array, y: Array, scale: Array) -> None:
    """Adds products `y` [rows, features] of scaled rows, brought back by `scale`, to `x`, in place."""
    for n in range(len(x)):
        for i in range(x.shape[1]):
            x[n, i] += y[n, i] * scale[n]


@row_wise
def exp(row: Array, bits: Any) -> None:
    """Exponentials, in place, of float32 up to 87; by Cephes' series, for that runs in vectors. `bits` is scratch."""
    for i in range(len(row)):
        x = max(row[i], -_EXP_LIMIT)
        k = np.floor(x * _LOG2_E + _HALF)
        x = x - k * _LN2_HIGH - k * _LN2_LOW
        series = _EXP[0]
        series = series * x + _EXP[1]
        series = series * x + _EXP[2]
        series = series * x + _EXP[3]
        series = series * x + _EXP[4]
        series = series * x + _EXP[5]
        row[i] = series * x * x + x + _ONE
        bits[i] = (np.int32(k) + np.int32(127)) << np.int32(23)
    powers = bits.view(np.float32)
    for i in range(len(row)):
        row[i] *= powers[i]


@row_wise
def gated(y: Array, scale: Array, out: Array, out_scale: Array, bits: Any) -> None:
    """Scaled rows of SiLU(gate) * up.

    Args:
        y: [rows, 2 features], products of scaled rows: gates, then ups.
        scale: [rows] of those rows.
        out: [rows, features].
        out_scale: [rows].
        bits: int32 [features], scratch.
    """
    size = out.shape[1]
    for n in range(len(y)):
        gate, up, row, factor = y[n, :size], y[n, size:], out[n], scale[n]
        for i in range(size):
            row[i] = min(-gate[i] * factor, _EXP_LIMIT)
        exp(row, bits)
        for i in range(size):
            row[i] = (gate[i] * factor) / (_ONE + row[i]) * (up[i] * factor)
        out_scale[n] = _rotate_and_scale(row)


@row_wise
def heads(
    y: Array,
    scale: Array,
    bias: Array,
    cos: Array,
    sin: Array,
    norms: Array,
    eps: np.float32,
    q: Array,
    k: Array,
    v: Array,
) -> None:
    """Queries and keys, rotated to their positions, and values.

    Args:
        y: [rows, all heads x head_dim], products of scaled rows: queries, keys, values.
        scale: [rows] of those rows.
        bias: [as one row of `y`], or empty.
        cos: [rows, head_dim], cosines of the rows' positions.
        sin: likewise.
        norms: [2, head_dim] weights of an RMS norm for queries and keys (Qwen 3), or empty.
        eps: of those norms.
        q: [rows, heads, head_dim], to be filled.
        k: likewise.
        v: likewise.
    """
    num_q, size, half = q.shape[1], q.shape[2], q.shape[2] // 2
    num_k = k.shape[1]
    row = np.empty(y.shape[1], dtype=np.float32)
    for n in range(len(y)):
        for i in range(len(row)):
            row[i] = y[n, i] * scale[n]
        if len(bias):
            for i in range(len(row)):
                row[i] += bias[i]
        for h in range(num_q + num_k):
            own = row[h * size : (h + 1) * size]
            if len(norms):
                _norm_row(own, norms[0 if h < num_q else 1], eps, own)
            out = q[n, h] if h < num_q else k[n, h - num_q]
            for i in range(half):
                out[i] = own[i] * cos[n, i] - own[i + half] * sin[n, i]
                out[i + half] = own[i + half] * cos[n, i + half] + own[i] * sin[n, i + half]
        for h in range(num_k):
            start = (num_q + num_k + h) * size
            v[n, h] = row[start : start + size]
