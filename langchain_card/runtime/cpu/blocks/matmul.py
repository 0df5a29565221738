"""Products of rows with blocks of quantized weights.

With few rows memory is the limit, with sixteen the multiplier. So weights are read once, in one stream, and each serves
several rows while it lies in a register (`blocks.kernel`).

The bits of a row of products never depend on the rows beside it, nor on the CPU or the number of threads: sums of
groups are exact, and their scaled values are added in order.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from langchain_card.runtime.cpu.blocks.activations import Rounded, block
from langchain_card.runtime.cpu.blocks.formats import FORMATS
from langchain_card.runtime.cpu.blocks.kernel import BLOCK, block_tile
from langchain_card.runtime.cpu.blocks.tiles import TILE, block_size
from langchain_card.runtime.cpu.compiled import Array, Bytes, Slots, compiled
from langchain_card.runtime.cpu.team import Team, together

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
