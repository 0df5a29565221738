"""Rounding of float matrices to blocks of 8 or 4 bits."""

from __future__ import annotations

import numpy as np

from langchain_card.runtime.cpu.blocks.formats import FORMATS, Q4_K, Q8_0, half
from langchain_card.runtime.cpu.compiled import Array, Bytes, compiled
from langchain_card.runtime.cpu.vectors import bits_of

_ZERO, _ONE, _TOP, _STEPS = np.float32(0.0), np.float32(1.0), np.float32(15.0), np.float32(63.0)
_FEATURES, _SIZES = np.array([form.features for form in FORMATS]), np.array([form.size for form in FORMATS])
_TRIES, _SHORTER = 8, np.float32(0.25)
"""Scales that are tried for a group of `Q4_K`: the whole range in 15 levels, then in up to 1.75 fewer."""


@compiled()
def quantize(form: int, weights: Array) -> Bytes:
    """Round a matrix to blocks.

    Args:
        form: `Q8_0`, `Q4_0`, or `Q4_K`, which loses less than `Q4_0` (docs/LOG.md) and takes ten times as long.
        weights: float32 [outputs, features]; features are whole blocks.

    Returns:
        Blocks [outputs, bytes].
    """
    outputs, features = weights.shape
    size, blocks = _SIZES[form], features // _FEATURES[form]
    rows, codes = np.empty((outputs, blocks * size), np.uint8), np.empty(32, np.uint8)
    for n in range(outputs):
        for i in range(blocks):
            own, out = weights[n, i * _FEATURES[form] : (i + 1) * _FEATURES[form]], rows[n, i * size : (i + 1) * size]
            if form == Q4_K:
                _to_q4_k(own, out)
            else:
                _to_codes(form, own, codes, out)
    return rows


@compiled(fastmath={"nnan", "nsz", "reassoc"})
def _largest(own: Array) -> np.float32:
    """Return the value of largest magnitude."""
    bottom, top = _ZERO, _ZERO
    for i in range(len(own)):
        bottom, top = min(bottom, own[i]), max(top, own[i])
    largest: np.float32 = top if top > -bottom else bottom
    return largest


@compiled()
def _to_codes(form: int, own: Array, codes: Bytes, out: Bytes) -> None:
    """Round a group so that its value of largest magnitude has the last code: of its sign, or of either in `Q8_0`."""
    largest, shift = _largest(own), np.float32(128.0 if form == Q8_0 else 8.0)
    factor = abs(largest) / np.float32(127.0) if form == Q8_0 else largest / np.float32(-8.0)
    _put_half(factor, out, 0)
    factor = half(_half_bits(factor))
    per, top = _ONE / factor if factor else _ZERO, np.float32(2.0) * shift - _ONE
    for i in range(32):
        codes[i] = np.uint8(min(max(np.rint(own[i] * per) + shift, _ZERO), top))
    if form == Q8_0:
        for i in range(32):
            out[2 + i] = codes[i] ^ 128
    else:
        for i in range(16):
            out[2 + i] = codes[i] | (codes[16 + i] << 4)


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
