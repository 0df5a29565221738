"""Row-stable attention for CPUs.

A row's result has the same bits whatever rows run beside it, wherever its keys lie, and whether it is decoded or read
with a text: it sums over the positions that it sees in their order (`row_attention`), or over fixed blocks of them
(`block_attention`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from langchain_card.runtime.cpu import block_attention, row_attention, row_layers
from langchain_card.runtime.cpu.compiled import Slots
from langchain_card.runtime.cpu.integer_kv import Blocks, IntegerKV, of_layer
from langchain_card.runtime.cpu.low_rank import LayerAdapters
from langchain_card.runtime.cpu.row_layers import Stack
from langchain_card.runtime.cpu.team import cores
from langchain_card.runtime.kv_cache import KVPool, TensorKV
from langchain_card.runtime.rows import AttentionOptions, Rows
from langchain_card.runtime.taps import Taps

EVERYTHING = 1 << 62
"""Window of a layer that sees all positions."""

NOT_TAPPED = np.empty(0, np.int64), np.empty((0, 0, 0), np.float32)
"""Layers that are tapped and room for their states, in a pass without taps."""


@dataclass(frozen=True, slots=True)
class RowStablePlan:
    """A plan of one forward pass over any rows.

    Attributes:
        pool: the sequences' KV.
        seen: where the rows go and what they see.
    """

    pool: KVPool[TensorKV] | KVPool[IntegerKV]
    seen: row_attention.Seen

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, options: AttentionOptions) -> Tensor:
        """Attend as `attention.StepPlan` demands."""
        kv = self.pool.kv
        dtype = torch.float32 if isinstance(kv, IntegerKV) else kv.layers[layer].dtype
        q, k, v = (x[0].transpose(0, 1).to(dtype).contiguous().numpy() for x in (query, key, value))
        heads = kernel_heads(options, q.shape[2])
        with cores() as team:
            if isinstance(kv, IntegerKV):
                out = block_attention.attend(q, k, v, of_layer(kv.blocks, layer), self.seen, heads, team)
            else:
                out = row_attention.attend(q, k, v, kv.layers[layer].numpy(), self.seen, heads, team)
        return torch.from_numpy(out)[None].to(query.dtype)

    def decode(
        self, stack: Stack, adapters: LayerAdapters, hidden: Tensor, cos: Tensor, sin: Tensor, taps: Taps | None
    ) -> None:
        """Run all layers in one call.

        Args:
            stack: the model's layers.
            adapters: of all layers.
            hidden: [1, rows, features]; replaced by the output.
            cos: [1, rows, head_dim], cosines of the rows' positions.
            sin: [1, rows, head_dim], sines of the rows' positions.
            taps: of the pass, if it has any.
        """
        x = hidden[0].numpy()
        tapped, states = NOT_TAPPED if taps is None else (_numbers(taps.layers), taps.room(hidden[0]).numpy())
        with cores() as team:
            row_layers.decode(
                x, stack, adapters, cos[0].numpy(), sin[0].numpy(), arrays(self.pool.kv), self.seen, tapped, states,
                team,
            )  # fmt: skip


def arrays(kv: TensorKV | IntegerKV) -> row_layers.KV:
    """Return a storage's keys and values as the compiled layers take them."""
    if isinstance(kv, IntegerKV):
        return row_layers.KV(np.empty((0, 0, 0, 0, 0), np.float32), kv.blocks)
    bytes_, floats = np.empty((0, 0, 0, 0), np.uint8), np.empty((0, 0, 0, 0), np.float32)
    return row_layers.KV(kv.block.numpy(), Blocks(bytes_, floats, bytes_, floats))


def kernel_heads(options: AttentionOptions, head_dim: int) -> row_attention.Heads:
    """Return a layer's options of attention as numbers for the kernel."""
    return row_attention.Heads(
        EVERYTHING if options.window is None else options.window,
        float(head_dim**-0.5 if options.scaling is None else options.scaling),
        float(options.softcap or 0.0),
    )


def prepare(kv: TensorKV | IntegerKV) -> None:
    """Compile what `attend` needs, or load it from numba's cache; this takes seconds that no step should spend."""
    zero = _numbers([0])
    seen = row_attention.Seen(zero, zero, zero + 1, _numbers([]), zero)
    heads = kernel_heads(AttentionOptions(None, None, None), 1)
    with cores() as team:
        if isinstance(kv, IntegerKV):
            one = np.ones((1, 1, 1), np.float32)
            own = IntegerKV(1, layers=1, kv_heads=1, head_dim=1)
            block_attention.attend(one, one, one, of_layer(own.blocks, 0), seen, heads, team)
        else:
            one = torch.ones(1, 1, 1, dtype=kv.layers[0].dtype).numpy()
            row_attention.attend(one, one, one, one[None].repeat(2, 0), seen, heads, team)


def plan_step(batch: Sequence[Rows]) -> RowStablePlan:
    """Return a plan of where the rows of a step go and what they see.

    Args:
        batch: at least one entry, all of one pool; rows are numbered in their order.
    """
    slots: list[int] = []
    first: list[int] = []
    starts: list[int] = []
    paths: list[int] = []
    ends: list[int] = []
    for part in batch:
        cache = part.cache
        slots += part.slots
        first += [cache.first_position] * len(part.token_ids)
        starts += part.positions_before
        for path in part.paths or ():
            paths += [cache.base + slot for slot in path]
            ends.append(len(paths))
        if part.paths is None:
            ends += [len(paths)] * len(part.token_ids)
    assert min(slots) >= 0 and max(slots) < batch[0].cache.pool.trash, "compiled code checks no bounds"
    return RowStablePlan(batch[0].cache.pool, row_attention.Seen(*map(_numbers, (slots, first, starts, paths, ends))))


def _numbers(numbers: list[int]) -> Slots:
    return np.array(numbers, dtype=np.int64)
