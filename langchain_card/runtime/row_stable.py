"""Row-stable attention, for CPUs.

A row's result has the same bits whatever rows run beside it, in whatever slots its keys lie and whether it is decoded
or read with a text: every row is attended to by itself, over what it sees in order of position (`row_attention`).
"""

from __future__ import annotations

import functools
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

from langchain_card.runtime import row_attention
from langchain_card.runtime.kv_cache import KVPool
from langchain_card.runtime.rows import Heads, Rows

_Numbers: TypeAlias = np.ndarray[Any, np.dtype[np.int64]]

EVERYTHING = 1 << 62
"""The window of a layer that sees all positions."""

SHARED_ROWS = 16
"""Rows from which on they are shared out to several threads."""


@dataclass(frozen=True, slots=True)
class RowStablePlan:
    """What attention needs to know of one forward pass over any rows.

    Attributes:
        pool: the sequences' KV.
        slots: [rows] slot of the pool that each row's key and value go to.
        seen: by each row: `first`, `starts`, `paths` and `ends` of `row_attention.attend`.
        shares: the rows of each thread.
    """

    pool: KVPool
    slots: Tensor
    seen: tuple[_Numbers, _Numbers, _Numbers, _Numbers]
    shares: tuple[_Numbers, ...]

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, heads: Heads) -> Tensor:
        """See `attention.StepPlan`."""
        kv = self.pool.layers[layer]
        kv[0].index_copy_(1, self.slots, key[0].to(kv.dtype))
        kv[1].index_copy_(1, self.slots, value[0].to(kv.dtype))
        q = query[0].transpose(0, 1).to(kv.dtype).contiguous().numpy()
        keys, values = kv.numpy()
        out = np.empty_like(q)
        window = EVERYTHING if heads.window is None else heads.window
        scaling = float(q.shape[2] ** -0.5 if heads.scaling is None else heads.scaling)
        softcap = float(heads.softcap or 0.0)
        first, starts, paths, ends = self.seen

        def attend(rows: _Numbers) -> None:
            row_attention.attend(q, keys, values, first, starts, paths, ends, window, scaling, softcap, rows, out)

        if len(self.shares) == 1:
            attend(self.shares[0])
        else:
            list(_workers(len(self.shares)).map(attend, self.shares))
        return torch.from_numpy(out)[None].to(query.dtype)


def prepare(dtype: torch.dtype) -> None:
    """Compiles what `attend` needs, or reads it from where it was kept: seconds that belong to no step."""
    one, zero = torch.ones(1, 1, 1, dtype=dtype).numpy(), _numbers([0])
    row_attention.attend(one, one, one, zero, zero + 1, _numbers([]), zero, EVERYTHING, 1.0, 0.0, zero, one.copy())


def plan_step(batch: Sequence[Rows]) -> RowStablePlan:
    """Says where the rows of a step go and what they see.

    Args:
        batch: at least one, all of one pool; rows are numbered in their order.
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
    threads = torch.get_num_threads() if len(slots) >= SHARED_ROWS else 1
    shares = tuple(np.arange(share, len(slots), threads) for share in range(threads))
    seen = (_numbers(first), _numbers(starts), _numbers(paths), _numbers(ends))
    return RowStablePlan(batch[0].cache.pool, torch.tensor(slots), seen, shares)


def _numbers(numbers: list[int]) -> _Numbers:
    return np.array(numbers, dtype=np.int64)


@functools.cache
def _workers(count: int) -> ThreadPoolExecutor:
    """Threads that compute on one core each."""
    return ThreadPoolExecutor(count, "card-attention")


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_workers.cache_clear)  # a child has the pools and none of their threads
