"""Laying out matrices of a file for the kernel: those of a model together, in one compiled call on each thread.

Between two calls a thread would wait for the GIL, which other work of loading keeps for up to a second.
"""

from __future__ import annotations

import itertools
import mmap
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numba import types

from langchain_card.runtime.cpu.blocks.formats import FORMATS, dequantize
from langchain_card.runtime.cpu.blocks.kernel import tile_address
from langchain_card.runtime.cpu.blocks.matmul import Weights, tile_bytes
from langchain_card.runtime.cpu.blocks.rounding import quantize
from langchain_card.runtime.cpu.blocks.tiles import TILE, pack_row
from langchain_card.runtime.cpu.compiled import Bytes, Slots, compiled
from langchain_card.runtime.cpu.vectors import I8, I32, I64, Builder, bytes_at, intrinsic

_ROWS = 256
"""Rows that a thread takes at a time."""

_UNORDERED = -1
_PAGE = mmap.PAGESIZE
_UNUSED = getattr(mmap, "MADV_DONTNEED", None)


class StoredRows(NamedTuple):
    """Rows of blocks, of a file or in memory.

    Attributes:
        form: number of their format.
        rows: [rows, bytes].
        order: rows that are wanted, in order; empty for all of them as they are.
        mapped: whether `rows` is a file that is mapped. What was read of it no longer counts as memory afterwards.
    """

    form: int
    rows: Bytes
    order: Sequence[int] = ()
    mapped: bool = False

    @property
    def outputs(self) -> int:
        """Number of rows that are wanted."""
        return len(self.order) or len(self.rows)

    @property
    def features(self) -> int:
        """Weights of a row."""
        form = FORMATS[self.form]
        return int(self.rows.shape[1]) // form.size * form.features


class MatrixPart(NamedTuple):
    """A part of a matrix, whole tiles in one format; only the last part of a matrix may have an incomplete tile.

    Attributes:
        form: number of the format. Blocks in another one are rounded to it.
        blocks: one below the other.
    """

    form: int
    blocks: Sequence[StoredRows]

    @property
    def outputs(self) -> int:
        """Number of rows."""
        return sum(blocks.outputs for blocks in self.blocks)

    @property
    def tiles(self) -> int:
        """Number of tiles."""
        return -(-self.outputs // TILE)

    @property
    def tile_bytes(self) -> int:
        """Bytes of a tile."""
        return int(tile_bytes(self.form, self.blocks[0].features))


class Packer:
    """Matrices in one piece of memory, which is laid out by the threads that call `run`.

    Args:
        matrices: the parts of each.
    """

    def __init__(self, matrices: Sequence[Sequence[MatrixPart]]) -> None:
        self._matrices = matrices
        parts = list(itertools.chain(*matrices))
        sizes = [part.tile_bytes for part in parts]
        wholes = (part.tiles * size for part, size in zip(parts, sizes, strict=True))
        self._begins = list(itertools.accumulate(wholes, initial=0))
        self._arena, self._taken = empty_bytes(self._begins.pop()), np.zeros(1, np.int64)
        jobs, order = list[tuple[int, ...]](), list[int]()
        for part, begin, size in zip(parts, self._begins, sizes, strict=True):
            first = 0
            for blocks in part.blocks:
                at = len(order) if blocks.order else _UNORDERED
                order += blocks.order
                place = blocks.rows.ctypes.data, blocks.rows.strides[0], at
                for start in range(0, blocks.outputs, _ROWS):
                    own = start, min(start + _ROWS, blocks.outputs)
                    tiles = first, begin, size
                    jobs.append((blocks.form, part.form, *place, *own, *tiles, blocks.mapped))
                first += blocks.outputs
        self._jobs, self._order = np.array(jobs, np.int64).reshape(-1, 11), np.array(order, np.int64)

    def run(self) -> None:
        """Lay out matrices until all are laid out or being laid out by other threads."""
        _pack(self._jobs, self._order, self._arena.ctypes.data, self._taken)

    def stop(self) -> None:
        """Lay out no more."""
        self._taken[0] = len(self._jobs)

    def weights(self) -> list[Weights]:
        """Return the matrices, which are complete when all calls of `run` have ended."""
        found, begins = [], iter(self._begins)
        for parts in self._matrices:
            firsts = itertools.accumulate((part.tiles for part in parts), initial=0)
            table = [
                (part.form, begin, first, part.tiles, tile_address(part.form))
                for part, begin, first in zip(parts, begins, firsts, strict=False)
            ]
            outputs = sum(part.outputs for part in parts)
            found.append(Weights(self._arena, np.array(table), parts[0].blocks[0].features, outputs))
        return found


def pack(parts: Sequence[MatrixPart]) -> Weights:
    """Lay out one matrix."""
    packer = Packer([parts])
    packer.run()
    return packer.weights()[0]


def empty_bytes(size: int) -> Bytes:
    """Allocate zeros that begin on a cache line."""
    raw = np.zeros(size + 64, np.uint8)
    skip = -raw.ctypes.data % 64
    return raw[skip : skip + size]


@compiled()
def _pack(jobs: Slots, order: Slots, arena: int, taken: Slots) -> None:
    """Do jobs until none is left.

    Args:
        jobs: [jobs, 11] format of blocks, and of tiles; address of the blocks, bytes of a row, and where their order
            begins; first row and end; output of row 0; first byte of the tiles, and bytes of one; whether the blocks
            are mapped.
        order: of all blocks that have one.
        arena: address of all tiles. Threads that sliced one array would all count its users in one place.
        taken: [1] number of jobs that were begun.
    """
    while True:
        job = _next(taken.ctypes.data)
        if job >= len(jobs):
            return
        form, target, address, size, at, start, end, first, begin, tile, mapped = jobs[job]
        for row in range(start, end):
            place = address + (row if at == _UNORDERED else order[at + row]) * size
            blocks = bytes_at(place, size).reshape(1, size)
            if form != target:
                blocks = quantize(target, dequantize(form, blocks))
            own = arena + begin + (first + row) // TILE * tile
            pack_row(target, blocks[0], (first + row) % TILE, bytes_at(own, tile))
        if mapped:
            page = (address + start * size + _PAGE - 1) // _PAGE * _PAGE
            _release(page, max(0, (address + end * size) // _PAGE * _PAGE - page))


@intrinsic
def _next(context: Any, address: Any) -> Any:
    """Add 1 to an integer that threads share, and return what it was."""

    def generate(context: Any, b: Any, signature: Any, args: Any) -> Any:
        return b.atomic_rmw("add", b.inttoptr(args[0], I64.as_pointer()), I64(1), "monotonic")

    return types.int64(types.int64), generate


@intrinsic
def _release(context: Any, address: Any, size: Any) -> Any:
    """Unmap whole pages of a file, which are read again if they are wanted."""

    def generate(context: Any, b: Any, signature: Any, args: Any) -> Any:
        if _UNUSED is not None:
            pointer = b.inttoptr(args[0], I8.as_pointer())
            Builder(b).call("madvise", I32, pointer, args[1], I32(_UNUSED))
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), generate
