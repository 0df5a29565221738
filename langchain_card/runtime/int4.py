"""4-bit products for drafts on CPUs: half the memory of int8 to read in a step, and nearly half its time for few rows.

A draft only guesses, so its arithmetic is free; the target keeps its own. Weights come from their int8 form, rotated
already, and are rounded to 4 bits with a scale for each 128 features of a row. Two weights share a byte: those of a
group's first half lie in the low bits. Activations are rounded to 8 bits.

No library that installs with pip has such a kernel that is fast for one row as well as for some (docs/LOG.md). Here
LLVM makes it from vector operations, through numba: `_tile` multiplies four rows of weights with up to four of
activations and leaves the sums in registers. It needs AVX-512 with VNNI; elsewhere drafts stay in int8.
"""

from __future__ import annotations

import functools
import threading
from typing import Any

import llvmlite.binding as llvm  # type: ignore[import-untyped]
import numba
import numpy as np
import torch
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic
from torch import Tensor

from langchain_card.runtime.int8_layers import Int8Linear
from langchain_card.runtime.row_kernels import Array, compiled

GROUP = 128
TILE = 4
MAX_ROWS = 8
"""With more rows than these int8 is the faster one."""

_I8, _I32, _I64, _F32 = ir.IntType(8), ir.IntType(32), ir.IntType(64), ir.FloatType()
_BYTES, _SUMS, _FLOATS = (ir.VectorType(kind, count) for kind, count in ((_I8, 64), (_I32, 16), (_F32, 16)))
_MOST_THREADS = numba.get_num_threads()  # the pool's size, which NUMBA_NUM_THREADS may have made smaller
_alone = threading.Lock()  # not all of numba's thread pools may be entered twice


@functools.cache
def runs_here() -> bool:
    """Whether this CPU, and the compiler that came with numba, have what the kernel is made of."""
    return bool(llvm.get_host_cpu_features().get("avx512vnni")) and llvm.llvm_version_info >= (22,)


class Int4Linear(Int8Linear):
    """An int8 layer with a 4-bit form for few rows.

    Args:
        layer: whose input features are whole groups.
    """

    def __init__(self, layer: Int8Linear) -> None:
        torch.nn.Module.__init__(self)
        self.out_features, self.in_features = layer.out_features, layer.in_features
        self.bias, self.packed = layer.bias, layer.packed
        weight, _ = torch.ops.quantized.linear_unpack(self.packed)
        groups = self.in_features // GROUP
        self._nibbles = np.empty((self.out_features, groups * GROUP // 2), np.uint8)
        self._scales = np.empty((self.out_features, groups), np.float32)
        scale = weight.q_per_channel_scales().float().numpy()
        _round(weight.int_repr().numpy(), scale, self._nibbles, self._scales)

    def product(self, rows: Array) -> Tensor:
        """See `Int8Linear`."""
        if len(rows) > MAX_ROWS:
            return super().product(rows)
        groups = self._scales.shape[1]
        levels = np.empty(rows.shape, np.int8)
        begin = np.zeros((len(rows), groups, 16), np.int32)
        out = np.empty((len(rows), self.out_features), np.float32)
        _to_levels(rows, levels, begin)
        with _alone:
            numba.set_num_threads(min(torch.get_num_threads(), _MOST_THREADS))
            _multiply(levels, begin, self._nibbles, self._scales, out, numba.get_num_threads())
        return torch.from_numpy(out)


def to_4_bits(module: Any) -> None:
    """Gives the int8 layers of a model, also those within fused ones, a 4-bit form where their sizes allow it."""
    for parent in list(module.modules()):
        for name, layer in list(parent.named_children()):
            if type(layer) is Int8Linear and not (layer.in_features % GROUP or layer.out_features % TILE):
                setattr(parent, name, Int4Linear(layer))


@compiled()
def _round(weight: Any, scale: Array, nibbles: Any, scales: Array) -> None:
    """int8 [out, in] and its scales [out] to 4 bits: -8 to 7 are stored as 0 to 15."""
    half = GROUP // 2
    for o in range(len(weight)):
        for g in range(scales.shape[1]):
            own, packed = weight[o, g * GROUP : (g + 1) * GROUP], nibbles[o, g * half : (g + 1) * half]
            top = 1
            for i in range(GROUP):
                top = max(top, abs(np.int32(own[i])))
            step = np.float32(top) / np.float32(7.5)
            for i in range(half):
                low = min(max(np.int32(np.rint(own[i] / step)), -8), 7) + 8
                high = min(max(np.int32(np.rint(own[i + half] / step)), -8), 7) + 8
                packed[i] = low | (high << 4)
            scales[o, g] = step * scale[o] / np.float32(127)  # of the activations' levels, too


@compiled()
def _to_levels(rows: Array, levels: Any, begin: Any) -> None:
    """Rows in [-1, 1] to -127..127; and where each group's sums begin, for weights are stored 8 too large."""
    for n in range(len(rows)):
        for g in range(begin.shape[1]):
            total = np.int32(0)
            for i in range(g * GROUP, (g + 1) * GROUP):
                level = np.int8(np.rint(rows[n, i] * np.float32(127)))
                levels[n, i] = level
                total += level
            begin[n, g, 0] = -8 * total


def _tile(num_rows: int) -> Any:
    """The kernel for so many rows: products of each with `TILE` rows of weights.

    Its arguments are addresses: of levels [rows, groups, 128], begins [rows, groups, 16], nibbles [TILE, groups, 64],
    scales [TILE, groups]; the number of groups; the address of the output and the length of its rows.
    """

    @intrinsic
    def tile(
        context: Any, levels: Any, begin: Any, nibbles: Any, scales: Any, groups: Any, out: Any, length: Any
    ) -> Any:
        signature = types.void(levels, begin, nibbles, scales, groups, out, length)

        def generate(context: Any, b: Any, signature: Any, args: Any) -> Any:
            groups, length = args[4], args[6]
            pointers = [_I8, _I32, _I8, _F32, None, _F32]
            levels, begin, nibbles, scales, _, out = (
                b.inttoptr(x, kind.as_pointer()) if kind else x
                for x, kind in zip(args, pointers)  # noqa: B905
            )
            declare: Any = cgutils.get_or_insert_function
            dot = declare(b.module, ir.FunctionType(_SUMS, [_SUMS, _BYTES, _BYTES]), "llvm.x86.avx512.vpdpbusd.512")
            add_up = declare(b.module, ir.FunctionType(_F32, [_F32, _FLOATS]), "llvm.vector.reduce.fadd.v16f32")

            def at(pointer: Any, row: int, per_group: int, kind: Any, skip: int = 0) -> Any:
                """What lies in a row, at the group of this turn."""
                index = b.add(b.mul(b.add(b.mul(_I64(row), groups), group), _I64(per_group)), _I64(skip))
                return b.load(b.bitcast(b.gep(pointer, [index]), kind.as_pointer()), align=1)

            before, turn, after = b.block, b.append_basic_block(), b.append_basic_block()
            b.branch(turn)
            b.position_at_end(turn)
            group = b.phi(_I64)
            sums = [b.phi(_FLOATS) for _ in range(num_rows * TILE)]
            next_sums = []
            weights = [at(nibbles, r, GROUP // 2, _BYTES) for r in range(TILE)]
            low = [b.and_(weight, _BYTES([15] * 64)) for weight in weights]
            high = [b.lshr(weight, _BYTES([4] * 64)) for weight in weights]
            factors = [_spread(b, at(scales, r, 1, _F32)) for r in range(TILE)]
            for n in range(num_rows):
                first, second = at(levels, n, GROUP, _BYTES), at(levels, n, GROUP, _BYTES, GROUP // 2)
                start = at(begin, n, 16, _SUMS)
                for r in range(TILE):
                    products = b.call(dot, [b.call(dot, [start, low[r], first]), high[r], second])
                    scaled = b.fmul(b.sitofp(products, _FLOATS), factors[r], flags=["contract"])
                    next_sums.append(b.fadd(sums[n * TILE + r], scaled, flags=["contract"]))
            following = b.add(group, _I64(1))
            carried = [(group, _I64(0), following)]
            carried += [(old, _FLOATS([0.0] * 16), new) for old, new in zip(sums, next_sums, strict=True)]
            for phi, initial, value in carried:
                phi.add_incoming(initial, before)
                phi.add_incoming(value, turn)
            b.cbranch(b.icmp_signed("<", following, groups), turn, after)
            b.position_at_end(after)
            for place, value in enumerate(next_sums):
                index = b.add(b.mul(_I64(place // TILE), length), _I64(place % TILE))
                b.store(b.call(add_up, [_F32(0.0), value], fastmath=("reassoc",)), b.gep(out, [index]))
            return context.get_dummy_value()

        return signature, generate

    return tile


def _spread(b: Any, number: Any) -> Any:
    """A number in all lanes."""
    nothing = ir.Constant(_FLOATS, ir.Undefined)
    one = b.insert_element(nothing, number, _I32(0))
    return b.shuffle_vector(one, nothing, ir.Constant(ir.VectorType(_I32, 16), [0] * 16))


_one, _two, _three, _four = (_tile(count) for count in (1, 2, 3, 4))


@compiled(parallel=True)
def _multiply(levels: Any, begin: Any, nibbles: Any, scales: Array, out: Array, threads: int) -> None:
    """Products [rows, out] of levels [rows, in]; each thread takes a stretch of the outputs."""
    groups, length, tiles = scales.shape[1], out.shape[1], out.shape[1] // TILE
    for thread in numba.prange(threads):
        for t in range(tiles * thread // threads, tiles * (thread + 1) // threads):
            o = t * TILE
            weights, factors = nibbles[o:].ctypes.data, scales[o:].ctypes.data
            for n in range(0, len(levels), 4):
                left = len(levels) - n
                a, c, to = levels[n:].ctypes.data, begin[n:].ctypes.data, out[n:, o:].ctypes.data
                if left > 3:
                    _four(a, c, weights, factors, groups, to, length)
                elif left == 3:
                    _three(a, c, weights, factors, groups, to, length)
                elif left == 2:
                    _two(a, c, weights, factors, groups, to, length)
                else:
                    _one(a, c, weights, factors, groups, to, length)
