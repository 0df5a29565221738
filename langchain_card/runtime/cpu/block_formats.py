"""Formats of quantized weights in GGUF files, and reading their blocks.

A row of a matrix is a sequence of blocks. A block holds whole numbers of 4, 5, 6 or 8 bits, its *codes*, and a scale for
each group of 16 or 32 features. A weight is `scale * (code - offset)`, in some formats less a minimum of its group. In
the formats of 256 features a block ("K"), scales and minimums are small integers times a factor of the block; in those
of 32, a block is one group with float16 numbers. The layout is that of llama.cpp (ggml/src/ggml-common.h).
"""

from __future__ import annotations

from typing import Any, NamedTuple, TypeAlias

import numpy as np

from langchain_card.runtime.cpu.compiled import Array, compiled

Bytes: TypeAlias = np.ndarray[Any, np.dtype[np.uint8]]


class Format(NamedTuple):
    """A format of blocks.

    Attributes:
        index: position in `FORMATS`.
        name: in GGUF files.
        bits: of a code.
        features: of a block.
        group: features of a group.
        offset: number that is subtracted from a code.
        has_min: whether groups have a minimum.
        signed: whether the integer scales of groups are signed.
        size: bytes of a block in a file.
    """

    index: int
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


class Block(NamedTuple):
    """A block, taken apart.

    Attributes:
        codes: [features].
        factors: float16 [2], the block's factor and that of its minimums, as bytes [4].
        scales: [groups] integer scales; formats of 32 features have none.
        mins: [groups] integer minimums.
    """

    codes: Bytes
    factors: Bytes
    scales: Bytes
    mins: Bytes


@compiled()
def empty_block() -> Block:
    """Allocate a block of any format."""
    return Block(np.zeros(256, np.uint8), np.zeros(4, np.uint8), np.zeros(16, np.uint8), np.zeros(16, np.uint8))


@compiled()
def read_block(form: int, raw: Bytes, block: Block) -> None:
    """Take a block of a file apart. `form` is the format's index."""
    codes, factors, at = block.codes, block.factors, 2
    factors[0], factors[1] = raw[0], raw[1]
    if form == Q6_K:
        factors[0], factors[1] = raw[208], raw[209]
        for half in range(2):
            low, high, out = raw[64 * half :], raw[128 + 32 * half :], codes[128 * half :]
            for i in range(32):
                out[i] = (low[i] & 15) | ((high[i] & 3) << 4)
                out[32 + i] = (low[32 + i] & 15) | (((high[i] >> 2) & 3) << 4)
                out[64 + i] = (low[i] >> 4) | (((high[i] >> 4) & 3) << 4)
                out[96 + i] = (low[32 + i] >> 4) | ((high[i] >> 6) << 4)
        for i in range(16):
            block.scales[i] = raw[192 + i]
        return
    if form in (Q4_1, Q5_1, Q4_K, Q5_K):
        factors[2], factors[3], at = raw[2], raw[3], 4
    if form == Q8_0:
        for i in range(32):
            codes[i] = raw[at + i] ^ 128
    elif form in (Q4_K, Q5_K):
        for i in range(4):
            block.scales[i], block.mins[i] = raw[at + i] & 63, raw[at + 4 + i] & 63
            block.scales[4 + i] = (raw[at + 8 + i] & 15) | ((raw[at + i] >> 6) << 4)
            block.mins[4 + i] = (raw[at + 8 + i] >> 4) | ((raw[at + 4 + i] >> 6) << 4)
        nibbles = raw[at + 12 if form == Q4_K else at + 44 :]
        for pair in range(4):
            low, high, own = codes[64 * pair :], codes[64 * pair + 32 :], nibbles[32 * pair :]
            for i in range(32):
                low[i], high[i] = own[i] & 15, own[i] >> 4
        if form == Q5_K:
            for group in range(8):
                out, bits = codes[32 * group :], raw[at + 12 :]
                for i in range(32):
                    out[i] |= ((bits[i] >> group) & 1) << 4
    else:
        nibbles = raw[at + 4 :] if form in (Q5_0, Q5_1) else raw[at:]
        for i in range(16):
            codes[i], codes[16 + i] = nibbles[i] & 15, nibbles[i] >> 4
        if form in (Q5_0, Q5_1):
            for i in range(32):
                codes[i] |= ((raw[at + i // 8] >> (i % 8)) & 1) << 4


@compiled()
def dequantize(form: int, rows: Bytes) -> Array:
    """Return the weights of blocks [outputs, bytes] as float32 [outputs, features]."""
    size, count, group = _SIZES[form], _FEATURES[form], _GROUPS[form]
    offset, has_min, whole = np.float32(_OFFSETS[form]), _HAS_MIN[form], _FEATURES[form] > _GROUPS[form]
    blocks, block = rows.shape[1] // size, empty_block()
    halves = block.factors.view(np.uint16)
    out = np.empty((len(rows), blocks * count), np.float32)
    for n in range(len(rows)):
        for i in range(blocks):
            read_block(form, rows[n, i * size : (i + 1) * size], block)
            factor, least = half(halves[0]), half(halves[1]) if has_min else np.float32(0.0)
            for g in range(count // group):
                scale, low = factor, least
                if whole:
                    own = np.int32(block.scales[g])
                    scale = factor * np.float32(own - 256 if form == Q6_K and own > 127 else own)
                    low = -least * np.float32(block.mins[g])
                to = out[n, i * count + g * group :]
                for j in range(group):
                    to[j] = scale * (np.float32(block.codes[g * group + j]) - offset) + low
    return out


@compiled()
def half(bits: int) -> np.float32:
    """Return the float of a float16's bits; infinities and NaN become numbers."""
    one = np.empty(1, np.uint32)
    one[0] = (np.uint32(bits) & np.uint32(0x7FFF)) << np.uint32(13)
    size = one.view(np.float32)[0] * np.float32(2.0**112)
    value: np.float32 = -size if bits & 0x8000 else size
    return value
