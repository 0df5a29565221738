"""Tiny random models on disk, with a byte tokenizer, and drafts that match them partly."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers as t
from transformers import AutoModelForCausalLM

from langchain_card.testing.tokenizer import byte_tokenizer

VOCAB = 320
_SHAPE: dict[str, Any] = {
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
    "llama": lambda: t.LlamaConfig(**_SHAPE, tie_word_embeddings=True),
    "qwen2": lambda: t.Qwen2Config(**_SHAPE),
    "qwen3": lambda: t.Qwen3Config(**_SHAPE, head_dim=32),
    "mistral": lambda: t.MistralConfig(**_SHAPE, sliding_window=48),
    # Capped scores and logits, (1 + w) norms, every other layer sliding.
    "gemma2": lambda: t.Gemma2Config(**_SHAPE, **_GEMMA, attn_logit_softcapping=5.0, final_logit_softcapping=10.0),
    # Norms of queries and keys, two rotary bases.
    "gemma3": lambda: t.Gemma3TextConfig(**_SHAPE, **_GEMMA, layer_types=["sliding_attention", "full_attention"]),
}

_EXPERTS: dict[str, Any] = {"num_experts_per_tok": 2, "tie_word_embeddings": False}
_WINDOW: dict[str, Any] = {"sliding_window": 8}
_SLIDES: dict[str, Any] = {**_WINDOW, "layer_types": ["sliding_attention", "full_attention"]}
FAMILIES: dict[str, Any] = {
    "llama": lambda: t.LlamaConfig(**_SHAPE),
    "qwen2": lambda: t.Qwen2Config(**_SHAPE, use_sliding_window=True, **_SLIDES),
    "qwen3": lambda: t.Qwen3Config(**_SHAPE, head_dim=32, use_sliding_window=True, **_SLIDES),
    "mistral": lambda: t.MistralConfig(**_SHAPE, **_WINDOW),
    "phi": lambda: t.PhiConfig(**_SHAPE, partial_rotary_factor=0.5),
    "phi3": lambda: t.Phi3Config(**_SHAPE, **_WINDOW, pad_token_id=0),
    "gemma": lambda: t.GemmaConfig(**_SHAPE, head_dim=32),
    "gemma2": lambda: t.Gemma2Config(
        **_SHAPE, **_SLIDES, head_dim=32, query_pre_attn_scalar=24, attn_logit_softcapping=5.0,
        final_logit_softcapping=10.0,
    ),
    "gemma3": lambda: t.Gemma3TextConfig(
        **_SHAPE, **_SLIDES, head_dim=32, query_pre_attn_scalar=24,
        rope_parameters={
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e3},
            "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 4.0},
        },
    ),
    "granite": lambda: t.GraniteConfig(
        **_SHAPE, attention_multiplier=0.2, residual_multiplier=0.5, embedding_multiplier=3.0, logits_scaling=2.0
    ),
    "cohere": lambda: t.CohereConfig(**_SHAPE),
    "cohere2": lambda: t.Cohere2Config(**_SHAPE, **_SLIDES),
    "olmo2": lambda: t.Olmo2Config(**_SHAPE),
    "gpt2": lambda: t.GPT2Config(vocab_size=VOCAB, n_embd=64, n_layer=2, n_head=4, initializer_range=0.15),
    "gpt_neox": lambda: t.GPTNeoXConfig(**{**_SHAPE, "num_key_value_heads": None}),
    "mixtral": lambda: t.MixtralConfig(**{**_SHAPE, **_EXPERTS}, **_WINDOW, num_local_experts=4),
    "qwen2_moe": lambda: t.Qwen2MoeConfig(
        **{**_SHAPE, **_EXPERTS}, num_experts=4, moe_intermediate_size=32, shared_expert_intermediate_size=32
    ),
    "qwen3_moe": lambda: t.Qwen3MoeConfig(
        **{**_SHAPE, **_EXPERTS}, head_dim=32, num_experts=4, moe_intermediate_size=32
    ),
}  # fmt: skip
"""Other forms than those of `CONFIGS`: windows so short that a test's text slides through them, and experts."""


def save(model: Any, folder: Path) -> str:
    model.save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return str(folder)


def make_target(arch: str, folder: Path, seed: int = 0) -> str:
    """A random model in float64, with a tokenizer; never ends by itself."""
    torch.manual_seed(seed)
    return save_random(CONFIGS[arch](), folder)


def save_random(config: Any, folder: Path) -> str:
    """A random model of a config, in float64, with a tokenizer."""
    config.eos_token_id = byte_tokenizer().eos_token_id
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float64)
    model.generation_config.eos_token_id = config.eos_token_id
    return save(model, folder)


def make_draft(target: str, folder: Path, noise: float, seed: int = 1) -> str:
    """The target's weights plus noise, in units of each tensor's own spread: it matches in part."""
    generator = torch.Generator().manual_seed(seed)
    model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter += noise * parameter.std() * torch.randn(parameter.shape, generator=generator)
    return save(model, folder)
