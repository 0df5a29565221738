"""Attention over integer keys and values in plain torch: the reference for `runtime.cpu.block_attention`."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from langchain_card.runtime.attention import register

NAME = "integer-kv-reference"
BLOCK_SLOTS = 64


DITHER = torch.tensor([(int(f"{j:06b}"[::-1], 2) + 0.5) / BLOCK_SLOTS for j in range(BLOCK_SLOTS)])


def rotate(x: Tensor) -> Tensor:
    """Rotate each whole block of 64 features by a Hadamard matrix, its own inverse; other vectors stay."""
    if x.shape[-1] % 64:
        return x
    signs = [[1 - 2 * ((i & j).bit_count() % 2) for j in range(64)] for i in range(64)]
    return (x.reshape(-1, 64) @ (torch.tensor(signs, dtype=x.dtype) / 8)).view(x.shape)


def rounded(x: Tensor, levels: int = 127) -> Tensor:
    """Rotated vectors of heads, rounded to so many levels on either side of zero."""
    x = rotate(x.float())
    level = x.abs().amax(-1, keepdim=True).clamp(min=1e-30) / levels
    return torch.round(x / level) * level


def attend(q: Tensor, k: Tensor, v: Tensor, scaling: float, window: int | None, softcap: float | None) -> Tensor:
    """Attend with the last rows of a text: q [heads, rows, size], k and v [kv_heads, positions, size] -> as q."""
    group, (rows, length) = len(q) // len(k), (q.shape[1], k.shape[1])
    q, k, v = rounded(q), rounded(k, 127 * 257), rounded(v)
    k, v = (x.repeat_interleave(group, 0) for x in (k, v))
    position, seen = torch.arange(length - rows, length)[:, None], torch.arange(length)
    mask = seen <= position
    if window is not None:
        mask &= seen > position - window
    top, total = torch.full((len(q), rows, 1), -1e30), torch.zeros(len(q), rows, 1)
    mixed = torch.zeros(q.shape)
    for block in range(0, length, BLOCK_SLOTS):
        own = slice(block, block + BLOCK_SLOTS)
        scores = q @ k[:, own].transpose(1, 2) * scaling
        if softcap is not None:
            scores = torch.tanh(scores / softcap) * softcap
        scores = scores.masked_fill(~mask[:, own], -math.inf)
        best = torch.maximum(top, scores.amax(-1, keepdim=True))
        change, chances = (top - best).exp(), (scores - best).exp()
        top, total = best, total * change + chances.sum(-1, keepdim=True)
        size = v[:, own].abs().amax(-1)[:, None] / 127  # a level of a value; any share of it rounds alike
        weighted = chances * size
        level = weighted.amax(-1, keepdim=True).clamp(min=1e-30) / 127
        levels = torch.floor(weighted / level + DITHER[: weighted.shape[-1]])
        mixed = mixed * change + (levels * level) @ (v[:, own] / size.transpose(1, 2).clamp(min=1e-30))
    return rotate(mixed / total)


def attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """The same as an attention implementation of transformers, over a cache that drops nothing."""
    factor = query.shape[-1] ** -0.5 if scaling is None else scaling
    out = attend(query[0], key[0], value[0], factor, sliding_window, softcap)
    return out.transpose(0, 1)[None].contiguous(), None


register(NAME, attention)
