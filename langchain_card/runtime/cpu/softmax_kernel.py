"""One block of the softmax of `block_attention` in LLVM's vector operations: scores become levels of chances.

The 64 scores of a query lie in four registers from the first step to the last. Sums and maxima are taken in one order,
so that a query's bits depend on nothing else.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, SupportsFloat

from llvmlite import ir  # type: ignore[import-untyped]
from numba import types

from langchain_card.runtime.cpu.kv_kernel import BYTE_OFFSET
from langchain_card.runtime.cpu.row_kernels import EXP_LIMIT, EXP_SERIES, LN2_HIGH, LN2_LOW, LOG2_E
from langchain_card.runtime.cpu.vectors import (
    F32,
    FLOATS,
    I8,
    I32,
    I64,
    LANES,
    SUMS,
    Builder,
    intrinsic,
    own_function,
    vector,
)

_PARTS = 4
"""Registers of a block of 64."""

_LEVELS, _TINY, LOWEST = 127.0, 1e-30, -1e30
_DITHER = [(int(f"{place:06b}"[::-1], 2) + 0.5) / 64 for place in range(LANES * _PARTS)]
"""Added before chances are rounded down, by their place in the block. Small chances, which are many, would be lost
together if each were rounded to the nearest level (docs/LOG.md, 2026-11-25)."""


def _all(number: SupportsFloat) -> Any:
    return FLOATS([float(number)] * LANES)


class _Vectors(Builder):
    """Shorthands for vectors of floats."""

    def larger(self, x: Any, y: Any) -> Any:
        return self.b.select(self.b.fcmp_ordered(">", x, y), x, y)

    def fold(self, parts: Sequence[Any], join: Callable[[Any, Any], Any]) -> Any:
        """Join four vectors to one number, in a fixed order."""
        whole = join(join(parts[0], parts[1]), join(parts[2], parts[3]))
        for half in (8, 4, 2, 1):
            lanes = SUMS([(lane + half) % LANES for lane in range(LANES)])
            whole = join(whole, self.b.shuffle_vector(whole, whole, lanes))
        return self.b.extract_element(whole, I32(0))

    def spread(self, number: Any) -> Any:
        """Copy a float to all lanes."""
        nothing = ir.Constant(FLOATS, ir.Undefined)
        return self.b.shuffle_vector(self.b.insert_element(nothing, number, I32(0)), nothing, SUMS([0] * LANES))

    def exp(self, x: Any) -> Any:
        """Exponentiate floats up to 87, by Cephes' series, as `row_kernels.exp` does."""
        x = self.larger(x, _all(-EXP_LIMIT))
        k = self.call("llvm.floor.v16f32", FLOATS, self.fma(x, _all(LOG2_E), _all(0.5)))
        x = self.fma(k, _all(-LN2_LOW), self.fma(k, _all(-LN2_HIGH), x))
        series = _all(EXP_SERIES[0])
        for coefficient in EXP_SERIES[1:]:
            series = self.fma(series, x, _all(coefficient))
        rest = self.fma(self.b.fmul(series, x), x, self.b.fadd(x, _all(1.0)))
        power = self.b.shl(self.b.add(self.b.fptosi(k, SUMS), SUMS([127] * LANES)), SUMS([23] * LANES))
        return self.b.fmul(rest, self.b.bitcast(power, FLOATS))


def _queries(b: Any, args: Any) -> None:
    """Turn the scores of some queries into chances: a loop over them."""
    count, *rest = args
    before, loop, done = b.block, b.append_basic_block(), b.append_basic_block()
    b.branch(loop)
    b.position_at_end(loop)
    query = b.phi(I64)
    _query(b, query, count, *rest)
    another = b.add(query, I64(1))
    b.cbranch(b.icmp_signed("<", another, count), loop, done)
    query.add_incoming(I64(0), before)
    query.add_incoming(another, loop)
    b.position_at_end(done)


def _query(
    b: Any, query: Any, count: Any, scores: Any, factors: Any, low: Any, high: Any, value_scales: Any, top: Any,
    total: Any, levels: Any, begin: Any, change: Any, weight: Any,
) -> None:  # fmt: skip
    """Turn the scores of one query into chances."""
    v = _Vectors(b)
    at = [SUMS([LANES * part + lane for lane in range(LANES)]) for part in range(_PARTS)]
    first, end = (v.everywhere(b.trunc(number, I32)) for number in (low, high))
    seen = [b.and_(b.icmp_signed(">=", place, first), b.icmp_signed("<", place, end)) for place in at]
    factor, own_scores = v.spread(v.load(factors, query, 4, F32)), b.mul(query, I64(_PARTS))
    own = [b.fmul(v.load(scores, v.plus(own_scores, part), 64, FLOATS), factor) for part in range(_PARTS)]
    own = [b.select(mask, x, _all(LOWEST)) for mask, x in zip(seen, own, strict=True)]

    before = v.load(top, query, 4, F32)
    best = v.larger(before, v.fold(own, v.larger))
    b.store(best, v.pointer(top, query, 4, F32), align=4)
    best = v.spread(best)
    own = [b.select(mask, v.exp(b.fsub(x, best)), _all(0.0)) for mask, x in zip(seen, own, strict=True)]
    shrunk = b.extract_element(v.exp(b.fsub(v.spread(before), best)), I32(0))
    b.store(shrunk, v.pointer(change, query, 4, F32), align=4)
    summed = b.fadd(b.fmul(v.load(total, query, 4, F32), shrunk), v.fold(own, b.fadd))
    b.store(summed, v.pointer(total, query, 4, F32), align=4)

    own = [b.fmul(x, v.load(value_scales, I64(part), 64, FLOATS)) for part, x in enumerate(own)]
    own = [b.select(mask, x, _all(0.0)) for mask, x in zip(seen, own, strict=True)]  # zero times a stray NaN is NaN
    largest = v.larger(v.fold(own, v.larger), F32(_TINY))
    b.store(b.fdiv(largest, F32(_LEVELS)), v.pointer(weight, query, 4, F32), align=4)
    grow, counts = v.spread(b.fdiv(F32(_LEVELS), largest)), list[Any]()
    for part, x in enumerate(own):
        dither = FLOATS(_DITHER[LANES * part : LANES * (part + 1)])
        rounded = b.fptosi(v.fma(x, grow, dither), SUMS)  # none is negative: this rounds down
        counts.append(rounded)
        fours = b.bitcast(b.trunc(rounded, vector(I8, LANES)), vector(I32, LANES // 4))
        for i in range(LANES // 4):
            place = b.add(b.mul(count, I64(part * LANES // 4 + i)), query)
            b.store(b.extract_element(fours, I32(i)), v.pointer(levels, place, 4, I32), align=4)
    start = b.mul(v.fold(counts, b.add), I32(-BYTE_OFFSET))
    b.store(start, v.pointer(begin, query, 4, I32), align=4)


@intrinsic
def chances(
    context: Any, count: Any, scores: Any, factors: Any, low: Any, high: Any, value_scales: Any, top: Any,
    total: Any, levels: Any, begin: Any, change: Any, weight: Any,
) -> Any:  # fmt: skip
    """Turn a block's scores into levels of chances, and bring the softmax of each query up to date.

    All arguments are integers; arrays are given by their address.

    Args:
        context: numba's.
        count: number of queries.
        scores: float32 [count, 64].
        factors: float32 [count], what scores are multiplied with.
        low: first place of the block that is seen.
        high: the place after the last that is seen.
        value_scales: float32 [64], a level of each of the block's values.
        top: float32 [count], the largest score so far.
        total: float32 [count], the sum of exponentials, relative to it.
        levels: int8 [16, count, 4], output: 127 levels of the largest chance, weighted by its value's scale.
        begin: int32 [count], output: starts of the sums of the levels' products.
        change: float32 [count], output: factor for what was summed before.
        weight: float32 [count], output: value of a level.
    """

    def generate(context: Any, b: Any, signature: Any, args: Any) -> Any:
        b.call(own_function(b.module, "chances", [I64] * 12, _queries), args)
        return context.get_dummy_value()

    return types.void(*(types.int64,) * 12), generate
