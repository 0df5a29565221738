"""Attention of models: the implementation "card" for transformers, and rotary positions.

Each step passes a plan of what its rows see.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from langchain_card.runtime.rows import AttentionOptions

ATTENTION_NAME = "card"


class StepPlan(Protocol):
    """A plan of one forward pass: where its rows go and what they see. The model passes it on as a keyword argument."""

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, options: AttentionOptions) -> Tensor:
        """Write the rows' keys and values to the pool, and attend.

        Args:
            layer: index of the model's layer.
            query: [1, heads, rows, head_dim].
            key: [1, kv_heads, rows, head_dim].
            value: [1, kv_heads, rows, head_dim].
            options: the layer's options.

        Returns:
            [1, rows, heads, head_dim].
        """


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
    """Attend by the step's plan; the model's layers call this. Masks are ignored, and no weights are returned."""
    layer: int = module.layer_idx  # type: ignore[assignment]
    return step.attend(layer, query, key, value, AttentionOptions(scaling, sliding_window, softcap)), None


class Rotary(nn.Module):
    """Rotary positions of the usual kind (RoFormer, arXiv 2104.09864): no scaling.

    Args:
        head_dim: features of an attention head.
        theta: base of the frequencies.
    """

    def __init__(self, head_dim: int, theta: float) -> None:
        super().__init__()
        self._frequencies: Tensor
        frequencies = 1.0 / theta ** (torch.arange(0, head_dim, 2).float() / head_dim)
        self.register_buffer("_frequencies", frequencies, persistent=False)

    def forward(self, hidden: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        """Return cosines and sines, [1, rows, head_dim] in the type of `hidden`, of positions [1, rows]."""
        angles = position_ids[..., None].float() * self._frequencies
        angles = torch.cat((angles, angles), dim=-1)
        return angles.cos().to(hidden.dtype), angles.sin().to(hidden.dtype)


def register(name: str = ATTENTION_NAME, attention: Callable[..., tuple[Tensor, None]] = card_attention) -> None:
    """Register a function as an attention implementation of transformers, which then builds no masks for it."""
    from transformers import AttentionInterface  # more than a second
    from transformers.masking_utils import AttentionMaskInterface

    AttentionInterface.register(name, attention)
    AttentionMaskInterface.register(name, lambda *args, **kwargs: None)
