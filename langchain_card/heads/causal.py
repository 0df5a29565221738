"""`CausalPlan`: attention of a head over a whole text, without KV, for training and for comparisons."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from langchain_card.runtime.rows import AttentionOptions


class CausalPlan:
    """A plan of passes over one text, each a draft step further than the one before.

    In the first pass a row sees the rows up to its own. In pass s (from 0) a row stands for a node that hangs s steps
    below a row of the text: it sees the first pass's rows up to s before it, and of every later pass the node above it.
    """

    def __init__(self) -> None:
        self._keys: dict[int, list[Tensor]] = {}
        self._values: dict[int, list[Tensor]] = {}

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, options: AttentionOptions) -> Tensor:
        """Attend as `attention.StepPlan` demands."""
        keys, values = self._keys.setdefault(layer, []), self._values.setdefault(layer, [])
        keys.append(key)
        values.append(value)
        seen, step = self._seen(query.shape[2], query.device), len(keys) - 1
        mask = torch.cat([seen >= step, *(seen == step - other for other in range(1, step + 1))], dim=1)
        mask[:step, 0] = True  # rows without a node see something, whose result nobody reads
        mixed = F.scaled_dot_product_attention(
            query, torch.cat(keys, dim=2), torch.cat(values, dim=2), mask, scale=options.scaling, enable_gqa=True
        )
        return mixed.transpose(1, 2)

    @staticmethod
    def _seen(rows: int, device: torch.device) -> Tensor:
        """Return [rows, rows] how far each row lies behind each other one."""
        places = torch.arange(rows, device=device)
        return places[:, None] - places
