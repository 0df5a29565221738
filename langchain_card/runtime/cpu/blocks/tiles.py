"""The layout of blocks that the kernel reads: one stream for each tile of 16 outputs.

A tile holds, one block of features after the other, for 16 outputs side by side: factors (float16), then in formats of
256 features integer scales and minimums (these of two groups side by side), then codes. 64 bytes of codes are 4
features of 16 outputs. A byte holds two codes of 4 bits: those of features 8n to 8n + 3 are its low half, the next four
its high half. The upper bits of codes of 5 and 6 bits precede them, in 64 bytes for each group.
"""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np

from langchain_card.runtime.cpu.blocks.formats import (
    BLOCK_BYTES,
    FACTORS,
    FORMATS,
    MINS,
    SCALES,
    Format,
    read_block,
)
from langchain_card.runtime.cpu.compiled import Bytes, compiled

Words: TypeAlias = np.ndarray[Any, np.dtype[np.uint32]]

TILE = 16
_FACTORS = 64
_BITS, _COUNTS, _GROUPS, _HAS_MIN, _SIZES = (
    np.array(column)
    for column in zip(*((f.bits, f.features // f.group, f.group, f.has_min, f.size) for f in FORMATS), strict=True)
)


def head_size(form: Format) -> int:
    """Return the bytes of a tile's block that precede its codes."""
    if form.features == form.group:
        return _FACTORS if form.has_min else _FACTORS // 2
    return _FACTORS + TILE * form.features // form.group * (2 if form.has_min else 1)


def group_size(form: Format) -> int:
    """Return the bytes of a group's codes in a tile."""
    return TILE * form.group * form.bits // 8


def block_size(form: Format) -> int:
    """Return the bytes of a tile's block."""
    return head_size(form) + form.features // form.group * group_size(form)


_HEADS, _BLOCKS = (np.array([size(f) for f in FORMATS]) for size in (head_size, block_size))


@compiled()
def pack_row(form: int, row: Bytes, output: int, tile: Bytes) -> None:
    """Lay out an output.

    Args:
        form: number of the format.
        row: of a file.
        output: place of the output in the tile.
        tile: [blocks x `block_size`]; set to zero before.
    """
    block, size, out_size, head = np.zeros(BLOCK_BYTES, np.uint8), _SIZES[form], _BLOCKS[form], _HEADS[form]
    fours, places = block.view(np.uint32), tile.view(np.uint32)
    for i in range(len(row) // size):
        read_block(form, np.int64(row.ctypes.data) + i * size, block)
        _put_head(form, block, output, tile, i * out_size)
        _put_codes(form, fours, places, (i * out_size + head) // 4 + output)


@compiled()
def _put_head(form: int, block: Bytes, output: int, tile: Bytes, at: int) -> None:
    tile[at + 2 * output], tile[at + 2 * output + 1] = block[FACTORS], block[FACTORS + 1]
    if _HAS_MIN[form]:
        tile[at + 32 + 2 * output], tile[at + 33 + 2 * output] = block[FACTORS + 2], block[FACTORS + 3]
    groups = _COUNTS[form]
    if groups > 1:
        for group in range(groups):
            tile[at + 64 + TILE * group + output] = block[SCALES + group]
            if _HAS_MIN[form]:  # side by side with its neighbour's
                tile[at + 64 + TILE * (groups + group - group % 2) + 2 * output + group % 2] = block[MINS + group]


@compiled()
def _put_codes(form: int, fours: Words, places: Words, at: int) -> None:
    """Put an output's codes in their places, four at a time."""
    bits, size = _BITS[form], _GROUPS[form]
    quads, high = size // 4, np.uint32(bits - 4)
    first = 0
    for _ in range(_COUNTS[form]):
        if bits == 8:
            for quad in range(quads):
                places[at + TILE * quad] = fours[first + quad]
            at += TILE * quads
        else:
            if high:
                plane, shift = np.uint32(0), np.uint32(0)
                for quad in range(quads):
                    plane |= ((fours[first + quad] >> np.uint32(4)) & np.uint32(0x03030303)) << shift
                    shift += high
                places[at] = plane
                at += TILE
            for pair in range(quads // 2):
                low, top = fours[first + 2 * pair] & np.uint32(0x0F0F0F0F), fours[first + 2 * pair + 1]
                places[at + TILE * pair] = low | ((top & np.uint32(0x0F0F0F0F)) << np.uint32(4))
            at += TILE * (quads // 2)
        first += quads
