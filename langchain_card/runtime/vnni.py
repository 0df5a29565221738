"""Products of rows with integer weights, 8 or 4 bits each, on x86 CPUs that have AVX-512 with VNNI.

Few rows wait for memory, eight for the multiplier: so weights are read once, in one stream, and each is used for up to
eight rows while it lies in a register. 32 outputs are a tile. `vpdpbusd` multiplies 64 weights (16 outputs, 4 features)
with the same 4 features of a row, and adds in 32 bits, exactly. No library that installs with pip has such a kernel
that is fast for one row as well as for some (docs/LOG.md); here LLVM makes it from vector operations, through numba.

Activations are rows in [-1, 1], rounded to signed levels. Weights are stored unsigned, larger by a constant that is
taken off at the beginning: every sum starts at minus the constant times the row's own sum. A 4-bit weight shares its
byte with the one four features later, and each group of 128 features has its own scale. A row's bits never depend on
the rows beside it: integer sums are exact, and scaled groups are added in their order.
"""

from __future__ import annotations

import functools
import threading
from typing import Any, NamedTuple, TypeAlias

import llvmlite.binding as llvm  # type: ignore[import-untyped]
import numba
import numpy as np
import torch
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from langchain_card.runtime.row_kernels import Array, compiled

TILE, LANES = 32, 16
BLOCK = 8
"""Rows that a weight is used for while it lies in a register."""
BYTE_OFFSET, NIBBLE_OFFSET = 128, 8

_I8, _I32, _I64, _F32 = ir.IntType(8), ir.IntType(32), ir.IntType(64), ir.FloatType()
_BYTES, _SUMS, _FLOATS = (ir.VectorType(kind, count) for kind, count in ((_I8, 64), (_I32, LANES), (_F32, LANES)))
_Bytes: TypeAlias = np.ndarray[Any, np.dtype[np.uint8]]
_MOST_THREADS = numba.get_num_threads()  # the pool's size, which NUMBA_NUM_THREADS may have made smaller
_alone = threading.Lock()  # not all of numba's thread pools may be entered twice


@functools.cache
def runs_here() -> bool:
    """Whether this CPU, and the compiler that came with numba, have what the kernel is made of."""
    return bool(llvm.get_host_cpu_features().get("avx512vnni")) and llvm.llvm_version_info >= (22,)


class Weights(NamedTuple):
    """A matrix as the kernel reads it.

    Attributes:
        stored: [tiles, turns, 128 bytes]: in one turn 32 outputs meet 4 features, or 8 of 4 bits.
        scales: [tiles, groups, 32] what a product of levels stands for.
        features: of a row of activations.
        outputs: of a row of products.
        levels: of activations, on either side of zero.
        offset: what weights are stored too large by.
    """

    stored: _Bytes
    scales: Array
    features: int
    outputs: int
    levels: int
    offset: int

    def multiply(self, rows: Array) -> Array:
        """Products.

        Args:
            rows: float32 [rows, features] in [-1, 1].

        Returns:
            Float32 [rows, outputs].
        """
        threads = min(torch.get_num_threads(), _MOST_THREADS)
        out = np.empty((len(rows), len(self.stored) * TILE), np.float32)
        if threads == 1:
            product(rows, self.stored, self.scales, self.levels, self.offset, out, 1)
        else:
            with _alone:
                numba.set_num_threads(threads)
                product(rows, self.stored, self.scales, self.levels, self.offset, out, threads)
        return out if out.shape[1] == self.outputs else out[:, : self.outputs].copy()

    def unpack(self) -> tuple[Any, Array]:
        """The matrix and the scales that `pack` was given."""
        stored = self.stored
        if self.offset == NIBBLE_OFFSET:
            stored = np.stack([stored & 15, stored >> 4], axis=2)
        fours = stored.reshape(len(stored), -1, 2, LANES, 4).transpose(0, 2, 3, 1, 4)
        whole = fours.reshape(len(stored) * TILE, -1)[: self.outputs, : self.features]
        scales = self.scales.transpose(0, 2, 1).reshape(-1, self.scales.shape[1])[: self.outputs]
        return (whole.astype(np.int16) - self.offset).astype(np.int8), scales / np.float32(1 / self.levels)


def pack(weight: Any, scales: Array, levels: int, offset: int = BYTE_OFFSET) -> Weights:
    """Lays a matrix out for the kernel.

    Args:
        weight: int8 [outputs, features]; for 4 bits -8..7, and features are whole groups of 128.
        scales: float32 [outputs, groups] of the weights; a single group for 8 bits.
        levels: that activations are rounded to, on either side of zero; 127 at most.
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


@compiled()
def product(rows: Array, stored: _Bytes, scales: Array, levels: int, offset: int, out: Array, threads: int) -> None:
    """`Weights.multiply` within compiled code; `out` is [rows, 32 x tiles]."""
    nibbles = offset == NIBBLE_OFFSET
    quads = stored.shape[1] * (2 if nibbles else 1)
    groups = scales.shape[1]
    signed = np.empty(len(rows) * quads * 4, np.int8)
    begin = np.empty((len(rows), groups), np.int32)
    _to_levels(rows, np.float32(levels), np.int32(-offset), quads, signed, begin)
    if threads == 1:
        _stretch(signed, begin, stored, scales, nibbles, out, 0, len(stored))
    else:
        _stretches(signed, begin, stored, scales, nibbles, out, threads)


@compiled()
def _to_levels(rows: Array, levels: np.float32, offset: np.int32, quads: int, signed: Any, begin: Any) -> None:
    """Blocks of rows as the kernel reads them, [quads, rows, 4 features] each; and where each group's sums begin."""
    count, groups = len(rows), begin.shape[1]
    quads_a_group = quads // groups
    for first in range(0, count, BLOCK):
        together = min(count - first, BLOCK)
        own = signed[first * quads * 4 : (first + together) * quads * 4].reshape(quads, together, 4)
        for n in range(together):
            row = rows[first + n]
            for g in range(groups):
                total = np.int32(0)
                for quad in range(g * quads_a_group, (g + 1) * quads_a_group):
                    for i in range(4):
                        at = quad * 4 + i
                        level = np.int32(np.rint(row[at] * levels)) if at < len(row) else np.int32(0)
                        own[quad, n, i] = level
                        total += level
                begin[first + n, g] = offset * total


def _tile(num_rows: int, nibbles: bool) -> Any:
    """The kernel for so many rows: their products with a tile of weights.

    Its arguments are addresses: of levels [quads, rows, 4], begins [rows, groups], stored weights, scales
    [groups, 32]; the number of groups and of turns for each; the address of the output and the length of its rows.
    """

    @intrinsic
    def tile(
        context: Any, levels: Any, begin: Any, stored: Any, scales: Any, groups: Any, turns: Any, out: Any, length: Any
    ) -> Any:
        signature = types.void(levels, begin, stored, scales, groups, turns, out, length)

        def generate(context: Any, b: Any, signature: Any, args: Any) -> Any:
            levels, begin, stored, scales, groups, turns, out, length = args
            declare: Any = cgutils.get_or_insert_function
            dot = declare(b.module, ir.FunctionType(_SUMS, [_SUMS, _BYTES, _BYTES]), "llvm.x86.avx512.vpdpbusd.512")
            add = declare(b.module, ir.FunctionType(_FLOATS, [_FLOATS] * 3), "llvm.fma.v16f32")

            def pointer(address: Any, index: Any, size: int, kind: Any) -> Any:
                return b.inttoptr(b.add(address, b.mul(index, _I64(size))), kind.as_pointer())

            def load(address: Any, index: Any, size: int, kind: Any) -> Any:
                return b.load(pointer(address, index, size, kind), align=1)

            def everywhere(number: Any) -> Any:
                nothing = ir.Constant(_SUMS, ir.Undefined)
                return b.shuffle_vector(b.insert_element(nothing, number, _I32(0)), nothing, _SUMS([0] * LANES))

            def after(number: Any, count: int) -> Any:
                return b.add(number, _I64(count))

            places = [(n, t) for n in range(num_rows) for t in range(2)]
            before, next_group, next_turn, group_done, done = b.block, *(b.append_basic_block() for _ in range(4))
            b.branch(next_group)

            b.position_at_end(next_group)
            group, totals = b.phi(_I64), [b.phi(_FLOATS) for _ in places]
            starts = [everywhere(load(begin, b.add(b.mul(_I64(n), groups), group), 4, _I32)) for n in range(num_rows)]
            b.branch(next_turn)

            b.position_at_end(next_turn)
            turn, sums = b.phi(_I64), [b.phi(_SUMS) for _ in places]
            at = b.add(b.mul(group, turns), turn)
            halves = [load(stored, after(b.mul(at, _I64(2)), t), 64, _BYTES) for t in range(2)]
            weights = [halves]
            if nibbles:
                weights = [
                    [b.and_(half, _BYTES([15] * 64)) for half in halves],
                    [b.lshr(half, _BYTES([4] * 64)) for half in halves],
                ]
            following = list(sums)
            for part, own in enumerate(weights):
                quad = after(b.mul(at, _I64(len(weights))), part)
                for n in range(num_rows):
                    four = load(levels, after(b.mul(quad, _I64(num_rows)), n), 4, _I32)
                    spread = b.bitcast(everywhere(four), _BYTES)
                    for t in range(2):
                        following[2 * n + t] = b.call(dot, [following[2 * n + t], own[t], spread])
            another_turn = after(turn, 1)
            b.cbranch(b.icmp_signed("<", another_turn, turns), next_turn, group_done)

            b.position_at_end(group_done)
            factors = [load(scales, after(b.mul(group, _I64(2)), t), 64, _FLOATS) for t in range(2)]
            grown = [
                b.call(add, [b.sitofp(found, _FLOATS), factors[t], total])
                for (_, t), found, total in zip(places, following, totals, strict=True)
            ]
            another_group = after(group, 1)
            b.cbranch(b.icmp_signed("<", another_group, groups), next_group, done)

            b.position_at_end(done)
            for (n, t), total in zip(places, grown, strict=True):
                b.store(total, pointer(out, after(b.mul(_I64(n), length), LANES * t), 4, _FLOATS), align=1)

            zero = _FLOATS([0.0] * LANES)
            for phi, first, then in [
                (group, _I64(0), another_group),
                *((total, zero, more) for total, more in zip(totals, grown, strict=True)),
            ]:
                phi.add_incoming(first, before)
                phi.add_incoming(then, group_done)
            for phi, first, then in [
                (turn, _I64(0), another_turn),
                *((own, starts[n], more) for (n, _), own, more in zip(places, sums, following, strict=True)),
            ]:
                phi.add_incoming(first, next_group)
                phi.add_incoming(then, next_turn)
            return context.get_dummy_value()

        return signature, generate

    return tile


_w1, _w2, _w3, _w4, _w5, _w6, _w7, _w8 = (_tile(count, nibbles=False) for count in range(1, 9))
_n1, _n2, _n3, _n4, _n5, _n6, _n7, _n8 = (_tile(count, nibbles=True) for count in range(1, 9))


@compiled()
def _stretch(
    signed: Any, begin: Any, stored: _Bytes, scales: Array, nibbles: bool, out: Array, start: int, end: int
) -> None:
    """Products for the tiles from `start` to `end`."""
    groups, length = scales.shape[1], out.shape[1]
    turns = stored.shape[1] // groups
    quads = stored.shape[1] * (2 if nibbles else 1)
    for t in range(start, end):
        w, s = stored[t].ctypes.data, scales[t].ctypes.data
        for n in range(0, len(begin), BLOCK):
            left = min(len(begin) - n, BLOCK)
            a, c, to = signed[n * quads * 4 :].ctypes.data, begin[n].ctypes.data, out[n, t * TILE :].ctypes.data
            if nibbles:
                if left == 8:
                    _n8(a, c, w, s, groups, turns, to, length)
                elif left == 7:
                    _n7(a, c, w, s, groups, turns, to, length)
                elif left == 6:
                    _n6(a, c, w, s, groups, turns, to, length)
                elif left == 5:
                    _n5(a, c, w, s, groups, turns, to, length)
                elif left == 4:
                    _n4(a, c, w, s, groups, turns, to, length)
                elif left == 3:
                    _n3(a, c, w, s, groups, turns, to, length)
                elif left == 2:
                    _n2(a, c, w, s, groups, turns, to, length)
                else:
                    _n1(a, c, w, s, groups, turns, to, length)
            elif left == 8:
                _w8(a, c, w, s, groups, turns, to, length)
            elif left == 7:
                _w7(a, c, w, s, groups, turns, to, length)
            elif left == 6:
                _w6(a, c, w, s, groups, turns, to, length)
            elif left == 5:
                _w5(a, c, w, s, groups, turns, to, length)
            elif left == 4:
                _w4(a, c, w, s, groups, turns, to, length)
            elif left == 3:
                _w3(a, c, w, s, groups, turns, to, length)
            elif left == 2:
                _w2(a, c, w, s, groups, turns, to, length)
            else:
                _w1(a, c, w, s, groups, turns, to, length)


@compiled(parallel=True)
def _stretches(signed: Any, begin: Any, stored: _Bytes, scales: Array, nibbles: bool, out: Array, threads: int) -> None:
    """All products; each thread takes a stretch of the tiles."""
    tiles = len(stored)
    for thread in numba.prange(threads):
        start, end = tiles * thread // threads, tiles * (thread + 1) // threads
        _stretch(signed, begin, stored, scales, nibbles, out, start, end)


def _aligned(shape: tuple[int, ...]) -> _Bytes:
    """Bytes that begin on a line of the caches."""
    size = int(np.prod(shape))
    raw = np.empty(size + 64, np.uint8)
    skip = -raw.ctypes.data % 64
    return raw[skip : skip + size].reshape(shape)
