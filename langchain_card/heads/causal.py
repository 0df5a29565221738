"""`CausalPlan`: attention of a head over whole texts, without KV, for training and for comparisons."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from langchain_card.runtime.rows import AttentionOptions


class CausalPlan:
    """A plan of passes over texts, each a draft step further than the one before.

    In the first pass a row sees its text up to itself. In pass s (from 0) a row stands for a node that hangs s steps
    below a row of the text: it sees the first pass's rows up to s before it, and of every later pass the node above it.

    Args:
        positions: [rows] places in their texts, which follow each other.
    """

    def __init__(self, positions: Tensor) -> None:
        self._keys: dict[int, list[Tensor]] = {}
        self._values: dict[int, list[Tensor]] = {}
        self._positions, texts = positions, (positions == 0).cumsum(dim=0)
        behind = positions[:, None] - positions
        self._behind = behind.where(texts[:, None] == texts, -1)

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, options: AttentionOptions) -> Tensor:
        """Attend as `attention.StepPlan` demands."""
        keys, values = self._keys.setdefault(layer, []), self._values.setdefault(layer, [])
        keys.append(key)
        values.append(value)
        behind, step = self._behind, len(keys) - 1
        mask = torch.cat([behind >= step, *(behind == step - other for other in range(1, step + 1))], dim=1)
        mask[:, 0] |= self._positions < step  # rows without a node see something, whose result nobody reads
        mixed = F.scaled_dot_product_attention(
            query, torch.cat(keys, dim=2), torch.cat(values, dim=2), mask, scale=options.scaling, enable_gqa=True
        )
        return mixed.transpose(1, 2)
