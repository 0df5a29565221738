"""Attention over integer keys and values in blocks of positions, compiled by numba; see `integer_kv`.

Each block of keys and values is read once for all rows of a tile and all heads of their group, while it lies in the
cache. Scores and mixtures are integer products. The softmax runs along the blocks
in the order of their positions (arXiv 2112.05682), and the chances of a block are rounded to levels of their own.

A row's bits depend on its query and on the keys and values that it sees, by their absolute positions: not on the rows
beside it, nor on where its path lies. Positions on the path are gathered into blocks of the row's own.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from langchain_card.runtime.cpu.compiled import Array, Integers, Levels, compiled, row_wise
from langchain_card.runtime.cpu.integer_kv import (
    BLOCK_SLOTS,
    Blocks,
    empty_block,
    gather,
    of_block,
    round_query,
    write,
)
from langchain_card.runtime.cpu.kv_kernel import BYTE_OFFSET, MAX_HEADS, TILE, kv_tile
from langchain_card.runtime.cpu.row_attention import Heads, Seen
from langchain_card.runtime.cpu.row_kernels import rotate_row
from langchain_card.runtime.cpu.softmax_kernel import LOWEST, chances
from langchain_card.runtime.cpu.team import Team, together

ROW_TILE = 16
"""Rows of one sequence that share a block of keys and values while it lies in the cache."""


class _Queries(NamedTuple):
    """Queries as the kernel reads them. The heads of a group are split into parts of at most `MAX_HEADS`.

    Attributes:
        levels: int8 [rows, kv_heads, group x 2 x width]; each part is [2 x width / 4, heads of the part, 4]: the same
            levels for the high bytes of keys and for the low ones.
        begin: int32 [rows, kv_heads, group, 2], starts of the sums.
        scales: float32 [rows, kv_heads, group], value of one level, times the layer's scaling.
    """

    levels: Levels
    begin: Integers
    scales: Array


class _Scratch(NamedTuple):
    """Scratch for a block and the heads of a part.

    Attributes:
        scores: [heads, BLOCK_SLOTS].
        levels: int32 [BLOCK_SLOTS / 4, heads] four levels of chances each.
        begin: int32 [heads] starts of the sums.
        ones: [TILE].
        change: [heads] factor of what was summed before.
        weight: [heads] value of one level.
        product: [heads, width].
        block: a row's own block.
    """

    scores: Array
    levels: Integers
    begin: Integers
    ones: Array
    change: Array
    weight: Array
    product: Array
    block: Blocks


@compiled()
def attend(q: Array, k: Array, v: Array, kv: Blocks, seen: Seen, heads: Heads, team: Team) -> Array:
    """Write rows' keys and values, and attend, each row over the positions that it sees.

    Args:
        q: [rows, heads, head_dim].
        k: [rows, kv_heads, head_dim].
        v: [rows, kv_heads, head_dim].
        kv: of one layer.
        seen: slots of the rows; each sequence's first slot begins a block.
        heads: options of the layer.
        team: of `team.cores`.

    Returns:
        [rows, heads, head_dim].
    """
    rows, kv_heads = k.shape[:2]
    group = q.shape[1] // kv_heads
    width = kv.values.shape[2] // BLOCK_SLOTS
    queries = _Queries(
        np.empty((rows, kv_heads, group * 2 * width), np.int8),
        np.empty((rows, kv_heads, group, 2), np.int32),
        np.empty((rows, kv_heads, group), np.float32),
    )
    out = np.empty_like(q)
    _prepare_together(team, (q, k, v, kv, seen, heads, queries))
    _attend_together(team, (queries, kv, seen, heads, out))
    return out


@compiled()
def _tile_rows(rows: int, kv_heads: int, threads: int) -> int:
    """Return the largest number of rows of a tile that gives each thread one, if there are as many."""
    return max(1, min(ROW_TILE, rows * kv_heads // threads))


@compiled()
def _prepare(
    q: Array, k: Array, v: Array, kv: Blocks, seen: Seen, heads: Heads, queries: _Queries, thread: int, threads: int
) -> None:
    """Write the keys and values of a thread's tiles, and round their queries.

    Neighbouring slots of a head share lines of the cache, so one thread writes them, which also reads them first.
    """
    rows, kv_heads = k.shape[:2]
    unit, largest = 0, _tile_rows(rows, kv_heads, threads)
    for begin in range(0, rows, largest):
        end = min(rows, begin + largest)
        for h in range(kv_heads):
            if unit % threads == thread:
                write(k, v, kv, seen.slots, begin, end, h)
                _round_queries(q, heads, queries, begin, end, h)
            unit += 1


@compiled()
def _round_queries(q: Array, heads: Heads, queries: _Queries, begin: int, end: int, h: int) -> None:
    """Round the queries of rows for a head of keys and values."""
    size, group, length = q.shape[2], queries.scales.shape[2], queries.levels.shape[2]
    row, levels = np.empty(size, np.float32), np.zeros(length // (2 * group), np.int8)
    fours = levels.view(np.int32)
    for n in range(begin, end):
        own = queries.levels[n, h].view(np.int32)
        for part in range(_num_parts(group)):
            first, last = _part(group, part)
            count = last - first
            for g in range(first, last):
                queries.scales[n, h, g] = round_query(q[n, h * group + g], row, levels) * np.float32(heads.scaling)
                total = np.int32(0)
                for i in range(len(levels)):
                    total += np.int32(levels[i])
                queries.begin[n, h, g] = -BYTE_OFFSET * total
                place = own[first * 2 * len(fours) + g - first :]
                for i in range(len(fours)):
                    place[i * count] = place[(len(fours) + i) * count] = fours[i]


@compiled()
def _num_parts(group: int) -> int:
    return (group + MAX_HEADS - 1) // MAX_HEADS


@compiled()
def _part(group: int, part: int) -> tuple[int, int]:
    """Return the first head of a part, and the one after its last."""
    parts = _num_parts(group)
    return group * part // parts, group * (part + 1) // parts


@compiled()
def _attend(queries: _Queries, kv: Blocks, seen: Seen, heads: Heads, out: Array, thread: int, threads: int) -> None:
    """Attend for a thread's share of the tiles of rows, heads of keys and values, and parts of their groups."""
    rows, kv_heads, group = queries.scales.shape
    largest, unit, begin = _tile_rows(rows, kv_heads, threads), 0, 0
    while begin < rows:
        end = begin + 1
        while end < rows and end < begin + largest and seen.first[end] == seen.first[begin]:
            end += 1
        for h in range(kv_heads):
            for part in range(_num_parts(group)):
                if unit % threads == thread:
                    _attend_tile(queries, kv, seen, heads, out, begin, end, h, part)
                unit += 1
        begin = end


@compiled()
def _attend_tile(
    queries: _Queries, kv: Blocks, seen: Seen, heads: Heads, out: Array, begin: int, end: int, h: int, part: int
) -> None:
    """Attend for rows of one sequence, from `begin` to `end`, and a part of a group."""
    group, size, width = queries.scales.shape[2], out.shape[2], kv.values.shape[2] // BLOCK_SLOTS
    first_head, last_head = _part(group, part)
    count, turns, cap = last_head - first_head, width // 4, np.float32(heads.softcap)
    scratch = _Scratch(
        np.empty((count, BLOCK_SLOTS), np.float32),
        np.empty((BLOCK_SLOTS // 4, count), np.int32), np.empty(count, np.int32), np.ones(TILE, np.float32),
        np.empty(count, np.float32), np.empty(count, np.float32), np.empty((count, width), np.float32),
        empty_block(width),
    )  # fmt: skip
    scores, levels, product = scratch.scores.ctypes.data, scratch.levels.ctypes.data, scratch.product.ctypes.data
    starts, ones = scratch.begin.ctypes.data, scratch.ones.ctypes.data
    change, weight = scratch.change.ctypes.data, scratch.weight.ctypes.data
    top = np.full((end - begin, count), np.float32(LOWEST))
    total = np.zeros((end - begin, count), np.float32)
    mixed = np.zeros((end - begin, count, width), np.float32)
    low, high = _extent(seen, heads, begin)
    for n in range(begin + 1, end):
        own_low, own_high = _extent(seen, heads, n)
        low, high = min(low, own_low), max(high, own_high)
    block = seen.first[begin] // BLOCK_SLOTS
    for b in range(low // BLOCK_SLOTS, (high - 1) // BLOCK_SLOTS + 1):
        shared = of_block(kv, h, block + b)
        for n in range(begin, end):
            own_low, own_high = _extent(seen, heads, n)
            own_low, own_high = max(own_low - b * BLOCK_SLOTS, 0), min(own_high - b * BLOCK_SLOTS, BLOCK_SLOTS)
            if own_low >= own_high:
                continue
            own, committed = shared, seen.starts[n] - b * BLOCK_SLOTS
            if committed < own_high:
                path = seen.paths[seen.ends[n - 1] if n else 0 : seen.ends[n]]
                gather(kv, h, (block + b) * BLOCK_SLOTS, committed, path, scratch.block)
                own = scratch.block
            query = queries.levels[n, h, first_head * 2 * width :].ctypes.data
            query_begin = queries.begin[n, h, first_head:].ctypes.data
            keys, key_scales = own.keys.ctypes.data, own.key_scales.ctypes.data
            for t in range(BLOCK_SLOTS // TILE):
                kv_tile(
                    count, query, query_begin, keys + t * TILE * 2 * width, key_scales + t * 2 * TILE * 4, 2, turns,
                    scores + t * TILE * 4, BLOCK_SLOTS,
                )  # fmt: skip
            factors = queries.scales[n, h, first_head:].ctypes.data
            if cap > 0:
                _cap(scratch.scores, queries.scales[n, h, first_head:], cap)
                factors = ones
            chances(
                count, scores, factors, own_low, own_high, own.value_scales.ctypes.data, top[n - begin].ctypes.data,
                total[n - begin].ctypes.data, levels, starts, change, weight,
            )  # fmt: skip
            values = own.values.ctypes.data
            for t in range(width // TILE):
                kv_tile(
                    count, levels, starts, values + t * TILE * BLOCK_SLOTS, ones, 1, BLOCK_SLOTS // 4,
                    product + t * TILE * 4, width,
                )  # fmt: skip
            _add(mixed[n - begin], scratch.change, scratch.product, scratch.weight)
    for n in range(begin, end):
        for g in range(count):
            own = out[n, h * group + first_head + g]
            own[:] = mixed[n - begin, g, :size]
            share = rotate_row(own) / total[n - begin, g]
            for i in range(size):
                own[i] *= share


@compiled()
def _extent(seen: Seen, heads: Heads, n: int) -> tuple[int, int]:
    """Return the first position that a row sees, and the one after its last."""
    total = seen.starts[n] + seen.ends[n] - (seen.ends[n - 1] if n else 0)
    return max(total - heads.window, 0), total


@row_wise
def _cap(scores: Array, factors: Array, cap: np.float32) -> None:
    """Bound scores, and leave them so that they need no factors."""
    for g in range(len(scores)):
        own, factor = scores[g], factors[g]
        for j in range(BLOCK_SLOTS):
            own[j] = np.tanh(own[j] * factor / cap) * cap


@row_wise
def _add(mixed: Array, change: Array, product: Array, weight: Array) -> None:
    """Add a block's mixture."""
    for g in range(len(mixed)):
        own, added, shrink, grow = mixed[g], product[g], change[g], weight[g]
        for i in range(len(own)):
            own[i] = own[i] * shrink + added[i] * grow


_prepare_together, _attend_together = together(_prepare), together(_attend)
