"""`EagleHead`: drafts one token after the other (EAGLE-3, arXiv 2503.01840).

Beyond the first candidate the head reads its own output in place of the target's states.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch.nn.functional as F
from torch import Tensor

from langchain_card.heads.causal import CausalPlan
from langchain_card.heads.model import HeadModel


class EagleHead(HeadModel):
    """An autoregressive head."""

    kind = "eagle"

    def replay(self, token_ids: Tensor, positions: Tensor, features: Tensor, steps: int) -> Iterator[Tensor]:
        """Yield scores as `HeadModel` demands: each step reads the outputs of the one before."""
        plan = CausalPlan(positions)
        for _ in range(steps):
            output = self(token_ids[None], positions[None], features[None], step=plan).logits[0]
            yield self.logits(output)
            features = F.pad(output[:-1], (0, 0, 1, 0))
