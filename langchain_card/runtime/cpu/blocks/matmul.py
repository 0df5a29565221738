"""Products of rows with blocks of quantized weights.

With few rows memory is the limit, with eight the multiplier. So weights are read once, in one stream, and each serves
several rows while it lies in a register (`blocks.kernel`).

A row is rounded to 127 levels on either side of zero, with one factor for each 256 features. Its bits never depend on
the rows beside it, nor on the CPU or the number of threads: sums of groups are exact, and their scaled values are added
in order.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from langchain_card.runtime.cpu.blocks.formats import FORMATS
from langchain_card.runtime.cpu.blocks.kernel import BLOCK, UNITS, block_tile
from langchain_card.runtime.cpu.blocks.tiles import TILE, block_size
from langchain_card.runtime.cpu.compiled import Array, Bytes, Integers, Levels, Slots, compiled
from langchain_card.runtime.cpu.team import Team, together
from langchain_card.runtime.cpu.vectors import MAX_ROWS

_LEVELS: np.float32 = np.float32(127.0)
_TINY, _ONE = np.float32(1e-30), np.float32(1.0)
_CACHED = 1 << 18
"""Bytes of weights that stay in a core's cache beside the rows."""

_GROUPS = np.array([form.group for form in FORMATS])
_TILE_BYTES = np.array([block_size(form) * BLOCK // form.features for form in FORMATS])  # of 256 features


class Weights(NamedTuple):
    """A matrix as the kernel reads it: parts of whole tiles, one below the other, each in a format of its own.

    Attributes:
        stored: tiles of all parts (`blocks.tiles`).
        parts: [parts, 5] number of a part's format, its first byte, its first tile, its number of tiles, and the
            address of its format's `kernel.tile_address`.
        features: features of a row of activations.
        outputs: outputs of a row of products.
    """

    stored: Bytes
    parts: Slots
    features: int
    outputs: int


class Rounded(NamedTuple):
    """Rows of activations as the kernel reads them: blocks of up to `MAX_ROWS` rows, with the row last.

    Attributes:
        levels: [features / 4, rows, 4].
        factors: [blocks of 256 features, rows] value of a level.
        starts: [features / 16, rows] where sums with an offset of 32 start.
        sums: [features / 32, rows] sums of levels, negative.
        pairs: [blocks x 4, rows] the same of two neighbours, as 16 bits each.
    """

    levels: Levels
    factors: Array
    starts: Integers
    sums: Integers
    pairs: Integers


@compiled()
def one(stack: Weights, i: int) -> Weights:
    """Return one matrix of a stack, whose `parts` have the matrix first."""
    return Weights(stack.stored, stack.parts[i], stack.features, stack.outputs)


@compiled()
def tile_bytes(form: int, features: int) -> int:
    """Return the bytes of a tile: 16 outputs of all features."""
    size: int = _TILE_BYTES[form] * features // BLOCK
    return size


@compiled()
def block(left: int) -> int:
    """Return how many of the remaining rows are multiplied together: 8, 4, 2 or 1."""
    rows = MAX_ROWS
    while rows > left:
        rows //= 2
    return rows


@compiled()
def empty_rounded(count: int, features: int) -> Rounded:
    """Allocate `count` rows."""
    blocks = (features + BLOCK - 1) // BLOCK
    return Rounded(
        np.empty(count * features, np.int8),
        np.empty(count * blocks, np.float32),
        np.empty(count * features // 16, np.int32),
        np.empty(count * features // 32, np.int32),
        np.empty(count * blocks * 4, np.int32),
    )


@compiled()
def round_row(row: Array, n: int, count: int, out: Rounded) -> None:
    """Round row `n` of `count` into its place."""
    features = len(row)
    blocks = (features + BLOCK - 1) // BLOCK
    first, together = 0, block(count)
    while n >= first + together:
        first += together
        together = block(count - first)
    levels, sums = np.empty(features, np.int8), np.zeros(blocks * 8, np.int32)
    factors = out.factors[first * blocks + n - first :]
    for i in range(blocks):
        own = row[i * BLOCK : min(features, (i + 1) * BLOCK)]
        top = _TINY
        for j in range(len(own)):
            top = max(top, abs(own[j]))
        factors[i * together] = top / _LEVELS
        shrink = _LEVELS / top
        for j in range(len(own)):
            levels[i * BLOCK + j] = np.int8(np.rint(own[j] * shrink))
    fours, places = levels.view(np.int32), out.levels.view(np.int32)[first * features // 4 + n - first :]
    for i in range(features // 4):
        places[i * together] = fours[i]
    starts = out.starts[first * features // 16 + n - first :]
    for i in range(features // 16):
        total = np.int32(0)
        for j in range(16):
            total -= np.int32(levels[16 * i + j])
        sums[i // 2] += total
        starts[i * together] = 32 * total + UNITS
    of_groups = out.sums[first * features // 32 + n - first :]
    for i in range(features // 32):
        of_groups[i * together] = sums[i]
    pairs = out.pairs[first * blocks * 4 + n - first :]
    for i in range(blocks * 4):
        pairs[i * together] = (sums[2 * i] & 0xFFFF) | (sums[2 * i + 1] << 16)


@compiled()
def multiply(rounded: Rounded, weights: Weights, team: Team) -> Array:
    """Return products [rows, outputs, up to whole tiles]; columns beyond the outputs are undefined."""
    count = len(rounded.levels) // weights.features
    last = weights.parts[len(weights.parts) - 1]
    out = np.empty((count, (last[2] + last[3]) * TILE), np.float32)
    _stretches(team, (rounded, weights, out))
    return out


@compiled()
def _stretch(rounded: Rounded, weights: Weights, out: Array, thread: int, threads: int) -> None:
    """Multiply a thread's tiles: a stretch of each part, as many tiles at a time as stay in the cache for all rows."""
    features, (count, length) = weights.features, out.shape
    blocks = (features + BLOCK - 1) // BLOCK
    for p in range(len(weights.parts)):
        form, begin, first, tiles, function = weights.parts[p]
        size, rest = tile_bytes(form, features), features - (blocks - 1) * BLOCK
        together = max(1, _CACHED // size)
        start, end = tiles * thread // threads, tiles * (thread + 1) // threads
        for low in range(start, end, together):
            n = 0
            while n < count:
                rows = block(count - n)
                for t in range(low, min(low + together, end)):
                    block_tile(
                        function, rows, rounded.levels[n * features :].ctypes.data,
                        rounded.factors[n * blocks :].ctypes.data, rounded.starts[n * features // 16 :].ctypes.data,
                        rounded.sums[n * features // 32 :].ctypes.data, rounded.pairs[n * blocks * 4 :].ctypes.data,
                        weights.stored[begin + t * size :].ctypes.data, blocks, rest // _GROUPS[form],
                        out[n, (first + t) * TILE :].ctypes.data, length,
                    )  # fmt: skip
                n += rows


_stretches = together(_stretch)
