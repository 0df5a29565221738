"""Row-stable attention for CPUs.

A row's result has the same bits whatever rows run beside it, wherever its keys lie, and whether it is decoded or read
with a text: every row attends alone, over the positions that it sees, in order (`row_attention`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from langchain_card.runtime.cpu import row_attention, row_layers
from langchain_card.runtime.cpu.compiled import Slots, cores
from langchain_card.runtime.cpu.row_layers import Stack
from langchain_card.runtime.kv_cache import KVPool
from langchain_card.runtime.rows import AttentionOptions, Rows

EVERYTHING = 1 << 62
"""Window of a layer that sees all positions."""


@dataclass(frozen=True, slots=True)
class RowStablePlan:
    """A plan of one forward pass over any rows.

    Attributes:
        pool: the sequences' KV.
        seen: where the rows go and what they see.
    """

    pool: KVPool
    seen: row_attention.Seen

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, options: AttentionOptions) -> Tensor:
        """Attend as `attention.StepPlan` demands."""
        kv = self.pool.layers[layer]
        q, k, v = (x[0].transpose(0, 1).to(kv.dtype).contiguous().numpy() for x in (query, key, value))
        with cores() as threads:
            out = row_attention.attend(q, k, v, kv.numpy(), self.seen, kernel_heads(options, q.shape[2]), threads)
        return torch.from_numpy(out)[None].to(query.dtype)

    def decode(self, stack: Stack, hidden: Tensor, cos: Tensor, sin: Tensor) -> None:
        """Run all layers in one call.

        Args:
            stack: the model's layers.
            hidden: [1, rows, features]; replaced by the output.
            cos: [1, rows, head_dim], cosines of the rows' positions.
            sin: [1, rows, head_dim], sines of the rows' positions.
        """
        with cores() as threads:
            row_layers.decode(
                hidden[0].numpy(), stack, cos[0].numpy(), sin[0].numpy(), self.pool.block.numpy(), self.seen, threads
            )


def kernel_heads(options: AttentionOptions, head_dim: int) -> row_attention.Heads:
    """Return a layer's options of attention as numbers for the kernel."""
    return row_attention.Heads(
        EVERYTHING if options.window is None else options.window,
        float(head_dim**-0.5 if options.scaling is None else options.scaling),
        float(options.softcap or 0.0),
    )


def prepare(dtype: torch.dtype) -> None:
    """Compile what `attend` needs, or load it from numba's cache; this takes seconds that no step should spend."""
    one, zero = torch.ones(1, 1, 1, dtype=dtype).numpy(), _numbers([0])
    seen = row_attention.Seen(zero, zero, zero + 1, _numbers([]), zero)
    heads = kernel_heads(AttentionOptions(None, None, None), 1)
    with cores() as threads:
        row_attention.attend(one, one, one, one[None].repeat(2, 0), seen, heads, threads)


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
