"""Products of rows with integer weights of 8 or 4 bits on x86 CPUs.

With few rows memory is the limit, with eight the multiplier. So weights are read once, in one stream, and each serves
several rows while it lies in a register (`matmul_kernel`).

Activations are rows in [-1, 1], rounded to signed levels. Weights are stored unsigned, with an offset that is
subtracted first: every sum starts at minus the offset times the row's own sum. A 4-bit weight shares its byte with the
weight four features later, and each group of features has its own scale.

A row's bits never depend on the rows beside it, nor on the CPU: integer sums are exact, and scaled groups are added in
order. Sums are exact with 63 levels at 8 bits (2 x 255 x 63 < 2^15, where AVX2 adds pairs in 16 bits) and with
127 at 4.
"""

from __future__ import annotations

from typing import Any, NamedTuple, TypeAlias

import numba
import numpy as np

from langchain_card.runtime.cpu.compiled import Array, compiled
from langchain_card.runtime.cpu.matmul_kernel import LANES, MAX_ROWS, TILE, byte_tile, nibble_tile

BYTE_OFFSET, NIBBLE_OFFSET = 128, 8

_Bytes: TypeAlias = np.ndarray[Any, np.dtype[np.uint8]]
Levels: TypeAlias = np.ndarray[Any, np.dtype[np.int8]]
Sums: TypeAlias = np.ndarray[Any, np.dtype[np.int32]]


class Weights(NamedTuple):
    """A matrix as the kernel reads it.

    Attributes:
        stored: [tiles, turns, 128 bytes]; one turn holds the weights of 32 outputs and 4 features (8 with 4 bits).
        scales: [tiles, groups, 32] value of one unit of a product of levels.
        features: features of a row of activations.
        outputs: outputs of a row of products.
        levels: levels of activations on either side of zero.
        offset: constant that is added to stored weights.
    """

    stored: _Bytes
    scales: Array
    features: int
    outputs: int
    levels: int
    offset: int

    def unpack(self) -> tuple[Levels, Array]:
        """Return the matrix and the scales that `pack` received."""
        stored = self.stored
        if self.offset == NIBBLE_OFFSET:
            stored = np.stack([stored & 15, stored >> 4], axis=2)
        fours = stored.reshape(len(stored), -1, 2, LANES, 4).transpose(0, 2, 3, 1, 4)
        whole = fours.reshape(len(stored) * TILE, -1)[: self.outputs, : self.features]
        scales = self.scales.transpose(0, 2, 1).reshape(-1, self.scales.shape[1])[: self.outputs]
        return (whole.astype(np.int16) - self.offset).astype(np.int8), scales / np.float32(1 / self.levels)


def pack(weight: Levels, scales: Array, levels: int, offset: int = BYTE_OFFSET) -> Weights:
    """Lay out a matrix for the kernel.

    Args:
        weight: int8 [outputs, features]; for 4 bits in -8..7, with features in whole groups of at least eight.
        scales: float32 [outputs, groups] scales of the weights; a single group for 8 bits.
        levels: levels of activations on either side of zero.
        offset: `BYTE_OFFSET`, or `NIBBLE_OFFSET` for 4 bits.
    """
    outputs, features = weight.shape
    whole = np.full((-(-outputs // TILE) * TILE, -(-features // 4) * 4), offset, np.uint8)
    np.add(weight, offset, out=whole[:outputs, :features], dtype=np.int16, casting="unsafe")
    fours = whole.reshape(-1, 2, LANES, whole.shape[1] // 4, 4).transpose(0, 3, 1, 2, 4)
    if offset == NIBBLE_OFFSET:
        fours = fours[:, ::2] | (fours[:, 1::2] << 4)
    stored = _aligned((*fours.shape[:2], TILE * 4))
    stored[...] = fours.reshape(stored.shape)
    padded = np.ones((len(whole), scales.shape[1]), np.float32)
    padded[:outputs] = scales * np.float32(1 / levels)
    padded = padded.reshape(-1, TILE, scales.shape[1]).transpose(0, 2, 1).copy()
    return Weights(stored, padded, features, outputs, levels, offset)


def _aligned(shape: tuple[int, ...]) -> _Bytes:
    """Allocate bytes that begin on a cache line."""
    size = int(np.prod(shape))
    raw = np.empty(size + 64, np.uint8)
    skip = -raw.ctypes.data % 64
    return raw[skip : skip + size].reshape(shape)


def empty_stack(weights: Weights, count: int) -> Weights:
    """Allocate `count` matrices of one shape, as arrays with the matrix first."""
    scales = np.empty((count, *weights.scales.shape), np.float32)
    return weights._replace(stored=_aligned((count, *weights.stored.shape)), scales=scales)


def move(weights: Weights, stack: Weights, i: int) -> Weights:
    """Copy a matrix to its place in a stack, and return the view of that place."""
    stack.stored[i], stack.scales[i] = weights.stored, weights.scales
    return weights._replace(stored=stack.stored[i], scales=stack.scales[i])


@compiled()
def one(weights: Weights, i: int) -> Weights:
    """Return one matrix of a stack, as a view."""
    return Weights(
        weights.stored[i], weights.scales[i], weights.features, weights.outputs, weights.levels, weights.offset
    )


@compiled()
def block(left: int) -> int:
    """Return how many of the remaining rows are multiplied together: 8, 4, 2 or 1."""
    rows = MAX_ROWS
    while rows > left:
        rows //= 2
    return rows


@compiled()
def empty_levels(count: int, weights: Weights) -> tuple[Levels, Sums]:
    """Allocate levels of `count` rows, in blocks of [quads, rows, 4 features], and starts of each group's sums."""
    quads = weights.stored.shape[1] * (2 if weights.offset == NIBBLE_OFFSET else 1)
    return np.empty(count * quads * 4, np.int8), np.empty((count, weights.scales.shape[1]), np.int32)


@compiled()
def set_levels(row: Array, n: int, weights: Weights, levels: Levels, begin: Sums) -> None:
    """Round row `n` into its place in the arrays of `empty_levels`."""
    count, groups = begin.shape
    quads = len(levels) // (4 * count)
    first, together = 0, block(count)
    while n >= first + together:
        first += together
        together = block(count - first)
    rounded = np.zeros(quads * 4, np.int8)
    factor = np.float32(weights.levels)
    for i in range(len(row)):
        rounded[i] = np.int8(np.rint(row[i] * factor))
    size = len(rounded) // groups
    for g in range(groups):
        total = np.int32(0)
        for i in range(g * size, (g + 1) * size):
            total += np.int32(rounded[i])
        begin[n, g] = -weights.offset * total
    fours, own = rounded.view(np.int32), levels.view(np.int32)[first * quads + n - first :]
    for quad in range(quads):
        own[quad * together] = fours[quad]


@compiled()
def multiply(levels: Levels, begin: Sums, weights: Weights, threads: int) -> Array:
    """Return products [rows, 32 x tiles]; columns beyond the outputs are undefined."""
    stored, scales, nibbles = weights.stored, weights.scales, weights.offset == NIBBLE_OFFSET
    out = np.empty((len(begin), len(stored) * TILE), np.float32)
    if threads == 1:
        _stretch(levels, begin, stored, scales, nibbles, out, 0, len(stored))
    else:
        _stretches(levels, begin, stored, scales, nibbles, out, threads)
    return out


@compiled(parallel=True)
def _stretches(
    levels: Levels, begin: Sums, stored: _Bytes, scales: Array, nibbles: bool, out: Array, threads: int
) -> None:
    """Multiply on all threads, each with a range of the tiles."""
    tiles = len(stored)
    for i in numba.prange(threads):
        thread = np.int64(i)
        start, end = tiles * thread // threads, tiles * (thread + 1) // threads
        _stretch(levels, begin, stored, scales, nibbles, out, start, end)


@compiled()
def _stretch(
    levels: Levels, begin: Sums, stored: _Bytes, scales: Array, nibbles: bool, out: Array, start: int, end: int
) -> None:
    """Multiply the tiles from `start` to `end`."""
    (count, groups), length = begin.shape, out.shape[1]
    turns = stored.shape[1] // groups
    row = len(levels) // count
    for t in range(start, end):
        w, s = stored[t].ctypes.data, scales[t].ctypes.data
        n = 0
        while n < count:
            rows = block(count - n)
            a, c, to = levels[n * row :].ctypes.data, begin[n].ctypes.data, out[n, t * TILE :].ctypes.data
            if nibbles:
                nibble_tile(rows, a, c, w, s, groups, turns, to, length)
            else:
                byte_tile(rows, a, c, w, s, groups, turns, to, length)
            n += rows
