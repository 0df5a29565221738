"""Our attention, registered with transformers under the name "card": each step brings its own plan of what rows see."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from torch import Tensor, nn
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface

from langchain_card.runtime.rows import Heads

ATTENTION_NAME = "card"


class StepPlan(Protocol):
    """Where the rows of one forward pass go and what they see; passed through the model as a keyword argument."""

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, heads: Heads) -> Tensor:
        """Writes the rows' keys and values to the pool and attends.

        Args:
            layer: number of the model's layer.
            query: [1, heads, rows, head_dim].
            key: [1, kv_heads, rows, head_dim].
            value: likewise.
            heads: what the layer wants.

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
    """What the model's attention layers call; no mask is taken, and no weights are returned."""
    layer: int = module.layer_idx  # type: ignore[assignment]
    return step.attend(layer, query, key, value, Heads(scaling, sliding_window, softcap)), None


def register(name: str, attention: Callable[..., tuple[Tensor, None]]) -> None:
    """Makes a function an attention implementation of transformers; masks are ours, so none are built there."""
    AttentionInterface.register(name, attention)
    AttentionMaskInterface.register(name, lambda *args, **kwargs: None)


register(ATTENTION_NAME, card_attention)
