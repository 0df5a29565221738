"""Rounding of float matrices to blocks of 8 or 4 bits."""

from __future__ import annotations

from typing import Any

import numpy as np

from langchain_card.runtime.cpu.blocks.formats import FORMATS, Q4_0, Q4_K, Q8_0, half
from langchain_card.runtime.cpu.compiled import Array, Bytes, compiled

_ZERO, _ONE, _TOP, _STEPS = np.float32(0.0), np.float32(1.0), np.float32(15.0), np.float32(63.0)
_TRIES, _SHORTER = 8, np.float32(0.25)
"""Scales that are tried for a group of `Q4_K`: the whole range in 15 levels, then in up to 1.75 fewer."""


def quantize(form: int, weights: Array) -> Bytes:
    """Round a matrix to blocks.

    Args:
        form: `Q8_0`, `Q4_0`, or `Q4_K`, which loses less than `Q4_0` (docs/LOG.md) and takes ten times as long.
        weights: float32 [outputs, features]; features are whole blocks.

    Returns:
        Blocks [outputs, bytes].
    """
    outputs, features = weights.shape
    rows = np.empty((outputs, features // FORMATS[form].features, FORMATS[form].size), np.uint8)
    if form == Q4_K:
        _to_q4_k(weights, rows)
    else:
        factors = np.empty((outputs, features // 32), np.float32)
        _largest(weights, -8.0 if form == Q4_0 else 127.0, factors)
        halves = factors.astype(np.float16)
        rows[..., :2] = halves[..., None].view(np.uint8)
        _round_codes(form, weights, halves.astype(np.float32), rows)
    return rows.reshape(outputs, -1)


@compiled(fastmath={"nnan", "nsz", "reassoc"})
def _largest(weights: Array, level: float, factors: Array) -> None:
    """Find the factor by which each group's value of largest magnitude becomes `level`; for 127, of either sign."""
    for n in range(len(weights)):
        row = weights[n]
        for g in range(factors.shape[1]):
            bottom, top = _ZERO, _ZERO
            for i in range(32 * g, 32 * g + 32):
                bottom, top = min(bottom, row[i]), max(top, row[i])
            largest = top if top > -bottom else bottom
            factors[n, g] = (abs(largest) if level > 0 else largest) / np.float32(level)


@compiled()
def _round_codes(form: int, weights: Array, factors: Array, rows: Any) -> None:
    codes, shift = np.empty(32, np.uint8), np.float32(128.0 if form == Q8_0 else 8.0)
    top = np.float32(2.0) * shift - _ONE
    for n in range(len(weights)):
        row = weights[n]
        for g in range(factors.shape[1]):
            per, out = _ONE / factors[n, g] if factors[n, g] else _ZERO, rows[n, g]
            for i in range(32):
                codes[i] = np.uint8(min(max(np.rint(row[32 * g + i] * per) + shift, _ZERO), top))
            if form == Q8_0:
                for i in range(32):
                    out[2 + i] = codes[i] ^ 128
            else:
                for i in range(16):
                    out[2 + i] = codes[i] | (codes[16 + i] << 4)


@compiled()
def _to_q4_k(weights: Array, rows: Any) -> None:
    codes, scales, lows = np.empty(32, np.float32), np.empty(8, np.float32), np.empty(8, np.float32)
    for n in range(len(weights)):
        for block in range(rows.shape[1]):
            out = rows[n, block]
            for g in range(8):
                own = weights[n, 256 * block + 32 * g : 256 * block + 32 * g + 32]
                scales[g], lows[g] = _fit(own, codes)
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
                    level = np.rint((weights[n, 256 * block + 32 * g + i] + down) * shrink)
                    code = np.uint8(min(max(level, _ZERO), _TOP))
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
    """Return the bits of the nearest float16 of a number from 0 to 65,504."""
    one = np.empty(1, np.float32)
    one[0] = value * np.float32(2.0**-112)  # float16's numbers without exponent are float32's
    bits = int(one.view(np.uint32)[0])
    return (bits + 4095 + ((bits >> 13) & 1)) >> 13


@compiled()
def _put_half(value: np.float32, out: Bytes, at: int) -> None:
    bits = _half_bits(value)
    out[at], out[at + 1] = bits & 255, bits >> 8
