"""The inner loop of `integer_matmul` in LLVM's vector operations: a tile of weights times several rows.

A tile is 32 outputs. 64 bytes of weights, of 16 outputs and 4 features, are multiplied with the same 4 features of a
row in every lane; with VNNI this is one instruction. No library that pip installs has a kernel of integer weights that
is fast for one row as well as for several (docs/LOG.md, 2026-11-22).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numba
from llvmlite import ir  # type: ignore[import-untyped]
from numba import types
from numba.core import cgutils
from numba.core.codegen import get_host_cpu_features
from numba.extending import intrinsic

TILE, LANES = 32, 16

_I8, _I16, _I32, _I64, _F32 = (*(ir.IntType(bits) for bits in (8, 16, 32, 64)), ir.FloatType())
_BYTES, _SUMS, _FLOATS = (ir.VectorType(kind, count) for kind, count in ((_I8, 64), (_I32, LANES), (_F32, LANES)))


@functools.cache
def instructions() -> str | None:
    """Return the best instruction set of this CPU: "avx512vnni", "avxvnni", "avx2", or None."""
    config: Any = numba.config
    of_host: Any = get_host_cpu_features
    features = (of_host() if config.CPU_FEATURES is None else config.CPU_FEATURES).split(",")
    return next((name for name in ("avx512vnni", "avxvnni", "avx2") if f"+{name}" in features), None)


MAX_ROWS = 8 if instructions() == "avx512vnni" else 2
"""Rows that a weight serves while it lies in a register: CPUs without AVX-512 have fewer and narrower registers."""


class _Kind(NamedTuple):
    """A kind of product.

    Attributes:
        name: in LLVM.
        nibbles: whether weights have 4 bits.
        wide: whether levels have 8 bits, of which pairs of products may not fit 16 bits.
    """

    name: str
    nibbles: bool = False
    wide: bool = False


class Builder:
    """Shorthands for the kernel's frequent instructions.

    Args:
        b: llvmlite's builder.
        wide: whether levels may be too large for sums of pairs in 16 bits.
    """

    def __init__(self, b: Any, wide: bool = False) -> None:
        self.b, self._wide = b, wide

    def call(self, name: str, result: Any, *args: Any) -> Any:
        """Call one of LLVM's own functions."""
        kind = ir.FunctionType(result, [arg.type for arg in args])
        find: Any = cgutils.get_or_insert_function
        return self.b.call(find(self.b.module, kind, name), args)

    def plus(self, number: Any, count: int) -> Any:
        """Add a constant."""
        return self.b.add(number, _I64(count))

    def pointer(self, address: Any, index: Any, size: int, kind: Any) -> Any:
        """Return a pointer to an element of an array."""
        return self.b.inttoptr(self.b.add(address, self.b.mul(index, _I64(size))), kind.as_pointer())

    def load(self, address: Any, index: Any, size: int, kind: Any) -> Any:
        """Load an element of an array."""
        return self.b.load(self.pointer(address, index, size, kind), align=1)

    def everywhere(self, number: Any) -> Any:
        """Copy an int32 to all lanes."""
        nothing = ir.Constant(_SUMS, ir.Undefined)
        return self.b.shuffle_vector(self.b.insert_element(nothing, number, _I32(0)), nothing, _SUMS([0] * LANES))

    def dot(self, sums: Any, weights: Any, levels: Any) -> Any:
        """Add four products of unsigned and signed bytes to each of 16 sums."""
        if instructions() == "avx512vnni":
            own = (self.b.bitcast(x, sums.type) for x in (weights, levels))  # LLVM 22 takes bytes, and accepts this too
            return self.call("llvm.x86.avx512.vpdpbusd.512", _SUMS, sums, *own)
        halves = [self._half(*(self._part(v, i) for v in (sums, weights, levels))) for i in range(2)]
        return self.b.shuffle_vector(*halves, _SUMS(list(range(LANES))))

    def _half(self, sums: Any, weights: Any, levels: Any) -> Any:
        if instructions() == "avxvnni":
            own = (self.b.bitcast(x, sums.type) for x in (weights, levels))
            return self.call("llvm.x86.avx512.vpdpbusd.256", sums.type, sums, *own)
        words, parts = ir.VectorType(_I16, LANES), [levels]
        if self._wide:
            half = self.b.ashr(levels, levels.type([1] * levels.type.count))
            parts = [half, self.b.sub(levels, half)]
        for part in parts:
            pairs = self.call("llvm.x86.avx2.pmadd.ub.sw", words, weights, part)
            sums = self.b.add(sums, self.call("llvm.x86.avx2.pmadd.wd", sums.type, pairs, words([1] * LANES)))
        return sums

    def _part(self, vector: Any, half: int) -> Any:
        count = vector.type.count // 2
        places = ir.VectorType(_I32, count)(list(range(half * count, (half + 1) * count)))
        return self.b.shuffle_vector(vector, ir.Constant(vector.type, ir.Undefined), places)


def _tile(num_rows: int, kind: _Kind, b: Any, args: Any) -> None:
    """Multiply `num_rows` rows with a tile of weights: a loop over groups around a loop over their turns."""
    levels, begin, stored, scales, groups, turns, out, length = args
    k = Builder(b, kind.wide)
    places = [(n, t) for n in range(num_rows) for t in range(2)]
    before, next_group, next_turn, group_done, done = b.block, *(b.append_basic_block() for _ in range(4))
    b.branch(next_group)

    b.position_at_end(next_group)
    group, totals = b.phi(_I64), [b.phi(_FLOATS) for _ in places]
    starts = [k.everywhere(k.load(begin, b.add(b.mul(_I64(n), groups), group), 4, _I32)) for n in range(num_rows)]
    b.branch(next_turn)

    b.position_at_end(next_turn)
    turn, sums = b.phi(_I64), [b.phi(_SUMS) for _ in places]
    at = b.add(b.mul(group, turns), turn)
    weights = [[k.load(stored, k.plus(b.mul(at, _I64(2)), t), 64, _BYTES) for t in range(2)]]
    if kind.nibbles:
        low, high = _BYTES([15] * 64), _BYTES([4] * 64)
        weights = [[b.and_(both, low) for both in weights[0]], [b.lshr(both, high) for both in weights[0]]]
    more = list(sums)
    for part, own in enumerate(weights):
        quad = k.plus(b.mul(at, _I64(len(weights))), part)
        for n in range(num_rows):
            four = k.load(levels, k.plus(b.mul(quad, _I64(num_rows)), n), 4, _I32)
            spread = b.bitcast(k.everywhere(four), _BYTES)
            for t in range(2):
                more[2 * n + t] = k.dot(more[2 * n + t], own[t], spread)
    another_turn = k.plus(turn, 1)
    b.cbranch(b.icmp_signed("<", another_turn, turns), next_turn, group_done)

    b.position_at_end(group_done)
    factors = [k.load(scales, k.plus(b.mul(group, _I64(2)), t), 64, _FLOATS) for t in range(2)]
    grown = [
        k.call("llvm.fma.v16f32", _FLOATS, b.sitofp(found, _FLOATS), factors[t], total)
        for (_, t), found, total in zip(places, more, totals, strict=True)
    ]
    another_group = k.plus(group, 1)
    b.cbranch(b.icmp_signed("<", another_group, groups), next_group, done)

    b.position_at_end(done)
    for (n, t), total in zip(places, grown, strict=True):
        b.store(total, k.pointer(out, k.plus(b.mul(_I64(n), length), LANES * t), 4, _FLOATS), align=1)

    def over(phi: Any, first: Any, entry: Any, then: Any, end: Any) -> None:
        phi.add_incoming(first, entry)
        phi.add_incoming(then, end)

    over(group, _I64(0), before, another_group, group_done)
    over(turn, _I64(0), next_group, another_turn, next_turn)
    for i, (n, _) in enumerate(places):
        over(totals[i], _FLOATS([0.0] * LANES), before, grown[i], group_done)
        over(sums[i], starts[n], next_group, more[i], next_turn)


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


def _kernel(kind: _Kind) -> Any:
    @intrinsic
    def tile(
        context: Any,
        rows: Any,
        levels: Any,
        begin: Any,
        stored: Any,
        scales: Any,
        groups: Any,
        turns: Any,
        out: Any,
        length: Any,
    ) -> Any:
        """Multiply 1, 2, 4 or 8 rows, up to `MAX_ROWS`, with a tile of weights.

        All arguments are integers: the number of rows; the addresses of levels [quads, rows, 4], starts of sums
        [rows, groups], stored weights, and scales [groups, 32]; the number of groups, and of turns in each; the address
        of the output, and the length of its rows.
        """

        def generate(context: Any, b: Any, signature: Any, args: Any) -> Any:
            end = b.append_basic_block()
            ways = b.switch(args[0], end)
            for num_rows in range(1, MAX_ROWS + 1):
                way = b.append_basic_block()
                ways.add_case(_I64(num_rows), way)
                b.position_at_end(way)
                write = functools.partial(_tile, num_rows, kind)
                b.call(own_function(b.module, f"{kind.name}.{num_rows}", [_I64] * 8, write), args[1:])
                b.branch(end)
            b.position_at_end(end)
            return context.get_dummy_value()

        return types.void(*(types.int64,) * 9), generate

    return tile


byte_tile, nibble_tile = _kernel(_Kind("bytes")), _kernel(_Kind("nibbles", nibbles=True))
wide_tile = _kernel(_Kind("wide", wide=True))
