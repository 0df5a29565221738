"""Heads for tiny models, with weights of several kinds."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from langchain_card.heads.causal import CausalPlan
from langchain_card.heads.folder import KINDS, load_head, save_head
from langchain_card.models.store import ModelStore
from langchain_card.runtime.families import decoder_layers

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


class Reference:
    """A head over whole texts."""

    def __init__(self, target: str, head: str) -> None:
        self.model: Any = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float64)
        self._head = load_head(Path(head), self.model)
        self._states: dict[int, Tensor] = {}
        for number, layer in enumerate(decoder_layers(self.model)):
            layer.register_forward_hook(lambda _module, _inputs, output, number=number: self._take(number, output))

    def _take(self, layer: int, output: Tensor) -> None:
        self._states[layer] = output[0]

    @torch.inference_mode()
    def logits(self, text: Sequence[int], path: Sequence[int]) -> Tensor:
        """Those after drafted tokens, which follow a text: [vocabulary]."""
        self.model(torch.tensor([text]))
        features = self._head.fuse(torch.stack([self._states[layer] for layer in self._head.taps]))[:-1]
        outputs = torch.empty(0, features.shape[1], dtype=features.dtype)
        tokens = [*text[1:]]
        for drafted in (None, *([] if self._head.num_slots else path)):
            if drafted is not None:
                tokens, features = [*tokens, drafted], torch.cat([features, outputs[-1:]])
            positions = torch.arange(len(tokens))
            plan = CausalPlan(positions)
            outputs = self._head(torch.tensor([tokens]), positions[None], features[None], step=plan).logits[0]
        if not self._head.num_slots:
            return self._head.spread(self._head.logits(outputs[-1:]))[0]
        if len(path) >= self._head.num_slots:
            return torch.full((self.model.config.vocab_size,), -torch.inf, dtype=outputs.dtype)
        slot, before = self._head.slots(outputs[-1:])[0, len(path)], torch.tensor([path[-1] if path else text[-1]])
        return self._head.spread(self._head.slot_logits(slot[None], before))[0]
