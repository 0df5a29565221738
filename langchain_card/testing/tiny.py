"""Tiny random models on disk, with a byte tokenizer, and drafts that agree with them in part."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers as t
from transformers import AutoModelForCausalLM

from langchain_card.testing.tokenizer import byte_tokenizer

VOCAB = 320
SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 2048,
    "initializer_range": 0.15,
}
_GEMMA: dict[str, Any] = {"head_dim": 32, "query_pre_attn_scalar": 32, "sliding_window": 24}
CONFIGS: dict[str, Any] = {
    "llama": lambda: t.LlamaConfig(**SHAPE, tie_word_embeddings=True),
    "qwen2": lambda: t.Qwen2Config(**SHAPE),
    "qwen3": lambda: t.Qwen3Config(**SHAPE, head_dim=32),
    "mistral": lambda: t.MistralConfig(**SHAPE, sliding_window=48),
    # Capped scores and logits, (1 + w) norms, every other layer sliding.
    "gemma2": lambda: t.Gemma2Config(**SHAPE, **_GEMMA, attn_logit_softcapping=5.0, final_logit_softcapping=10.0),
    # Norms of queries and keys, two rotary bases.
    "gemma3": lambda: t.Gemma3TextConfig(**SHAPE, **_GEMMA, layer_types=["sliding_attention", "full_attention"]),
}


def save(model: Any, folder: Path) -> str:
    """Write a model with the byte tokenizer; return the folder."""
    model.save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return str(folder)


def make_target(arch: str, folder: Path, seed: int = 0) -> str:
    """Make a random model in float64 with a tokenizer; return its folder. Its answers rarely end before a limit."""
    torch.manual_seed(seed)
    return save_random(CONFIGS[arch](), folder)


def save_random(config: Any, folder: Path) -> str:
    """Make a random model of a configuration in float64, with a tokenizer; return its folder."""
    config.eos_token_id = byte_tokenizer().eos_token_id
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float64)
    model.generation_config.eos_token_id = config.eos_token_id
    return save(model, folder)


def make_draft(target: str, folder: Path, noise: float, seed: int = 1) -> str:
    """Make a draft, the target's weights plus noise (in standard deviations of each tensor); return its folder."""
    generator = torch.Generator().manual_seed(seed)
    model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter += noise * parameter.std() * torch.randn(parameter.shape, generator=generator)
    return save(model, folder)
