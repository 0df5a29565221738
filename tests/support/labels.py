"""The reference for labels: the weights alone, over a label in one piece."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch

from langchain_card.testing import naive


@functools.lru_cache(maxsize=2)
def _loaded(model: str) -> Any:
    return naive.load(model, torch.float64)


@torch.inference_mode()
def direct(model: str, prompt: Sequence[int], label: Sequence[int], ends: Sequence[int]) -> float:
    """Log-probability of a label, with one of the ends after it, as the whole answer."""
    logits = _loaded(model)(torch.tensor([[*prompt, *label]])).logits[0]
    logs = logits[len(prompt) - 1 :].log_softmax(-1)
    own = logs[:-1].gather(1, torch.tensor(label)[:, None]).sum()
    return float(own + logs[-1, [*ends]].logsumexp(-1))
