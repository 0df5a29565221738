"""The inner loop of `block_attention`'s products: a tile of keys or values times several rows, in LLVM's operations.

A tile is 32 outputs: slots of keys, or features of values. 64 bytes of it, of 16 outputs and 4 features, are multiplied
with the same 4 features of a row in every lane. The bytes have an offset, for which each row's sums start lower.
"""

from __future__ import annotations

import functools
from typing import Any

from numba import types

from langchain_card.runtime.cpu.vectors import (
    BYTES,
    FLOATS,
    I32,
    I64,
    LANES,
    SUMS,
    Builder,
    close_phi,
    instructions,
    intrinsic,
    own_function,
)

TILE = 32

MAX_HEADS = 8 if instructions() == "avx512vnni" else 2
"""Heads that share a tile of keys or values while it lies in a register."""

BYTE_OFFSET = 128
"""Constant that is added to stored bytes."""


def _write(num_rows: int, b: Any, args: Any) -> None:
    """Multiply `num_rows` rows with a tile: a loop over groups around a loop over their turns."""
    levels, begin, stored, scales, groups, turns, out, length = args
    k = Builder(b)
    places = [(n, t) for n in range(num_rows) for t in range(2)]
    before, next_group, next_turn, group_done, done = b.block, *(b.append_basic_block() for _ in range(4))
    b.branch(next_group)

    b.position_at_end(next_group)
    group, totals = b.phi(I64), [b.phi(FLOATS) for _ in places]
    starts = [k.everywhere(k.load(begin, b.add(b.mul(I64(n), groups), group), 4, I32)) for n in range(num_rows)]
    b.branch(next_turn)

    b.position_at_end(next_turn)
    turn, sums = b.phi(I64), [b.phi(SUMS) for _ in places]
    at = b.add(b.mul(group, turns), turn)
    stored_bytes = [k.load(stored, k.plus(k.times(at, 2), t), 64, BYTES) for t in range(2)]
    more = list(sums)
    for n in range(num_rows):
        four = b.bitcast(k.everywhere(k.load(levels, k.plus(k.times(at, num_rows), n), 4, I32)), BYTES)
        for t in range(2):
            more[2 * n + t] = k.dot_bytes(more[2 * n + t], stored_bytes[t], four)
    another_turn = k.plus(turn, 1)
    b.cbranch(b.icmp_signed("<", another_turn, turns), next_turn, group_done)

    b.position_at_end(group_done)
    factors = [k.load(scales, k.plus(k.times(group, 2), t), 64, FLOATS) for t in range(2)]
    grown = [
        k.fma(b.sitofp(found, FLOATS), factors[t], total)
        for (_, t), found, total in zip(places, more, totals, strict=True)
    ]
    another_group = k.plus(group, 1)
    b.cbranch(b.icmp_signed("<", another_group, groups), next_group, done)

    b.position_at_end(done)
    for (n, t), total in zip(places, grown, strict=True):
        b.store(total, k.pointer(out, k.plus(k.times(length, n), LANES * t), 4, FLOATS), align=1)

    close_phi(group, before, another_group, group_done)
    close_phi(turn, next_group, another_turn, next_turn)
    for i, (n, _) in enumerate(places):
        close_phi(totals[i], before, grown[i], group_done)
        close_phi(sums[i], next_group, more[i], next_turn, first=starts[n])


@intrinsic
def kv_tile(
    context: Any, rows: Any, levels: Any, begin: Any, stored: Any, scales: Any, groups: Any, turns: Any, out: Any,
    length: Any,
) -> Any:  # fmt: skip
    """Multiply up to `MAX_HEADS` rows with a tile.

    All arguments are integers: the number of rows; the addresses of levels [turns, rows, 4], starts of sums
    [rows, groups], stored bytes, and scales [groups, 32]; the number of groups, and of turns in each; the address of
    the output, and the length of its rows.
    """

    def generate(context: Any, b: Any, signature: Any, args: Any) -> Any:
        end = b.append_basic_block()
        ways = b.switch(args[0], end)
        for num_rows in range(1, MAX_HEADS + 1):
            way = b.append_basic_block()
            ways.add_case(I64(num_rows), way)
            b.position_at_end(way)
            b.call(own_function(b.module, f"kv.{num_rows}", [I64] * 8, functools.partial(_write, num_rows)), args[1:])
            b.branch(end)
        b.position_at_end(end)
        return context.get_dummy_value()

    return types.void(*(types.int64,) * 9), generate
