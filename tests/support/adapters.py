"""LoRA adapters of tiny models, as PEFT makes and merges them."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any, NamedTuple

import torch
from transformers import AutoModelForCausalLM

from tests.support import tiny


class Made(NamedTuple):
    """The folders of an adapter, and of its base model with it merged in."""

    adapter: str
    merged: str


def make(base: str, folder: Path, seed: int, **options: Any) -> Made:
    """Make a random adapter of a model; `options` are those of `peft.LoraConfig`."""
    import peft  # seconds

    torch.manual_seed(seed)
    config = peft.LoraConfig(**{"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj"], **options})
    base_model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float64)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # PEFT uses an old name of transformers
        model: Any = peft.get_peft_model(base_model, config, autocast_adapter_dtype=False)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.normal_(std=0.1)
    model.save_pretrained(folder / "adapter")
    return Made(str(folder / "adapter"), tiny.save(model.merge_and_unload(), folder / "merged"))
