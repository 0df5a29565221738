"""Masked attention over a fixed grid of rows, which a CUDA graph can capture.

Every sequence of a step has the same number of rows, some of them padding. All its slots up to the bucket's end are
read (scratch slots and committed positions), and a mask selects those that a row sees. Shapes depend on the bucket
alone, so that a step can be captured once and replayed. Two steps of one bucket do the same arithmetic for a row,
whatever the other rows hold.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from langchain_card.runtime.adapters import NONE
from langchain_card.runtime.kv_cache import GridKV, KVPool, sizes
from langchain_card.runtime.rows import AttentionOptions, Rows

MAX_SCORED_ROWS = 64
"""Largest number of rows per sequence whose scores are computed at once; longer texts go through SDPA."""

MIN_KEYS = 512
"""Smallest number of positions that a step reads."""

MAX_GRAPH_ROWS = 256
"""Largest number of rows of a captured step, all sequences together."""

MAX_GRAPHS = 16
"""Largest number of captured steps of a model: each takes a part of a second to capture."""

WIDTHS = (1, 16, *(1 << n for n in range(6, 24)))
"""Numbers of rows of a sequence: without guesses, with few, with many. Texts have the larger ones."""

FEW = 4
"""Rows of a sequence with few guesses, where 16 of each sequence are more than `MAX_GRAPH_ROWS`."""


class Bucket(NamedTuple):
    """The shape of a step over `seqs` sequences of the pool.

    Attributes:
        seqs: number of sequences.
        width: rows of each.
        keys: positions read of each, in addition to its scratch slots.
        first: index of the first sequence.
    """

    seqs: int
    width: int
    keys: int
    first: int = 0


class Ladder:
    """The buckets of a pool's steps.

    Few positions are worth a graph of their own only where all sequences together read many.

    Args:
        pool: the sequences' KV.

    Attributes:
        captured: those of steps that are worth a graph, at most `MAX_GRAPHS`, with the most rows first.
    """

    def __init__(self, pool: KVPool[GridKV]) -> None:
        self._seqs, self._any_keys = pool.step_sizes, sizes(MIN_KEYS, pool.max_len)
        widest = min(MAX_SCORED_ROWS, _round_up(pool.num_scratch, WIDTHS))
        shapes = [(seqs, width) for seqs in self._seqs for width in _widths(seqs) if width <= widest]
        grids, least = [shape for shape in shapes if math.prod(shape) <= MAX_GRAPH_ROWS], MIN_KEYS
        while True:
            fewest = {shape: max(MIN_KEYS, least // shape[0] // 8 * 8) for shape in grids}  # of 8: for fast kernels
            self._keys = {shape: sizes(keys, pool.max_len) for shape, keys in fewest.items()}
            buckets = [Bucket(*shape, count) for shape, keys in self._keys.items() for count in keys]
            if len(buckets) <= MAX_GRAPHS:
                break
            least *= 2
        self.captured = sorted(buckets, key=lambda bucket: -bucket.seqs * bucket.width)

    def bucket(self, batch: Sequence[Rows]) -> Bucket:
        """Return the smallest bucket for a batch with one entry per sequence."""
        return self._smallest(batch, _round_up(1 + max(rows.cache.index for rows in batch), self._seqs))

    def alone(self, rows: Rows) -> Bucket:
        """Return the smallest bucket for one sequence."""
        return self._smallest([rows], 1)._replace(first=rows.cache.index)

    def _smallest(self, batch: Sequence[Rows], seqs: int) -> Bucket:
        reach, width = 1 + max(max(rows.positions) for rows in batch), _round_up(longest(batch), _widths(seqs))
        return Bucket(seqs, width, _round_up(reach, self._keys.get((seqs, width), self._any_keys)))


class StepInputs:
    """The inputs of a step on the device, filled from the host with one copy of each kind.

    Args:
        pool: the sequences' KV.
        bucket: shape of the step.
        window: number of keys that a sliding layer sees, or None if the model has no such layer.

    Attributes:
        numbers: [6, seqs, width] token ids, positions, slots of the pool, committed positions that each row sees,
            numbers of adapters, and the rows whose logits are wanted, first ones first.
        trees: [1 or 2, seqs, width, num_scratch] scratch slots that each row sees; the second is for sliding layers.
        no_mask: placeholder for the model's mask.
    """

    def __init__(self, pool: KVPool[GridKV], bucket: Bucket, window: int | None) -> None:
        device = pool.kv.layers[0].device
        self._pool, self._first, self._window = pool, bucket.first, window
        shape = (6, bucket.seqs, bucket.width)
        trees = (1 if window is None else 2, bucket.seqs, bucket.width, pool.num_scratch)
        self._numbers = torch.zeros(shape, dtype=torch.int64, pin_memory=device.type == "cuda")
        self._trees = torch.zeros(trees, dtype=torch.bool, pin_memory=device.type == "cuda")
        self.numbers, self.trees = (torch.zeros_like(each, device=device) for each in (self._numbers, self._trees))
        # A mask of four dimensions is taken as ready-made, which skips transformers' own mask building.
        self.no_mask = torch.zeros(1, 1, 1, 1, device=device)
        self._copied = torch.cuda.Event() if device.type == "cuda" else None  # type: ignore[no-untyped-call]

    def fill(self, batch: Sequence[Rows]) -> list[int]:
        """Write a batch; return the grid's rows whose logits are wanted, in the batch's order.

        Padding sees position 0 and goes to trash.
        """
        if self._copied is not None:
            self._copied.synchronize()  # the last batch has left these buffers
        numbers, trees = self._numbers.numpy(), self._trees.numpy()
        numbers[:2], numbers[2], numbers[3], numbers[4] = 0, self._pool.trash, 1, NONE
        trees[:] = False
        width, wanted = numbers.shape[2], list[int]()
        for rows in batch:
            index, count = rows.cache.index - self._first, len(rows.token_ids)
            numbers[:3, index, :count] = rows.token_ids, rows.positions, rows.slots
            numbers[3, index, :count], numbers[4, index, :count] = rows.seen_positions, rows.cache.adapter
            for row, path in enumerate(rows.paths or ()):
                self._see(trees[:, index, row], rows.start, path)
            wanted += (index * width + row for row in rows.wanted)
        numbers[5].flat[: len(wanted)] = wanted
        self.numbers.copy_(self._numbers, non_blocking=True)
        self.trees.copy_(self._trees, non_blocking=True)
        if self._copied is not None:
            self._copied.record(
                torch.cuda.current_stream(self.numbers.device)
            )  # not the first device if that has no layer
        return wanted

    def rows(self, count: int) -> Tensor:
        """Return the first wanted rows, on the device."""
        return self.numbers[5].flatten()[:count]

    def _see(self, seen: np.ndarray, start: int, path: Sequence[int]) -> None:
        """Mark the scratch slots of a row's path; a sliding layer sees the last of them."""
        scratch = [slot for slot in path if slot < self._pool.num_scratch]
        seen[0, scratch] = True
        if self._window is not None:
            seen[1, scratch[-self._window :]] = True


class _Seen(NamedTuple):
    """Places of the rows, [seqs * width * kv_heads], and masks, [seqs, 1, width, num_scratch + keys], on one device."""

    places: Tensor
    mask: Tensor
    sliding_mask: Tensor | None  # for layers with a sliding window


@dataclass(frozen=True, slots=True)
class MaskedPlan:
    """A plan of one forward pass over a grid of rows.

    Attributes:
        pool: the sequences' KV.
        bucket: shape of the grid.
        seen: slots and masks by device.
    """

    pool: KVPool[GridKV]
    bucket: Bucket
    seen: dict[torch.device, _Seen]

    @classmethod
    def of(cls, inputs: StepInputs, pool: KVPool[GridKV], bucket: Bucket, window: int | None) -> MaskedPlan:
        """Build the masks on the device."""
        _, positions, slots, count, *_ = inputs.numbers
        key = torch.arange(bucket.keys, device=count.device)
        committed = key < count[..., None]
        dtype = pool.kv.layers[0].dtype
        full, sliding = _additive(torch.cat([inputs.trees[0], committed], dim=-1), dtype), None
        if window is not None:
            near = committed & (key > positions[..., None] - window)
            sliding = _additive(torch.cat([inputs.trees[1], near], dim=-1), dtype)
        places = pool.kv.places(slots.flatten()).flatten()
        seen = {
            device: _Seen(places.to(device), full.to(device), None if sliding is None else sliding.to(device))
            for device in dict.fromkeys(layer.device for layer in pool.kv.layers)
        }
        return cls(pool, bucket, seen)

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, options: AttentionOptions) -> Tensor:
        """Attend as `attention.StepPlan` demands."""
        kv = self.pool.kv.layers[layer]
        places, mask, sliding_mask = self.seen[kv.device]
        for stored, new in zip(kv, (key, value), strict=True):
            stored.index_copy_(0, places, new[0].transpose(0, 1).reshape(-1, new.shape[-1]))
        if options.window is not None:
            assert sliding_mask is not None, "a layer slides and the model's configuration does not say so"
            mask = sliding_mask
        seqs, first = self.bucket.seqs, self.bucket.first
        seen = self.pool.kv.by_sequence(layer)[:, first : first + seqs, :, : mask.shape[-1]]
        return masked_attention(query, seen, mask, options)


def masked_attention(query: Tensor, kv: Tensor, mask: Tensor, options: AttentionOptions) -> Tensor:
    """Attend with query heads that share a KV head laid out as further rows, so that no key is read twice.

    Args:
        query: [1, heads, seqs * width, head_dim].
        kv: [2, seqs, kv_heads, keys, head_dim].
        mask: [seqs, 1, width, keys], added to the scores.
        options: options of attention; the window is ignored.

    Returns:
        [1, seqs * width, heads, head_dim].
    """
    (seqs, kv_heads), (width, head_dim) = kv.shape[1:3], (mask.shape[2], query.shape[-1])
    group = query.shape[1] // kv_heads
    q = query.view(kv_heads, group, seqs, width, head_dim).permute(2, 0, 1, 3, 4)
    q = q.reshape(seqs, kv_heads, group * width, head_dim)
    key, value = kv
    if width > MAX_SCORED_ROWS and options.softcap is None:
        out = F.scaled_dot_product_attention(
            q, key, value, attn_mask=mask.repeat(1, 1, group, 1), scale=options.scaling
        )
    else:
        scores = torch.matmul(q, key.transpose(2, 3)) * (head_dim**-0.5 if options.scaling is None else options.scaling)
        if options.softcap is not None:
            scores = torch.tanh(scores / options.softcap) * options.softcap
        scores = scores.view(seqs, kv_heads, group, width, -1) + mask[:, :, None]
        chances = scores.softmax(dim=-1, dtype=torch.float32 if options.softcap else _accurate(q.dtype))
        out = torch.matmul(chances.to(q.dtype).flatten(2, 3), value)
    return out.view(seqs, kv_heads, group, width, head_dim).permute(0, 3, 1, 2, 4).reshape(
        1, seqs * width, kv_heads * group, head_dim
    )  # fmt: skip


def _accurate(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def _additive(visible: Tensor, dtype: torch.dtype) -> Tensor:
    """Turn visible keys [seqs, width, keys] into a mask [seqs, 1, width, keys]: 0 if visible, else -inf."""
    return torch.zeros(visible.shape, dtype=dtype, device=visible.device).masked_fill_(~visible, -torch.inf)[:, None]


def longest(batch: Sequence[Rows]) -> int:
    """Return the number of rows of the sequence with the most."""
    return max(len(rows.token_ids) for rows in batch)


def _widths(seqs: int) -> tuple[int, ...]:
    """Return the numbers of rows of each sequence in steps of so many sequences."""
    return WIDTHS if seqs * WIDTHS[1] <= MAX_GRAPH_ROWS else (WIDTHS[0], FEW, *WIDTHS[1:])


def _round_up(count: int, found: Sequence[int]) -> int:
    """Return the smallest of these sizes that holds `count`."""
    return next(size for size in found if size >= count)
