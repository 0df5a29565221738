"""The inner loop of `blocks.matmul`: a tile of blocks times several rows.

A tile is 16 outputs (`blocks.tiles`). 64 bytes of codes, of 16 outputs and 4 features, are multiplied with the same 4
features of a row in every lane; with VNNI this is one instruction. The sum of a group's products is exact. It becomes a
float without a conversion: it is added to the bits of 1.5 x 2^23, whose last bits count units. Sums of groups times
their scales are added in order, and then the sums of blocks, so that a row's bits depend on nothing but itself. No
library that pip installs has a kernel of such weights that is fast for one row as well as for several (docs/LOG.md).
"""

from __future__ import annotations

import functools
import threading
from typing import Any

from llvmlite import ir  # type: ignore[import-untyped]
from numba import types

from langchain_card.runtime.cpu.blocks.formats import FORMATS, Format
from langchain_card.runtime.cpu.blocks.tiles import block_size, group_size, head_size
from langchain_card.runtime.cpu.compiled import compiled_c
from langchain_card.runtime.cpu.vectors import (
    BYTES,
    FLOATS,
    I8,
    I32,
    I64,
    LANES,
    MAX_ROWS,
    SUMS,
    UNITS,
    UNITS_FLOAT,
    WORDS,
    Builder,
    ByteDots,
    close_phi,
    intrinsic,
    own_function,
    vector,
)

BLOCK = 256
"""Features of a row that are rounded with one factor."""

FEW_ROWS = 3
"""Below so many rows, an addition to a sum would wait for the one before."""

_AHEAD = 6144
"""Bytes between the weights that are used and those that begin to be loaded."""


class _Tile:
    """The generator of a function that multiplies `num_rows` rows with a tile of one format.

    The loop over blocks of 256 features contains a loop over their groups. In formats of 32 features a block of a file
    is one group.
    """

    def __init__(self, form: Format, num_rows: int, b: Any, args: Any) -> None:
        (
            self.levels, self.factors, self.starts, self.sums, self.pairs, self.stored, self.blocks, self.last,
            self.out, self.length,
        ) = args  # fmt: skip
        self.form, self.b, self.k, self.rows = form, b, Builder(b), range(num_rows)
        self.whole = form.features == BLOCK
        self.groups = BLOCK // form.group

    def write(self) -> None:
        """Write both loops."""
        b, k, form = self.b, self.k, self.form
        before, next_block, next_group, block_done, done = b.block, *(b.append_basic_block() for _ in range(4))
        b.branch(next_block)

        b.position_at_end(next_block)
        block, totals = b.phi(I64), [b.phi(FLOATS) for _ in self.rows]
        another_block = k.plus(block, 1)
        is_last = b.icmp_signed("==", another_block, self.blocks)
        count = b.select(is_last, self.last, I64(self.groups))
        size = block_size(form) * (1 if self.whole else self.groups)
        base, first = b.add(self.stored, k.times(block, size)), k.times(block, self.groups)
        factors = [self._row_number(self.factors, block, n) for n in self.rows]
        less_min = self._less_min(base, block, factors, totals)
        if self.whole:
            factor = k.halves_at(base, 0)
            factors = [b.fmul(factor, own) for own in factors]
        b.branch(next_group)

        b.position_at_end(next_group)
        group, inner = b.phi(I64), [b.phi(FLOATS) for _ in self.rows]
        grown = self._group(base, group, b.add(first, group), inner)
        another_group = k.plus(group, 1)
        b.cbranch(b.icmp_signed("<", another_group, count), next_group, block_done)

        b.position_at_end(block_done)
        final = [k.fma(grown[n], factors[n], less_min[n]) for n in self.rows]
        b.cbranch(b.icmp_signed("<", another_block, self.blocks), next_block, done)

        b.position_at_end(done)
        for n in self.rows:
            b.store(final[n], k.pointer(self.out, k.times(self.length, n), 4, FLOATS), align=1)
        close_phi(block, before, another_block, block_done)
        close_phi(group, next_block, another_group, next_group)
        for n in self.rows:
            close_phi(totals[n], before, final[n], block_done)
            close_phi(inner[n], next_block, grown[n], next_group)

    def _row_number(self, array: Any, index: Any, n: int) -> Any:
        """Load a row's own float of an array [index, rows] into all lanes."""
        return self.b.bitcast(self._row_integer(array, index, n), FLOATS)

    def _row_integer(self, array: Any, index: Any, n: int) -> Any:
        k = self.k
        return k.everywhere(k.load(array, k.plus(k.times(index, len(self.rows)), n), 4, I32))

    def _less_min(self, base: Any, block: Any, factors: Any, totals: Any) -> Any:
        """Subtract the integer minimums of a block, if there are any, and begin to load the head of a later block."""
        b, k, form = self.b, self.k, self.form
        if not self.whole:
            return totals
        for line in range(head_size(form) // 64):
            k.prefetch(base, _AHEAD + 64 * line)
        if not form.has_min:
            return totals
        sums, at = [SUMS([0] * LANES)] * len(self.rows), 64 + LANES * self.groups
        for i in range(self.groups // 2):
            mins = b.zext(k.load(k.plus(base, at + 2 * LANES * i), I64(0), 1, vector(I8, 32)), WORDS)
            for n in self.rows:
                pair = self._row_integer(self.pairs, k.plus(k.times(block, self.groups // 2), i), n)
                sums[n] = k.dot_words(sums[n], mins, b.bitcast(pair, WORDS))
        factor = k.halves_at(base, 32)
        return [k.fma(b.fmul(b.sitofp(sums[n], FLOATS), factor), factors[n], totals[n]) for n in self.rows]

    def _group(self, base: Any, group: Any, number: Any, inner: Any) -> Any:
        """Add a group's products, times its scale, to the sums of its block."""
        b, k, form = self.b, self.k, self.form
        if self.whole:
            codes = b.add(base, k.plus(k.times(group, group_size(form)), head_size(form)))
            widen = b.sext if form.signed else b.zext
            raw = k.load(base, k.plus(k.times(group, LANES), 64), 1, vector(I8, LANES))
            scale = b.sitofp(widen(raw, SUMS), FLOATS)
        else:
            head = b.add(base, k.times(group, block_size(form)))
            codes, scale = k.plus(head, head_size(form)), k.halves_at(head, 0)
        for line in range(group_size(form) // 64):
            k.prefetch(codes, _AHEAD + 64 * line)
        chains = [[ByteDots(k, form.bits, functools.partial(self._start, number, n)) for n in self.rows]]
        if len(self.rows) < FEW_ROWS:  # they would wait for sums
            chains.append([ByteDots(k, form.bits, lambda: SUMS([0] * LANES)) for _ in self.rows])
        for i, weights in enumerate(self._quads(codes)):
            quad = k.plus(k.times(number, form.group // 4), i)
            for n in self.rows:
                chains[i % len(chains)][n].add(weights, b.bitcast(self._row_integer(self.levels, quad, n), BYTES))
        sums = [functools.reduce(b.add, (dots.total() for dots in own)) for own in zip(*chains, strict=True)]
        units = FLOATS([UNITS_FLOAT] * LANES)
        grown = [
            k.fma(b.fsub(b.bitcast(own, FLOATS), units), scale, before) for own, before in zip(sums, inner, strict=True)
        ]
        if self.whole or not form.has_min:
            return grown
        least = b.fneg(k.halves_at(head, 32))  # sums of levels are stored negative
        return [k.fma(b.sitofp(self._row_integer(self.sums, number, n), FLOATS), least, grown[n]) for n in self.rows]

    def _start(self, number: Any, n: int) -> Any:
        """Return where a group's sum starts: at less the offset times the sum of the row's levels."""
        b, form = self.b, self.form
        if not form.offset:
            return SUMS([UNITS] * LANES)
        if form.group == 16:
            return self._row_integer(self.starts, number, n)
        shift = SUMS([form.offset.bit_length() - 1] * LANES)
        return b.add(SUMS([UNITS] * LANES), b.shl(self._row_integer(self.sums, number, n), shift))

    def _quads(self, codes: Any) -> Any:
        """Yield the codes of four features after the other, as bytes."""
        b, k, form = self.b, self.k, self.form
        more = form.bits - 4
        if form.bits == 8:
            for i in range(form.group // 4):
                yield k.load(codes, I64(i), 64, BYTES)
            return
        if more:
            plane = k.load(codes, I64(0), 64, WORDS)
            codes, mask = k.plus(codes, 64), BYTES([((1 << more) - 1) << 4] * 64)
        both, low = None, BYTES([15] * 64)
        for i in range(form.group // 4):
            if i % 2 == 0:
                both = k.load(codes, I64(i // 2), 64, WORDS)
            half = both if i % 2 == 0 else b.lshr(both, WORDS([4] * 32))
            quad = b.and_(b.bitcast(half, BYTES), low)
            if more:
                shift = more * i - 4
                moved = (b.lshr if shift > 0 else b.shl)(plane, WORDS([abs(shift)] * 32))
                quad = b.or_(quad, b.and_(b.bitcast(moved, BYTES), mask))
            yield quad


_compiling = threading.Lock()

ROW_COUNTS = range(1, MAX_ROWS + 1)


@intrinsic
def _tile(
    context: Any, form: Any, rows: Any, levels: Any, factors: Any, starts: Any, sums: Any, pairs: Any, stored: Any,
    blocks: Any, last: Any, out: Any, length: Any,
) -> Any:  # fmt: skip
    """Multiply rows with a tile of a format, whose number is a constant; see `block_tile`."""
    if not isinstance(form, types.IntegerLiteral):
        return None  # numba asks again with the constant
    of_form = FORMATS[form.literal_value]

    def generate(context: Any, b: Any, signature: Any, args: Any) -> Any:
        end = b.append_basic_block()
        ways = b.switch(args[1], end)
        for count in ROW_COUNTS:
            way = b.append_basic_block()
            ways.add_case(I64(count), way)
            b.position_at_end(way)
            write = functools.partial(_write, of_form, count)
            b.call(own_function(b.module, f"blocks.{of_form.name}.{count}", [I64] * 10, write), args[2:])
            b.branch(end)
        b.position_at_end(end)
        return context.get_dummy_value()

    return types.void(form, *(types.int64,) * 11), generate


def _write(form: Format, num_rows: int, b: Any, args: Any) -> None:
    _Tile(form, num_rows, b, args).write()


def tile_address(form: int) -> int:
    """Return the address of a format's function for `block_tile`.

    Code that calls it contains no copy of it. So it is compiled once, and only if a model has the format.
    """
    with _compiling:  # of two copies, one would be freed
        address: int = _tile_function(form).address
    return address


@functools.cache
def _tile_function(form: int) -> Any:
    def multiply_tile(
        rows: int, levels: int, factors: int, starts: int, sums: int, pairs: int, stored: int, blocks: int, last: int,
        out: int, length: int,
    ) -> None:  # fmt: skip
        _tile(form, rows, levels, factors, starts, sums, pairs, stored, blocks, last, out, length)

    return compiled_c(multiply_tile, (types.int64,) * 11)


@intrinsic
def block_tile(
    context: Any, address: Any, rows: Any, levels: Any, factors: Any, starts: Any, sums: Any, pairs: Any, stored: Any,
    blocks: Any, last: Any, out: Any, length: Any,
) -> Any:  # fmt: skip
    """Multiply up to `MAX_ROWS` rows with a tile of weights.

    All arguments are integers: the result of `tile_address`; the number of rows; the addresses of a block of rounded
    rows (`activations.Rounded`) and of the tile; the number of blocks of 256 features, and of groups in the last; the
    address of the output, and the length of its rows.
    """

    def generate(context: Any, b: Any, signature: Any, args: Any) -> Any:
        # numba's own convention for C callbacks: all arguments, and no result.
        kind = ir.FunctionType(ir.VoidType(), [I64] * 11)
        b.call(b.inttoptr(args[0], kind.as_pointer()), args[1:])
        return context.get_dummy_value()

    return types.void(*(types.int64,) * 12), generate
