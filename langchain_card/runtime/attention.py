"""Row-stable attention, registered with transformers under the name "card".

A row's result has the same bits whatever rows run beside it and in whatever slots its keys lie: rows go into the batch
dimension, keys are read in order of absolute position, and the number of keys read depends on the row's position
alone (`padded_keys`), so the kernel sees the same shapes for the same row every time, and on one thread: with two,
SDPA's scratch memory of the second is aligned differently, which changes last bits for some shapes.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface

from langchain_card.runtime.kv_cache import KVCache, RowGroup
from langchain_card.runtime.threads import single_threaded

ATTENTION_NAME = "card"
KEY_BLOCK = 128


@dataclass(frozen=True, slots=True)
class StepPlan:
    """What attention needs to know of one forward pass; passed through the model as a keyword argument.

    Attributes:
        cache: the sequence's KV.
        slots: [rows] slot that each row's key and value go to.
        groups: the rows by path; empty for a prefill, whose rows are a causal chain after the committed ones.
    """

    cache: KVCache
    slots: Tensor
    groups: tuple[RowGroup, ...] = ()


def padded_keys(position: int) -> int:
    """Number of keys read for a row at `position`: the next multiple of `KEY_BLOCK`."""
    return (position // KEY_BLOCK + 1) * KEY_BLOCK


def plan_rows(
    cache: KVCache, paths: Sequence[tuple[int, ...]], sliding_window: int | None, dtype: torch.dtype
) -> StepPlan:
    """Groups the rows of a step by path.

    Args:
        cache: the sequence's KV.
        paths: for each row the slots from the first unverified position down to the row's own slot, which is last.
        sliding_window: keys that a sliding layer sees, or None.
        dtype: of the masks.
    """
    device = cache.data.device
    groups: list[RowGroup] = []
    laid_out: tuple[int, ...] = ()
    for path, rows in _rows_by_path(paths):
        shared = _common_prefix(path, laid_out)
        laid_out = path
        tail_start = cache.num_scratch + cache.length + shared if shared < len(path) else None
        tail_slots = torch.tensor(path[shared:], dtype=torch.long, device=device)
        for keys, members in _rows_by_keys(cache.length, paths, rows):
            positions = torch.tensor([cache.length + len(paths[r]) - 1 for r in members], device=device)[:, None]
            index = torch.arange(keys, device=device)[None]
            visible = index <= positions
            windowed = None if sliding_window is None else visible & (index > positions - sliding_window)
            groups.append(
                RowGroup(
                    rows=torch.tensor(members, device=device),
                    tail_start=tail_start,
                    tail_slots=tail_slots,
                    mask=_additive(visible, dtype),
                    sliding_mask=None if windowed is None else _additive(windowed, dtype),
                    keys=keys,
                )
            )
            tail_start = None
    slots = torch.tensor([path[-1] for path in paths], device=device)
    return StepPlan(cache, slots, tuple(groups))


def card_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    step: StepPlan,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Writes the rows' keys and values to the cache and attends.

    Args:
        module: the model's attention layer; its `layer_idx` is used.
        query: [1, heads, rows, head_dim].
        key: [1, kv_heads, rows, head_dim].
        value: likewise.
        attention_mask: not used; the plan has its own.
        step: where the rows go and what they see.
        scaling: of the scores.
        sliding_window: keys that this layer sees, or None for all.
        softcap: bound that the scores are bent to (Gemma 2, arXiv 2408.00118), or None.

    Returns:
        [1, rows, heads, head_dim] and no weights.
    """
    layer: int = module.layer_idx  # type: ignore[assignment]
    kv = step.cache.data[layer]
    kv[0].index_copy_(1, step.slots, key[0])
    kv[1].index_copy_(1, step.slots, value[0])
    if not step.groups:
        return _prefill_attention(query, kv, step, scaling, sliding_window, softcap), None
    kv_heads, scratch = kv.shape[1], step.cache.num_scratch
    heads, rows, head_dim = query.shape[1:]
    q = query[0].transpose(0, 1).reshape(rows, kv_heads, heads // kv_heads, head_dim)
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    for group in step.groups:
        if group.tail_start is not None:
            end = group.tail_start + len(group.tail_slots)
            kv[:, :, group.tail_start : end] = kv.index_select(2, group.tail_slots)
        n, whole = len(group.rows), len(step.groups) == 1
        k, v = kv[:, :, scratch : scratch + group.keys].unsqueeze(1).expand(-1, n, -1, -1, -1)
        mask = group.mask if sliding_window is None else group.sliding_mask
        assert mask is not None
        with (
            single_threaded() if query.device.type == "cpu" else nullcontext()
        ):  # split between threads, a row's bits depend on how many rows there are
            attended = _attend(q if whole else q[group.rows], k, v, mask.expand(n, 1, q.shape[2], -1), scaling, softcap)
        out = attended if whole else out.index_copy_(0, group.rows, attended)
    return out.flatten(1, 2)[None], None


def _attend(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scaling: float | None, softcap: float | None
) -> Tensor:
    """SDPA, or, where the scores are capped, what transformers' eager attention does; `mask` is added to the scores."""
    if softcap is None:
        return F.scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=scaling)
    q, k, v = (x.flatten(0, 1) for x in (query, key, value))  # bmm: matmul would choose its way by the number of rows
    scores = torch.bmm(q, k.transpose(1, 2)) * (q.shape[-1] ** -0.5 if scaling is None else scaling)
    scores = torch.tanh(scores / softcap).view(*query.shape[:-1], -1) * softcap + mask
    weights = scores.softmax(dim=-1, dtype=torch.float32).to(q.dtype)
    return torch.bmm(weights.flatten(0, 1), v).view(query.shape)


def _prefill_attention(
    query: Tensor,
    kv: Tensor,
    step: StepPlan,
    scaling: float | None,
    sliding_window: int | None,
    softcap: float | None,
) -> Tensor:
    first, rows = step.cache.length, query.shape[2]
    start = step.cache.num_scratch
    k, v = kv[:, None, :, start : start + first + rows]
    position = torch.arange(first, first + rows, device=query.device)[:, None]
    index = torch.arange(first + rows, device=query.device)[None]
    visible = index <= position
    if sliding_window is not None:
        visible &= index > position - sliding_window
    if softcap is None:
        out = F.scaled_dot_product_attention(query, k, v, attn_mask=visible, scale=scaling, enable_gqa=True)
    else:
        k, v = (x.repeat_interleave(query.shape[1] // x.shape[1], dim=1) for x in (k, v))
        out = _attend(query, k, v, _additive(visible, query.dtype)[:, 0, 0], scaling, softcap)
    return out.transpose(1, 2)


def _rows_by_path(paths: Sequence[tuple[int, ...]]) -> list[tuple[tuple[int, ...], list[int]]]:
    """Each row under the longest path of this step that begins with its own."""
    groups: list[tuple[tuple[int, ...], list[int]]] = []
    for row in sorted(range(len(paths)), key=lambda r: -len(paths[r])):
        path = paths[row]
        for longest, rows in groups:
            if longest[: len(path)] == path:
                rows.append(row)
                break
        else:
            groups.append((path, [row]))
    return groups


def _rows_by_keys(length: int, paths: Sequence[tuple[int, ...]], rows: Sequence[int]) -> list[tuple[int, list[int]]]:
    by_keys: dict[int, list[int]] = {}
    for row in sorted(rows):
        by_keys.setdefault(padded_keys(length + len(paths[row]) - 1), []).append(row)
    return list(by_keys.items())


def _common_prefix(a: tuple[int, ...], b: tuple[int, ...]) -> int:
    for i, (x, y) in enumerate(zip(a, b)):  # noqa: B905
        if x != y:
            return i
    return min(len(a), len(b))


def _additive(visible: Tensor, dtype: torch.dtype) -> Tensor:
    mask = torch.zeros(visible.shape, dtype=dtype, device=visible.device)
    return mask.masked_fill_(~visible, float("-inf"))[:, None, None, :]


def register() -> None:
    """Makes "card" an attention implementation of transformers; masks are ours, so none are built there."""
    AttentionInterface.register(ATTENTION_NAME, card_attention)
    AttentionMaskInterface.register(ATTENTION_NAME, lambda *args, **kwargs: None)


register()
