"""Rounding of float matrices to blocks of 8 or 4 bits."""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import types

from langchain_card.runtime.cpu.blocks.formats import FORMATS, Q4_K, Q8_0, half
from langchain_card.runtime.cpu.compiled import Array, Bytes, compiled
from langchain_card.runtime.cpu.vectors import (
    F32,
    FLOATS,
    I8,
    I32,
    I64,
    LANES,
    SUMS,
    Builder,
    bits_of,
    bytes_at,
    float_of,
    intrinsic,
    own_function,
    vector,
)

_SIGN = 0x80000000
_ZERO, _ONE, _TOP, _STEPS = np.float32(0.0), np.float32(1.0), np.float32(15.0), np.float32(63.0)
_FEATURES, _SIZES = np.array([form.features for form in FORMATS]), np.array([form.size for form in FORMATS])
_TRIES, _SHORTER = 8, np.float32(0.25)
"""Scales that are tried for a group of `Q4_K`: the whole range in 15 levels, then in up to 1.75 fewer."""


@compiled()
def quantize(form: int, weights: Array) -> Bytes:
    """Round a matrix to blocks.

    Args:
        form: `Q8_0`, `Q4_0`, or `Q4_K`, which loses less than `Q4_0` (docs/LOG.md) and takes ten times as long.
        weights: float32 [outputs, features], all finite; features are whole blocks.

    Returns:
        Blocks [outputs, bytes].
    """
    weights = np.ascontiguousarray(weights)
    outputs, features = weights.shape
    size, blocks = _SIZES[form], features // _FEATURES[form]
    rows = np.empty((outputs, blocks * size), np.uint8)
    for n in range(outputs):
        if form == Q4_K:
            for i in range(blocks):
                _to_q4_k(weights[n, i * 256 : (i + 1) * 256], rows[n, i * size : (i + 1) * size])
        else:
            _to_codes(form, weights[n].ctypes.data, rows[n].ctypes.data, blocks)
    return rows


@compiled()
def _to_codes(form: int, own: int, out: int, groups: int) -> None:
    """Round groups so that their value of largest magnitude has the last code: of its sign, or of either in `Q8_0`.

    Args:
        form: `Q8_0` or `Q4_0`.
        own: address of 32 floats of each group.
        out: address of the blocks.
        groups: number of groups.
    """
    size = _SIZES[form]
    for i in range(groups):
        largest = _largest(own + 128 * i)
        factor = abs(largest) / np.float32(127.0) if form == Q8_0 else largest / np.float32(-8.0)
        _put_half(factor, bytes_at(out + size * i, 2), 0)
        factor = half(_half_bits(factor))
        per = _ONE / factor if factor else _ZERO
        if form == Q8_0:
            _put_bytes(own + 128 * i, per, out + size * i + 2)
        else:
            _put_nibbles(own + 128 * i, per, out + size * i + 2)


@compiled()
def _largest(own: int) -> np.float32:
    """Return the value of largest magnitude of 32 floats at an address; the negative one of two."""
    top, bottom = _largest_bits(own, 0), _largest_bits(own, _SIGN)
    largest: np.float32 = float_of(top) if top > bottom else -float_of(bottom)
    return largest


@intrinsic
def _largest_bits(context: Any, own: Any, sign: Any) -> Any:
    """Return the bits of the largest positive value of 32 floats whose signs are changed by `sign`; 0 if none is.

    The order of positive floats is that of their bits; bits of negative ones are negative numbers.
    """

    def generate(context: Any, b: Any, signature: Any, args: Any) -> Any:
        k = Builder(b)
        left, right = (b.xor(k.load(args[0], I64(i), 64, SUMS), k.everywhere(b.trunc(args[1], I32))) for i in range(2))
        larger = b.select(b.icmp_signed(">", left, right), left, right)
        larger = b.select(b.icmp_signed(">", larger, SUMS([0] * LANES)), larger, SUMS([0] * LANES))
        return b.zext(k.call("llvm.vector.reduce.smax.v16i32", I32, larger), I64)

    return types.int64(types.int64, types.int64), generate


def _codes(b: Any, own: Any, per: Any, part: int, bottom: int, top: int) -> Any:
    """Return 16 of 32 floats times `per` as the nearest integers of a range: [16] int32."""
    k = Builder(b)
    scaled = b.fmul(k.load(own, I64(part), 64, FLOATS), k.everywhere_float(per))
    for limit, order in ((bottom, ">"), (top, "<")):
        bound = FLOATS([float(limit)] * LANES)
        scaled = b.select(b.fcmp_ordered(order, scaled, bound), scaled, bound)
    return k.nearest(scaled)


def _write_nibbles(b: Any, args: Any) -> None:
    own, per, out = args
    k, shift = Builder(b), SUMS([8] * LANES)
    low, high = (b.add(_codes(b, own, per, part, -8, 7), shift) for part in range(2))
    both = b.trunc(b.or_(low, b.shl(high, SUMS([4] * LANES))), vector(I8, LANES))
    b.store(both, k.pointer(out, I64(0), 1, both.type), align=1)


def _write_bytes(b: Any, args: Any) -> None:
    own, per, out = args
    k = Builder(b)
    for part in range(2):
        levels = b.trunc(_codes(b, own, per, part, -128, 127), vector(I8, LANES))
        b.store(levels, k.pointer(out, I64(part), LANES, levels.type), align=1)


@intrinsic
def _put_nibbles(context: Any, own: Any, per: Any, out: Any) -> Any:
    """Store 32 floats at an address, times `per`, as codes of 4 bits: the first 16 are the lower halves of bytes."""

    def generate(context: Any, b: Any, signature: Any, args: Any) -> Any:
        b.call(own_function(b.module, "nibbles", [I64, F32, I64], _write_nibbles), args)
        return context.get_dummy_value()

    return types.void(types.int64, types.float32, types.int64), generate


@intrinsic
def _put_bytes(context: Any, own: Any, per: Any, out: Any) -> Any:
    """Store 32 floats at an address, times `per`, as signed bytes."""

    def generate(context: Any, b: Any, signature: Any, args: Any) -> Any:
        b.call(own_function(b.module, "bytes", [I64, F32, I64], _write_bytes), args)
        return context.get_dummy_value()

    return types.void(types.int64, types.float32, types.int64), generate


@compiled()
def _to_q4_k(own: Array, out: Bytes) -> None:
    codes, scales, lows = np.empty(32, np.float32), np.empty(8, np.float32), np.empty(8, np.float32)
    for g in range(8):
        scales[g], lows[g] = _fit(own[32 * g : 32 * g + 32], codes)
    factor, least = scales.max() / _STEPS, lows.max() / _STEPS
    _put_half(factor, out, 0)
    _put_half(least, out, 2)
    factor, least = half(_half_bits(factor)), half(_half_bits(least))
    out[4:16] = 0
    for g in range(8):
        scale, low = _steps(scales[g], factor), _steps(lows[g], least)
        _put_scales(g, scale, low, out)
        per, down = factor * np.float32(scale), least * np.float32(low)
        shrink = _ONE / per if per > _ZERO else _ZERO
        for i in range(32):
            code = np.uint8(min(max(np.rint((own[32 * g + i] + down) * shrink), _ZERO), _TOP))
            place = 16 + 32 * (g // 2) + i
            out[place] = code if g % 2 == 0 else out[place] | (code << 4)


@compiled()
def _fit(own: Array, codes: Array) -> tuple[np.float32, np.float32]:
    """Return scale and minimum of a group for which `scale * code - minimum` is nearest, among those that are tried."""
    bottom, top = min(own.min(), _ZERO), own.max()
    if top <= bottom:
        return _ZERO, -bottom
    least, scale, low = np.float32(np.inf), _ZERO, _ZERO
    for attempt in range(_TRIES):
        per = (top - bottom) / (_TOP - _SHORTER * np.float32(attempt))
        sum_c, sum_cc, sum_x, sum_cx = _ZERO, _ZERO, _ZERO, _ZERO
        for i in range(32):
            codes[i] = min(np.rint((own[i] - bottom) / per), _TOP)
            sum_c += codes[i]
            sum_cc += codes[i] * codes[i]
            sum_x += own[i]
            sum_cx += codes[i] * own[i]
        spread = np.float32(32) * sum_cc - sum_c * sum_c
        fitted, shift = per, -bottom
        if spread > _ZERO:
            fitted = (np.float32(32) * sum_cx - sum_c * sum_x) / spread
            shift = (sum_c * fitted - sum_x) / np.float32(32)
        if shift < _ZERO:  # a minimum is never positive
            shift, fitted = _ZERO, sum_cx / sum_cc
        found = _ZERO
        for i in range(32):
            error = fitted * codes[i] - shift - own[i]
            found += error * error
        if found < least:
            least, scale, low = found, fitted, shift
    return scale, low


@compiled()
def _steps(value: np.float32, step: np.float32) -> int:
    """Return a value as a whole number of steps of 6 bits."""
    return int(min(np.rint(value / step), _STEPS)) if step > _ZERO else 0


@compiled()
def _put_scales(group: int, scale: int, low: int, out: Bytes) -> None:
    """Pack the scale and the minimum of a group among those of its block."""
    if group < 4:
        out[4 + group] |= scale
        out[8 + group] |= low
    else:
        out[8 + group] |= (scale & 15) | ((low & 15) << 4)
        out[group] |= (scale >> 4) << 6
        out[4 + group] |= (low >> 4) << 6


@compiled()
def _half_bits(value: np.float32) -> int:
    """Return the bits of the nearest float16 of a number up to 65,504."""
    bits = bits_of(value * np.float32(2.0**-112))  # float16's numbers without exponent are float32's
    size = bits & 0x7FFFFFFF
    rounded: int = ((size + 4095 + ((size >> 13) & 1)) >> 13) | (bits >> 31 << 15)
    return rounded


@compiled()
def _put_half(value: np.float32, out: Bytes, at: int) -> None:
    bits = _half_bits(value)
    out[at], out[at + 1] = bits & 255, bits >> 8
