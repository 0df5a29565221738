"""`EagleHead`: drafts one token after the other (EAGLE-3, arXiv 2503.01840).

Beyond the first candidate the head reads its own output in place of the target's states.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from langchain_card.heads.causal import CausalPlan
from langchain_card.heads.model import HeadModel
from langchain_card.runtime.families import decoder_layers


class EagleHead(HeadModel):
    """An autoregressive head. It reads states of a low layer, a middle one and the last."""

    kind = "eagle"

    @staticmethod
    def taps_of(target: Any) -> list[int]:
        """Return layers as `HeadModel` demands."""
        last = len(decoder_layers(target)) - 1
        return sorted({min(2, last), last // 2, last})

    def replay(self, token_ids: Tensor, features: Tensor, steps: int) -> Iterator[Tensor]:
        """Yield scores as `HeadModel` demands: each step reads the outputs of the one before."""
        plan, positions = CausalPlan(), torch.arange(len(token_ids), device=token_ids.device)[None]
        for _ in range(steps):
            output = self(token_ids[None], positions, features[None], step=plan).logits[0]
            yield self.logits(output)
            features = F.pad(output[:-1], (0, 0, 1, 0))
