"""Rows of activations, rounded for the kernel of the weights.

A row is rounded to 127 levels on either side of zero, with one factor for each 256 features. The kernel also needs sums
of levels, by which it corrects for codes with an offset and for minimums of weights. Its bits never depend on the rows
beside it.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numba import types

from langchain_card.runtime.cpu.blocks.kernel import BLOCK
from langchain_card.runtime.cpu.compiled import Array, Integers, Levels, compiled
from langchain_card.runtime.cpu.vectors import (
    F32,
    FLOATS,
    I8,
    I32,
    I64,
    LANES,
    MAX_ROWS,
    SUMS,
    TOP_LEVEL,
    UNITS,
    Builder,
    close_phi,
    float_of,
    intrinsic,
    own_function,
    vector,
)

_LEVELS: np.float32 = np.float32(TOP_LEVEL)
_TINY: np.float32 = np.float32(1e-30)
_NO_SIGN = 0x7FFFFFFF


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


class Scratch(NamedTuple):
    """Scratch for one block of a row.

    Attributes:
        row: [256] the block's features; zeros beyond the last feature of a row.
        bits: int32 [256].
        sums: int32 [8] sums of its levels.
    """

    row: Array
    bits: Integers
    sums: Integers


@compiled()
def scratch() -> Scratch:
    """Allocate scratch."""
    return Scratch(np.zeros(BLOCK, np.float32), np.empty(BLOCK, np.int32), np.empty(BLOCK // 32, np.int32))


@compiled()
def block(left: int) -> int:
    """Return how many of the remaining rows are multiplied together: blocks of about one size, up to `MAX_ROWS`."""
    blocks = (left + MAX_ROWS - 1) // MAX_ROWS
    return (left + blocks - 1) // blocks


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


@compiled(error_model="numpy")
def round_block(own: Scratch, i: int, n: int, count: int, out: Rounded) -> None:
    """Round block `i` of row `n` of `count`, which lies in `own.row`, into its place."""
    features = len(out.levels) // count
    blocks = (features + BLOCK - 1) // BLOCK
    first, together = 0, block(count)
    while n >= first + together:
        first += together
        together = block(count - first)
    column, before = n - first, first * features + i * together * BLOCK
    row, sums = own.row.ctypes.data, own.sums
    top = max(float_of(_largest_bits(row)), _TINY)
    out.factors[first * blocks + i * together + column] = top / _LEVELS
    sums[:] = 0
    _round(
        row, _LEVELS / top, min(BLOCK, features - i * BLOCK) // 32, together,
        out.levels.ctypes.data + before + 4 * column, out.starts.ctypes.data + before // 16 * 4 + 4 * column,
        out.sums.ctypes.data + before // 32 * 4 + 4 * column, sums.ctypes.data,
    )  # fmt: skip
    pairs = out.pairs[(first * blocks + i * together) * 4 + column :]
    for j in range(4):
        pairs[j * together] = (sums[2 * j] & 0xFFFF) | (sums[2 * j + 1] << 16)


@intrinsic
def _largest_bits(context: Any, row: Any) -> Any:
    """Return the bits of the largest magnitude of 256 floats at an address.

    Without signs, the order of floats is that of their bits.
    """

    def generate(context: Any, b: Any, signature: Any, args: Any) -> Any:
        k, size = Builder(b), SUMS([_NO_SIGN] * LANES)
        sizes = [b.and_(k.load(args[0], I64(i), 64, SUMS), size) for i in range(BLOCK // LANES)]
        while len(sizes) > 1:
            left, right = sizes.pop(), sizes.pop()
            sizes.insert(0, b.select(b.icmp_signed(">", left, right), left, right))
        return b.zext(k.call("llvm.vector.reduce.smax.v16i32", I32, sizes[0]), I64)

    return types.int64(types.int64), generate


def _write(b: Any, args: Any) -> None:
    """Round groups of 32 features: a loop over them."""
    row, shrink, groups, stride, levels, starts, sums, own_sums = args
    k = Builder(b)
    factor = k.everywhere_float(shrink)
    before, loop, done = b.block, b.append_basic_block(), b.append_basic_block()
    b.branch(loop)
    b.position_at_end(loop)
    group, total = b.phi(I64), I32(0)
    for half in range(2):
        number = k.plus(k.times(group, 2), half)
        scaled = b.fmul(k.load(row, number, 64, FLOATS), factor)
        rounded = k.nearest(scaled)
        fours = b.bitcast(b.trunc(rounded, vector(I8, LANES)), vector(I32, LANES // 4))
        for i in range(LANES // 4):
            place = b.mul(k.plus(k.times(number, LANES // 4), i), stride)
            b.store(b.extract_element(fours, I32(i)), k.pointer(levels, place, 4, I32), align=4)
        own = b.neg(k.call("llvm.vector.reduce.add.v16i32", I32, rounded))
        total = b.add(total, own)
        start = b.add(b.shl(own, I32(5)), I32(UNITS))
        b.store(start, k.pointer(starts, b.mul(number, stride), 4, I32), align=4)
    b.store(total, k.pointer(sums, b.mul(group, stride), 4, I32), align=4)
    b.store(total, k.pointer(own_sums, group, 4, I32), align=4)
    another = k.plus(group, 1)
    b.cbranch(b.icmp_signed("<", another, groups), loop, done)
    b.position_at_end(done)
    close_phi(group, before, another, loop)


@intrinsic
def _round(
    context: Any, row: Any, shrink: Any, groups: Any, stride: Any, levels: Any, starts: Any, sums: Any, own_sums: Any
) -> Any:
    """Round groups of 32 floats.

    All arguments but one are integers: the address of the floats; the factor that makes them levels; the number of
    groups, at least one; the distance of neighbours in the output; the addresses of levels, starts and sums, which are
    those of `Rounded` for one row, and of the sums again, side by side.
    """

    def generate(context: Any, b: Any, signature: Any, args: Any) -> Any:
        b.call(own_function(b.module, "activations", [I64, F32, *[I64] * 6], _write), args)
        return context.get_dummy_value()

    return types.void(types.int64, types.float32, *(types.int64,) * 6), generate
