"""Keys and values as integers, in blocks of slots that the kernel multiplies where they lie.

A key or a value of one head is rotated and divided by its largest magnitude (`row_kernels.scale_row`), and rounded: a
value to 8 bits, a key to 16. Keys are what scores are made of, and some models add the same large vector to all of
them (docs/LOG.md, 2026-11-25). A key's bytes are multiplied as two groups with scales of their own, the high bytes and
the low ones. Bytes are stored with an offset (`kv_kernel`). So the blocks of a head are matrices:

```
keys    [BLOCK_SLOTS / 32][2 x width / 4][32 slots][4 features]     times a query: its scores with the block's keys
values  [width / 32][BLOCK_SLOTS / 4][32 features][4 slots]         times chances: their mixture of the block's values
```

The width is head_dim, padded to whole tiles of 32.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from langchain_card.runtime.cpu.compiled import Array, Bytes, Levels, Slots, compiled, row_wise
from langchain_card.runtime.cpu.kv_kernel import BYTE_OFFSET, TILE
from langchain_card.runtime.cpu.row_kernels import scale_row
from langchain_card.runtime.cpu.team import Team, cores, together
from langchain_card.runtime.kv_cache import zeros

BLOCK_SLOTS = 64
"""Slots of a block."""

LEVELS = np.float32(127)

_HIGH = 256
_KEY_LEVELS = np.float32(127 * 257)


class Blocks(NamedTuple):
    """Keys and values of all layers; without the first axis those of one layer.

    Attributes:
        keys: uint8 [layers, kv_heads, blocks, BLOCK_SLOTS x 2 x width].
        key_scales: float32 [layers, kv_heads, blocks, BLOCK_SLOTS / 32 x 2 x 32], of high and of low bytes.
        values: uint8 [layers, kv_heads, blocks, BLOCK_SLOTS x width].
        value_scales: float32 [layers, kv_heads, blocks, BLOCK_SLOTS].
    """

    keys: Bytes
    key_scales: Array
    values: Bytes
    value_scales: Array


@compiled()
def of_layer(kv: Blocks, layer: int) -> Blocks:
    """Return one layer's keys and values, as a view."""
    return Blocks(kv.keys[layer], kv.key_scales[layer], kv.values[layer], kv.value_scales[layer])


@compiled()
def of_block(kv: Blocks, head: int, block: int) -> Blocks:
    """Return one block of a layer and a head, as a view."""
    return Blocks(
        kv.keys[head, block], kv.key_scales[head, block], kv.values[head, block], kv.value_scales[head, block]
    )


@compiled()
def empty_block(width: int) -> Blocks:
    """Allocate a block that belongs to no slots."""
    return Blocks(
        np.zeros(BLOCK_SLOTS * 2 * width, np.uint8), np.zeros(BLOCK_SLOTS * 2, np.float32),
        np.zeros(BLOCK_SLOTS * width, np.uint8), np.zeros(BLOCK_SLOTS, np.float32),
    )  # fmt: skip


@row_wise
def round_query(x: Array, row: Array, levels: Levels) -> np.float32:
    """Rotate a vector of a head and round it to 127 levels on either side of zero; return the value of one level.

    Args:
        x: [head_dim].
        row: [head_dim], scratch.
        levels: [width], output; what lies beyond head_dim stays as it is.
    """
    row[:] = x
    scale = scale_row(row)
    for i in range(len(row)):
        levels[i] = np.int8(np.rint(row[i] * LEVELS))
    one_level: np.float32 = scale / LEVELS
    return one_level


@row_wise
def _round_key(x: Array, row: Array, stored: Bytes) -> np.float32:
    """Round a key to bytes [2 x width], high ones first; return the value of one level of the low ones."""
    row[:] = x
    scale, width = scale_row(row), len(stored) // 2
    for i in range(len(row)):
        level = np.int32(np.rint(row[i] * _KEY_LEVELS))
        high = (level + _HIGH // 2) >> 8
        stored[i] = np.uint8(high + BYTE_OFFSET)
        stored[width + i] = np.uint8(level - high * _HIGH + BYTE_OFFSET)
    one_level: np.float32 = scale / _KEY_LEVELS
    return one_level


@compiled()
def write(k: Array, v: Array, kv: Blocks, slots: Slots, begin: int, end: int, h: int) -> None:
    """Write a head's keys and values of the rows from `begin` to `end` to their slots.

    Args:
        k: [rows, kv_heads, head_dim].
        v: [rows, kv_heads, head_dim].
        kv: of one layer.
        slots: [rows].
        begin: first row.
        end: row after the last.
        h: the head.
    """
    width = kv.values.shape[2] // BLOCK_SLOTS
    row, key = np.empty(k.shape[2], np.float32), np.full(2 * width, BYTE_OFFSET, np.uint8)
    levels, value = np.zeros(width, np.int8), np.empty(width, np.uint8)
    for n in range(begin, end):
        own, place = of_block(kv, h, slots[n] // BLOCK_SLOTS), slots[n] % BLOCK_SLOTS
        low = _round_key(k[n, h], row, key)
        _put_key(key, own.keys, place)
        tile = own.key_scales[place // TILE * 2 * TILE + place % TILE :]
        tile[0], tile[TILE] = low * np.float32(_HIGH), low
        own.value_scales[place] = round_query(v[n, h], row, levels)
        for i in range(width):
            value[i] = np.uint8(levels[i] + BYTE_OFFSET)
        _put_value(value, own.values, place)


@compiled()
def _put_key(stored: Bytes, block: Bytes, place: int) -> None:
    """Lay a key's bytes into their place in a block."""
    fours, own = stored.view(np.uint32), block.view(np.uint32)[place // TILE * len(stored) // 4 * TILE + place % TILE :]
    for i in range(len(fours)):
        own[i * TILE] = fours[i]


@compiled()
def _put_value(stored: Bytes, block: Bytes, place: int) -> None:
    """Lay a value's bytes into their place in a block."""
    own = block[place // 4 * TILE * 4 + place % 4 :]
    for i in range(len(stored)):
        own[i // TILE * TILE * BLOCK_SLOTS + i % TILE * 4] = stored[i]


@compiled()
def _move(source: Blocks, place: int, target: Blocks, target_place: int) -> None:
    """Copy what lies in a place of a block to a place of another one."""
    size = len(source.keys) // BLOCK_SLOTS
    fours = source.keys.view(np.uint32)[place // TILE * size // 4 * TILE + place % TILE :]
    own = target.keys.view(np.uint32)[target_place // TILE * size // 4 * TILE + target_place % TILE :]
    for i in range(size // 4):
        own[i * TILE] = fours[i * TILE]
    scales = source.key_scales[place // TILE * 2 * TILE + place % TILE :]
    own_scales = target.key_scales[target_place // TILE * 2 * TILE + target_place % TILE :]
    own_scales[0], own_scales[TILE] = scales[0], scales[TILE]
    bytes_ = source.values[place // 4 * TILE * 4 + place % 4 :]
    own_bytes = target.values[target_place // 4 * TILE * 4 + target_place % 4 :]
    for i in range(len(source.values) // BLOCK_SLOTS):
        at = i // TILE * TILE * BLOCK_SLOTS + i % TILE * 4
        own_bytes[at] = bytes_[at]
    target.value_scales[target_place] = source.value_scales[place]


@compiled()
def _fill(target: Any, source: Any) -> None:
    """Copy an array: numba's own assignment does this number by number."""
    for i in range(len(source)):
        target[i] = source[i]


@compiled()
def gather(kv: Blocks, head: int, first: int, committed: int, path: Slots, out: Blocks) -> None:
    """Build the block of a row's own: its last committed slots, and its path after them.

    Args:
        kv: of one layer.
        head: a head of keys and values.
        first: slot of the block's first position, in whole blocks.
        committed: number of the block's positions that are committed; possibly negative.
        path: slots of the positions after them; those outside the block are left out.
        out: a block.
    """
    if committed > 0:
        source = of_block(kv, head, first // BLOCK_SLOTS)
        _fill(out.keys.view(np.int64), source.keys.view(np.int64))
        _fill(out.key_scales, source.key_scales)
        _fill(out.values.view(np.int64), source.values.view(np.int64))
        _fill(out.value_scales, source.value_scales)
    for i in range(max(0, -committed), min(len(path), BLOCK_SLOTS - committed)):
        _move(of_block(kv, head, path[i] // BLOCK_SLOTS), path[i] % BLOCK_SLOTS, out, committed + i)


@compiled()
def _copy(kv: Blocks, sources: Slots, start: int, thread: int, threads: int) -> None:
    """Copy slots in a thread's layers."""
    for layer in range(thread, len(kv.keys), threads):
        own = of_layer(kv, layer)
        for i in range(len(sources)):
            to = start + i
            for h in range(len(own.keys)):
                source, target = of_block(own, h, sources[i] // BLOCK_SLOTS), of_block(own, h, to // BLOCK_SLOTS)
                _move(source, sources[i] % BLOCK_SLOTS, target, to % BLOCK_SLOTS)


_copy_shares = together(_copy)


@compiled()
def _copy_together(kv: Blocks, sources: Slots, start: int, team: Team) -> None:
    if len(sources) > BLOCK_SLOTS:
        _copy_shares(team, (kv, sources, start))
    else:
        _copy(kv, sources, start, 0, 1)


class IntegerKV:
    """Storage of a pool (`kv_cache.KVStorage`).

    Args:
        num_slots: number of slots.
        layers, kv_heads, head_dim: shape of keys and values.

    Attributes:
        blocks: keys and values of all layers.
    """

    def __init__(self, num_slots: int, *, layers: int, kv_heads: int, head_dim: int) -> None:
        shape, size = (layers, kv_heads, -(-num_slots // BLOCK_SLOTS)), BLOCK_SLOTS * -(-head_dim // TILE) * TILE
        parts = [
            (2 * size, torch.uint8),
            (2 * BLOCK_SLOTS, torch.float32),
            (size, torch.uint8),
            (BLOCK_SLOTS, torch.float32),
        ]
        self.blocks = Blocks(*(zeros((*shape, n), kind, torch.device("cpu")).numpy() for n, kind in parts))

    def copy(self, sources: Sequence[int], start: int) -> None:
        """Copy slots, in all layers, to those from `start` on, in order; none may be read after it was written."""
        slots = np.array(sources, np.int64)
        with cores() as team:
            _copy_together(self.blocks, slots, start, team)

    def read(self, start: int, stop: int) -> dict[str, torch.Tensor]:
        """Return a copy of slots in whole blocks, by the names of `Blocks`, as `KVStorage` demands."""
        own = slice(start // BLOCK_SLOTS, stop // BLOCK_SLOTS)
        return {name: torch.from_numpy(part[:, :, own].copy()) for name, part in self.blocks._asdict().items()}

    def write(self, start: int, parts: Mapping[str, torch.Tensor]) -> None:
        """Write slots in whole blocks as `KVStorage` demands."""
        first = start // BLOCK_SLOTS
        for name, part in self.blocks._asdict().items():
            part[:, :, first : first + parts[name].shape[2]] = parts[name].numpy()
