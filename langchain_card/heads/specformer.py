"""`SpecFormerHead`: several tokens at once, without a tree (SpecFormer, arXiv 2511.20340).

A causal layer over the text gives each row its context. A positional map makes a few slots of it, which see each other
both ways, and slot i stands for the token i + 1 places after the row's own. A bias of low rank by the token before,
which the paper does not have, gives a slot the choice of the slot before it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from langchain_card.heads.causal import CausalPlan
from langchain_card.heads.model import HeadModel

SLOTS = 4
"""Tokens that are drafted at once."""

RANK = 64
"""Rank of the bias by the token before."""


class SpecFormerHead(HeadModel):
    """A head that drafts `SLOTS` tokens at once.

    Args:
        target, ids, intermediate_size: as in `HeadModel`.
    """

    kind = "specformer"
    num_slots = SLOTS

    def __init__(self, target: Any, *, ids: Tensor | None = None, intermediate_size: int | None = None) -> None:
        super().__init__(target, ids=ids, intermediate_size=intermediate_size)
        size, inner, eps = self.config.hidden_size, self.config.intermediate_size, self.config.rms_norm_eps
        self.map_norm, self.slot_norm, self.gate_norm = (nn.RMSNorm(size, eps) for _ in range(3))
        self.map = nn.Linear(size, SLOTS * size)
        self.qkv, self.out = nn.Linear(size, 3 * size, bias=False), nn.Linear(size, size, bias=False)
        self.gate_up, self.down = nn.Linear(size, 2 * inner, bias=False), nn.Linear(inner, size, bias=False)
        self.before = nn.Linear(size, RANK, bias=False)
        self.bias = nn.Linear(RANK, len(self.rows.weight), bias=False)
        with torch.no_grad():  # each slot predicts what the last state stands for
            for added in (self.out, self.down, self.bias):
                added.weight.zero_()
            self.map.weight.copy_(torch.eye(size).repeat(SLOTS, 1))
            self.map.bias.zero_()

    def replay(self, token_ids: Tensor, positions: Tensor, features: Tensor, steps: int) -> Iterator[Tensor]:
        """Yield scores as `HeadModel` demands, one slot a step."""
        outputs = self(token_ids[None], positions[None], features[None], step=CausalPlan(positions)).logits[0]
        slots = self.slots(outputs)
        for slot in range(steps):
            shifted = F.pad(slots[: len(slots) - slot, slot], (0, 0, slot, 0))
            yield self.slot_logits(shifted, token_ids)

    def slots(self, outputs: Tensor) -> Tensor:
        """Return states of the slots as `HeadModel` demands."""
        rows, size = outputs.shape
        x = self.map(self.map_norm(outputs)).view(rows, SLOTS, size).to(outputs.dtype)  # autocast makes less of it
        heads = (rows, SLOTS, 3, self.config.num_attention_heads, size // self.config.num_attention_heads)
        query, key, value = self.qkv(self.slot_norm(x)).view(heads).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(query, key, value)
        x = x + self.out(mixed.transpose(1, 2).reshape(rows, SLOTS, size))
        gate, up = self.gate_up(self.gate_norm(x)).chunk(2, dim=-1)
        found: Tensor = x + self.down(F.silu(gate) * up)
        return found

    def slot_logits(self, slots: Tensor, before: Tensor) -> Tensor:
        """Return logits as `HeadModel` demands."""
        found: Tensor = self.logits(slots) + self.bias(self.before(self._embedding[0](before)))
        return found
