"""Vector instructions for kernels that numba alone does not generate, through LLVM.

Kernels work on 16 lanes of 32 bits. A CPU with shorter vectors runs each operation in parts; the results are the same.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import numba
import numba.extending
import numpy as np
from llvmlite import ir  # type: ignore[import-untyped]
from numba import carray, types  # type: ignore[attr-defined]
from numba.core import cgutils
from numba.core.codegen import get_host_cpu_features

from langchain_card.runtime.cpu.compiled import Bytes, compiled

LANES = 16

I8, I16, I32, I64, F32 = (*(ir.IntType(bits) for bits in (8, 16, 32, 64)), ir.FloatType())
vector = ir.VectorType
BYTES, WORDS, SUMS, FLOATS = (vector(kind, count) for kind, count in ((I8, 64), (I16, 32), (I32, LANES), (F32, LANES)))


@functools.cache
def instructions() -> str:
    """Return the best instruction set of this CPU: "avx512vnni", "avxvnni", "avx2", or "portable"."""
    config: Any = numba.config
    of_host: Any = get_host_cpu_features
    features = (of_host() if config.CPU_FEATURES is None else config.CPU_FEATURES).split(",")
    return next((name for name in ("avx512vnni", "avxvnni", "avx2") if f"+{name}" in features), "portable")


UNITS = 0x4B400000
"""Bits of the float 1.5 x 2^23. In those of its sum with a small number, the last bits are the nearest integer."""

UNITS_FLOAT = float(3 << 22)

TOP_LEVEL = 127
"""Largest magnitude of a rounded activation."""

MAX_ROWS = {"avx512vnni": 16, "avx2": 8}.get(instructions(), 2)
"""Rows that a weight serves while it lies in a register (docs/LOG.md, 2026-11-27)."""


class Builder:
    """Shorthands for the kernels' frequent instructions.

    Args:
        b: llvmlite's builder.
    """

    def __init__(self, b: Any) -> None:
        self.b = b

    def call(self, name: str, result: Any, *args: Any) -> Any:
        """Call one of LLVM's own functions."""
        kind = ir.FunctionType(result, [arg.type for arg in args])
        find: Any = cgutils.get_or_insert_function
        return self.b.call(find(self.b.module, kind, name), args)

    def plus(self, number: Any, count: int) -> Any:
        """Add a constant."""
        return self.b.add(number, I64(count))

    def times(self, number: Any, count: int) -> Any:
        """Multiply by a constant."""
        return self.b.mul(number, I64(count))

    def pointer(self, address: Any, index: Any, size: int, kind: Any) -> Any:
        """Return a pointer to an element of an array."""
        return self.b.inttoptr(self.b.add(address, self.times(index, size)), kind.as_pointer())

    def load(self, address: Any, index: Any, size: int, kind: Any) -> Any:
        """Load an element of an array."""
        return self.b.load(self.pointer(address, index, size, kind), align=1)

    def prefetch(self, address: Any, offset: int) -> None:
        """Begin to load a line of the cache."""
        pointer = self.b.inttoptr(self.plus(address, offset), I8.as_pointer())
        self.call("llvm.prefetch.p0", ir.VoidType(), pointer, I32(0), I32(3), I32(1))

    def everywhere(self, number: Any) -> Any:
        """Copy an int32 to all lanes."""
        nothing = ir.Constant(SUMS, ir.Undefined)
        return self.b.shuffle_vector(self.b.insert_element(nothing, number, I32(0)), nothing, SUMS([0] * LANES))

    def everywhere_float(self, number: Any) -> Any:
        """Copy a float32 to all lanes."""
        return self.b.bitcast(self.everywhere(self.b.bitcast(number, I32)), FLOATS)

    def nearest(self, numbers: Any) -> Any:
        """Return the nearest integers of floats of less than 2^22, the even one of two."""
        units = self.b.fadd(numbers, FLOATS([UNITS_FLOAT] * LANES))
        return self.b.sub(self.b.bitcast(units, SUMS), SUMS([UNITS] * LANES))

    def fma(self, a: Any, b: Any, c: Any) -> Any:
        """Return `a * b + c`, rounded once."""
        return self.call("llvm.fma.v16f32", FLOATS, a, b, c)

    def halves_at(self, address: Any, offset: int) -> Any:
        """Load 16 float16 as float32. Infinities and NaN, which no weight is, become numbers where LLVM has no call."""
        where = self.plus(address, offset)
        if instructions() != "portable":
            return self.b.fpext(self.load(where, I64(0), 1, vector(ir.HalfType(), LANES)), FLOATS)
        bits = self.b.zext(self.load(where, I64(0), 1, vector(I16, LANES)), SUMS)
        size = self.b.shl(self.b.and_(bits, SUMS([0x7FFF] * LANES)), SUMS([13] * LANES))
        sign = self.b.shl(self.b.and_(bits, SUMS([0x8000] * LANES)), SUMS([16] * LANES))
        value = self.b.fmul(self.b.bitcast(size, FLOATS), FLOATS([2.0**112] * LANES))
        return self.b.bitcast(self.b.or_(self.b.bitcast(value, SUMS), sign), FLOATS)

    def dot_bytes(self, sums: Any, weights: Any, levels: Any) -> Any:
        """Add four products of unsigned and signed bytes to each of 16 sums.

        Args:
            sums: int32 [16].
            weights: unsigned bytes [64].
            levels: signed bytes [64].
        """
        if instructions() == "avx512vnni":
            own = (self.b.bitcast(x, sums.type) for x in (weights, levels))  # LLVM 22 takes bytes, and accepts this too
            return self.call("llvm.x86.avx512.vpdpbusd.512", SUMS, sums, *own)
        if instructions() == "portable":
            words = vector(I16, 64)
            products = self.b.mul(self.b.zext(weights, words), self.b.sext(levels, words))
            return self._add_parts(sums, products, 4)
        halves = self._halves(sums, weights, levels)
        return self._join(self._dot_half(own, left, right) for own, left, right in halves)

    def _dot_half(self, sums: Any, weights: Any, levels: Any) -> Any:
        if instructions() == "avxvnni":
            own = (self.b.bitcast(x, sums.type) for x in (weights, levels))
            return self.call("llvm.x86.avx512.vpdpbusd.256", sums.type, sums, *own)
        words, half = vector(I16, LANES), self.b.ashr(levels, levels.type([1] * levels.type.count))
        for part in (half, self.b.sub(levels, half)):  # the sum of two whole products may not fit 16 bits
            pairs = self.call("llvm.x86.avx2.pmadd.ub.sw", words, weights, part)
            sums = self.b.add(sums, self.call("llvm.x86.avx2.pmadd.wd", sums.type, pairs, words([1] * LANES)))
        return sums

    def pair_products(self, weights: Any, levels: Any) -> Any:
        """Return sums of two products of unsigned and signed bytes [64], as words [32], on AVX2."""
        words = vector(I16, LANES)
        halves = self._halves(weights, levels)
        return self._join([self.call("llvm.x86.avx2.pmadd.ub.sw", words, *half) for half in halves])

    def add_pairs(self, sums: Any, words: Any) -> Any:
        """Add two signed words [32] to each of 16 sums, on AVX2."""
        ones = vector(I16, LANES)([1] * LANES)
        halves = self._halves(words)
        parts = [self.call("llvm.x86.avx2.pmadd.wd", vector(I32, LANES // 2), *half, ones) for half in halves]
        return self.b.add(sums, self._join(parts))

    def dot_words(self, sums: Any, left: Any, right: Any) -> Any:
        """Add two products of signed words [32] to each of 16 sums."""
        if instructions() == "avx512vnni":
            own = (self.b.bitcast(x, sums.type) for x in (left, right))
            return self.call("llvm.x86.avx512.vpdpwssd.512", SUMS, sums, *own)
        if instructions() == "portable":
            longs = vector(I32, 32)
            return self._add_parts(sums, self.b.mul(self.b.sext(left, longs), self.b.sext(right, longs)), 2)
        products = (
            self.call("llvm.x86.avx2.pmadd.wd", own.type, *rest) for own, *rest in self._halves(sums, left, right)
        )
        return self.b.add(sums, self._join(products))

    def _add_parts(self, sums: Any, products: Any, count: int) -> Any:
        """Add `count` neighbours to each sum."""
        for i in range(count):
            places = vector(I32, LANES)([count * lane + i for lane in range(LANES)])
            part = self.b.shuffle_vector(products, ir.Constant(products.type, ir.Undefined), places)
            sums = self.b.add(sums, self.b.sext(part, SUMS) if part.type != SUMS else part)
        return sums

    def _halves(self, *wholes: Any) -> list[tuple[Any, ...]]:
        return [tuple(self._part(whole, half) for whole in wholes) for half in range(2)]

    def _part(self, whole: Any, half: int) -> Any:
        count = whole.type.count // 2
        places = vector(I32, count)(list(range(half * count, (half + 1) * count)))
        return self.b.shuffle_vector(whole, ir.Constant(whole.type, ir.Undefined), places)

    def _join(self, halves: Any) -> Any:
        left, right = halves
        return self.b.shuffle_vector(left, right, vector(I32, 2 * left.type.count)(list(range(2 * left.type.count))))


class ByteDots:
    """A sum of products of unsigned and signed bytes in each of 16 lanes.

    AVX2 has no instruction that adds them to an integer of 32 bits. There, sums of pairs stay in 16 bits while they
    fit, so that two instructions do the work of three.

    Args:
        k: writes the instructions.
        bits: of an unsigned byte.
        start: returns the first value of the sum, when it is needed.
    """

    def __init__(self, k: Builder, bits: int, start: Callable[[], Any]) -> None:
        self._k, self._start = k, start
        self._sums: Any = None
        self._pairs: Any = None
        self._fit = ((1 << 15) - 1) // (2 * TOP_LEVEL * ((1 << bits) - 1)) if instructions() == "avx2" else 0
        self._held = 0

    def add(self, weights: Any, levels: Any) -> None:
        """Add the products of unsigned bytes [64] and signed bytes [64] of at most `TOP_LEVEL`, four in each lane."""
        k = self._k
        if not self._fit:
            self._sums = k.dot_bytes(self._started(), weights, levels)
            return
        pairs = k.pair_products(weights, levels)
        self._pairs = k.b.add(self._pairs, pairs) if self._held else pairs
        self._held += 1
        if self._held == self._fit:
            self._sums, self._held = k.add_pairs(self._started(), self._pairs), 0

    def _started(self) -> Any:
        return self._start() if self._sums is None else self._sums

    def total(self) -> Any:
        """Return the sum, int32 [16]."""
        return self._k.add_pairs(self._started(), self._pairs) if self._held else self._started()


def own_function(module: Any, name: str, arguments: Sequence[Any], write: Callable[[Any, Any], None]) -> Any:
    """Return a function of an LLVM module, written when it is first wanted; a call does not repeat its code."""
    if (name := f"card.{name}") not in module.globals:
        function = ir.Function(module, ir.FunctionType(ir.VoidType(), arguments), name)
        function.linkage = "linkonce_odr"
        function.attributes.add("noinline")
        b = ir.IRBuilder(function.append_basic_block())
        write(b, function.args)
        b.ret_void()
    return module.globals[name]


def intrinsic(function: Callable[..., Any]) -> Any:
    """Return a function that compiled code calls; the given one returns its signature and the writer of its code."""
    found: Any = numba.extending.intrinsic(function)
    return found


@intrinsic
def float_of(context: Any, bits: Any) -> Any:
    """Return the float32 of the lower 32 bits of an integer."""

    def generate(context: Any, b: Any, signature: Any, args: Any) -> Any:
        return b.bitcast(b.trunc(args[0], I32), F32)

    return types.float32(types.int64), generate


@intrinsic
def bits_of(context: Any, value: Any) -> Any:
    """Return the bits of a float32 as an integer that is not negative."""

    def generate(context: Any, b: Any, signature: Any, args: Any) -> Any:
        return b.zext(b.bitcast(args[0], I32), I64)

    return types.int64(types.float32), generate


@intrinsic
def _pointer(context: Any, address: Any) -> Any:
    """Return an address as the pointer that `numba.carray` takes."""

    def generate(context: Any, b: Any, signature: Any, args: Any) -> Any:
        return b.inttoptr(args[0], I8.as_pointer())

    return types.voidptr(types.int64), generate


@compiled()
def bytes_at(address: int, size: int) -> Bytes:
    """Return bytes at an address as an array."""
    found: Bytes = carray(_pointer(address), (size,), np.uint8)
    return found


def close_phi(phi: Any, entry: Any, then: Any, end: Any, first: Any = None) -> None:
    """Complete a loop's variable: `first`, or zero, from the block `entry`, and `then` from the block `end`."""
    zero = FLOATS([0.0] * LANES) if phi.type == FLOATS else phi.type(0)
    phi.add_incoming(zero if first is None else first, entry)
    phi.add_incoming(then, end)
