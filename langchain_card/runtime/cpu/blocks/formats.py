"""Formats of quantized weights in GGUF files, and reading their blocks.

A row of a matrix is a sequence of blocks. A block holds whole numbers of 4, 5, 6 or 8 bits, its *codes*, and a scale
for each group of 16 or 32 features. A weight is `scale * (code - offset)`, in some formats less a minimum of its group.
In the formats of 256 features a block ("K"), scales and minimums are small integers times a factor of the block; in
those of 32, a block is one group with float16 numbers. The layout is that of llama.cpp (ggml/src/ggml-common.h).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from llvmlite import ir  # type: ignore[import-untyped]
from numba import types

from langchain_card.runtime.cpu.compiled import Array, Bytes, compiled
from langchain_card.runtime.cpu.vectors import (
    FLOATS,
    I8,
    I32,
    I64,
    LANES,
    Builder,
    bytes_at,
    float_of,
    intrinsic,
    vector,
)


class Format(NamedTuple):
    """A format of blocks.

    Attributes:
        number: position in `FORMATS`.
        name: in GGUF files.
        bits: of a code.
        features: of a block.
        group: features of a group.
        offset: number that is subtracted from a code.
        has_min: whether groups have a minimum.
        signed: whether the integer scales of groups are signed.
        size: bytes of a block in a file.
    """

    number: int
    name: str
    bits: int
    features: int
    group: int
    offset: int
    has_min: bool
    signed: bool
    size: int


Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, Q4_K, Q5_K, Q6_K = range(8)
FORMATS = (
    Format(Q4_0, "Q4_0", 4, 32, 32, 8, False, False, 18),
    Format(Q4_1, "Q4_1", 4, 32, 32, 0, True, False, 20),
    Format(Q5_0, "Q5_0", 5, 32, 32, 16, False, False, 22),
    Format(Q5_1, "Q5_1", 5, 32, 32, 0, True, False, 24),
    Format(Q8_0, "Q8_0", 8, 32, 32, 128, False, False, 34),
    Format(Q4_K, "Q4_K", 4, 256, 32, 0, True, False, 144),
    Format(Q5_K, "Q5_K", 5, 256, 32, 0, True, False, 176),
    Format(Q6_K, "Q6_K", 6, 256, 16, 32, False, True, 210),
)

_FEATURES, _GROUPS, _OFFSETS, _HAS_MIN, _SIZES = (
    np.array(column)
    for column in zip(*((f.features, f.group, f.offset, f.has_min, f.size) for f in FORMATS), strict=True)
)


FACTORS, SCALES, MINS, BLOCK_BYTES = 256, 260, 276, 292
"""A block, taken apart, is an array of bytes: up to 256 codes, then two factors (float16), then the integer scales and
minimums of up to 16 groups."""


@compiled()
def read_block(form: int, address: int, block: Bytes) -> None:
    """Take a block of a file apart.

    Args:
        form: number of the format.
        address: of the block's bytes.
        block: [BLOCK_BYTES], output. A tuple of arrays would cost as much time as a small block.
    """
    # Indices from here, which are known not to be negative, let loops run in vectors.
    row = bytes_at(address, _SIZES[form])
    factor = 208 if form == Q6_K else 0
    block[FACTORS], block[FACTORS + 1] = row[factor], row[factor + 1]
    if form == Q6_K:
        for part in range(2):  # shifts by constants, so that loops run in vectors of bytes
            low, high, to = 64 * part, 128 + 32 * part, 128 * part
            for i in range(32):
                first, second, top = row[low + i], row[low + 32 + i], row[high + i]
                block[to + i] = (first & 15) | ((top & 3) << 4)
                block[to + 32 + i] = (second & 15) | (((top >> 2) & 3) << 4)
                block[to + 64 + i] = (first >> 4) | (((top >> 4) & 3) << 4)
                block[to + 96 + i] = (second >> 4) | ((top >> 6) << 4)
        for i in range(16):
            block[SCALES + i] = row[192 + i]
        return
    at = 2
    if form in (Q4_1, Q5_1, Q4_K, Q5_K):
        block[FACTORS + 2], block[FACTORS + 3] = row[2], row[3]
        at = 4
    if form == Q8_0:
        for i in range(32):
            block[i] = row[2 + i] ^ 128
    elif form in (Q4_K, Q5_K):
        for i in range(4):
            block[SCALES + i], block[MINS + i] = row[4 + i] & 63, row[8 + i] & 63
            block[SCALES + 4 + i] = (row[12 + i] & 15) | ((row[4 + i] >> 6) << 4)
            block[MINS + 4 + i] = (row[12 + i] >> 4) | ((row[8 + i] >> 6) << 4)
        nibbles = 16 if form == Q4_K else 48
        for pair in range(4):
            for i in range(32):
                both = row[nibbles + 32 * pair + i]
                block[64 * pair + i], block[64 * pair + 32 + i] = both & 15, both >> 4
        if form == Q5_K:
            for group in range(8):
                for i in range(32):
                    block[32 * group + i] |= ((row[16 + i] >> group) & 1) << 4
    else:
        five = form in (Q5_0, Q5_1)
        _split(address + at + 4 if five else address + at, address + at, np.int32(-1 if five else 0), block.ctypes.data)


@compiled()
def dequantize(form: int, rows: Bytes) -> Array:
    """Return the weights of blocks [outputs, bytes] as float32 [outputs, features]."""
    rows = np.ascontiguousarray(rows)
    size, count, group = _SIZES[form], _FEATURES[form], _GROUPS[form]
    offset, has_min, whole = np.float32(_OFFSETS[form]), _HAS_MIN[form], _FEATURES[form] > _GROUPS[form]
    blocks, groups, parts = rows.shape[1] // size, count // group, group // LANES
    block = np.zeros(BLOCK_BYTES, np.uint8)
    halves = block.view(np.uint16)[FACTORS // 2 :]
    out = np.empty((len(rows), blocks * count), np.float32)
    # As addresses are, without a sign, numba would add them as floats.
    codes, floats = np.int64(block.ctypes.data), np.int64(out.ctypes.data)
    for n in range(len(rows)):
        row = np.int64(rows[n].ctypes.data)
        for i in range(blocks):
            read_block(form, row + i * size, block)
            factor, least = half(halves[0]), half(halves[1]) if has_min else np.float32(0.0)
            done = 0
            for g in range(groups):
                scale, low = factor, least
                if whole:
                    own = np.int32(block[SCALES + g])
                    scale = factor * np.float32(own - 256 if form == Q6_K and own > 127 else own)
                    low = -least * np.float32(block[MINS + g])
                for _ in range(parts):
                    _scale(codes + done, scale, offset, low, floats + 4 * done)
                    done += LANES
            floats += 4 * count
    return out


@intrinsic
def _scale(context: Any, codes: Any, scale: Any, offset: Any, low: Any, out: Any) -> Any:
    """Store `scale * (code - offset) + low` for 16 codes. The first and the last argument are addresses."""

    def generate(context: Any, b: Any, signature: Any, args: Any) -> Any:
        k, codes, out = Builder(b), args[0], args[-1]
        scale, offset, low = map(k.everywhere_float, args[1:-1])
        numbers = b.uitofp(k.load(codes, I64(0), 1, vector(I8, LANES)), FLOATS)
        value = b.fadd(b.fmul(scale, b.fsub(numbers, offset)), low)
        b.store(value, k.pointer(out, I64(0), 1, FLOATS), align=4)
        return context.get_dummy_value()

    return types.void(types.int64, *(types.float32,) * 3, types.int64), generate


@intrinsic
def _split(context: Any, nibbles: Any, fifth: Any, mask: Any, codes: Any) -> Any:
    """Store 32 codes: the lower halves of 16 bytes, then the upper ones. Their fifth bits are 32 bits, if not masked.

    All but the mask are addresses. Stored one by one, codes could not be loaded as a vector before they are in the
    cache.
    """

    def generate(context: Any, b: Any, signature: Any, args: Any) -> Any:
        k, half, kind = Builder(b), vector(I8, 16), vector(I8, 32)
        both = k.load(args[0], I64(0), 1, half)
        low, high = b.and_(both, half([15] * 16)), b.lshr(both, half([4] * 16))
        whole = b.shuffle_vector(low, high, vector(I32, 32)(list(range(32))))
        bits = b.bitcast(b.and_(k.load(args[1], I64(0), 1, I32), args[2]), vector(ir.IntType(1), 32))
        fifth = b.shl(b.zext(bits, kind), kind([4] * 32))
        b.store(b.or_(whole, fifth), k.pointer(args[3], I64(0), 1, kind), align=1)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int32, types.int64), generate


@compiled()
def half(bits: int) -> np.float32:
    """Return the float of a float16's bits; infinities and NaN become numbers."""
    size = float_of((np.int64(bits) & 0x7FFF) << 13) * np.float32(2.0**112)
    value: np.float32 = -size if np.int64(bits) & 0x8000 else size
    return value
