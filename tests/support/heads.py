"""Heads for tiny models, with weights of several kinds."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from langchain_card.heads.folder import KINDS, save_head
from langchain_card.models.store import ModelStore

HOW: Mapping[str, Callable[[Tensor], object]] = {
    "untrained": lambda weight: None,
    "random": lambda weight: torch.nn.init.normal_(weight, std=0.15),
    "huge": lambda weight: torch.nn.init.normal_(weight, std=1e200),
    "damaged": lambda weight: torch.nn.init.constant_(weight, math.nan),
}


def write_head(kind: str, how: str, target: str, folder: Path) -> str:
    """Write a head for the model in a folder; return its folder."""
    model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float64)
    torch.manual_seed(1)
    head = KINDS[kind](model).to(torch.float64)
    for weight in head.parameters():
        if weight.requires_grad:
            HOW[how](weight)
    name = {"name": target, "sha256": ModelStore().content_hash(Path(target))}
    return str(save_head(head, folder, name))
