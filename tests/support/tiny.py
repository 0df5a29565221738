"""Tiny random models: those that are shipped for the tests of plug-ins, and other families."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import transformers as t

from langchain_card.testing.tiny import CONFIGS, SHAPE, VOCAB, make_draft, make_target, save, save_random
from langchain_card.testing.tokenizer import byte_tokenizer

__all__ = [
    "CONFIGS", "FAMILIES", "SHAPE", "VOCAB", "byte_tokenizer", "make_draft", "make_target", "save", "save_random"
]  # fmt: skip

_EXPERTS: dict[str, Any] = {"num_experts_per_tok": 2, "tie_word_embeddings": False}
_WINDOW: dict[str, Any] = {"sliding_window": 8}
_SLIDES: dict[str, Any] = {**_WINDOW, "layer_types": ["sliding_attention", "full_attention"]}
FAMILIES: dict[str, Any] = {
    "llama": lambda: t.LlamaConfig(**SHAPE),
    "qwen2": lambda: t.Qwen2Config(**SHAPE, use_sliding_window=True, **_SLIDES),
    "qwen3": lambda: t.Qwen3Config(**SHAPE, head_dim=32, use_sliding_window=True, **_SLIDES),
    "mistral": lambda: t.MistralConfig(**SHAPE, **_WINDOW),
    "phi": lambda: t.PhiConfig(**SHAPE, partial_rotary_factor=0.5),
    "phi3": lambda: t.Phi3Config(**SHAPE, **_WINDOW, pad_token_id=0),
    "gemma": lambda: t.GemmaConfig(**SHAPE, head_dim=32),
    "gemma2": lambda: t.Gemma2Config(
        **SHAPE, **_SLIDES, head_dim=32, query_pre_attn_scalar=24, attn_logit_softcapping=5.0,
        final_logit_softcapping=10.0,
    ),
    "gemma3": lambda: t.Gemma3TextConfig(
        **SHAPE, **_SLIDES, head_dim=32, query_pre_attn_scalar=24,
        rope_parameters={
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e3},
            "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 4.0},
        },
    ),
    "granite": lambda: t.GraniteConfig(
        **SHAPE, attention_multiplier=0.2, residual_multiplier=0.5, embedding_multiplier=3.0, logits_scaling=2.0
    ),
    "cohere": lambda: t.CohereConfig(**SHAPE),
    "cohere2": lambda: t.Cohere2Config(**SHAPE, **_SLIDES),
    "olmo2": lambda: t.Olmo2Config(**SHAPE),
    "gpt2": lambda: t.GPT2Config(vocab_size=VOCAB, n_embd=64, n_layer=2, n_head=4, initializer_range=0.15),
    "gpt_neox": lambda: t.GPTNeoXConfig(**{**SHAPE, "num_key_value_heads": None}),
    "mixtral": lambda: t.MixtralConfig(**{**SHAPE, **_EXPERTS}, **_WINDOW, num_local_experts=4),
    "qwen2_moe": lambda: t.Qwen2MoeConfig(
        **{**SHAPE, **_EXPERTS}, num_experts=4, moe_intermediate_size=32, shared_expert_intermediate_size=32
    ),
    "qwen3_moe": lambda: t.Qwen3MoeConfig(
        **{**SHAPE, **_EXPERTS}, head_dim=32, num_experts=4, moe_intermediate_size=32
    ),
}  # fmt: skip
"""Other forms than those of `CONFIGS`: windows so short that a test's text slides through them, and experts."""


def tiny_gguf(
    path: Path, architecture: str = "llama", tensors: dict[str, tuple[str, Any]] | None = None, **changes: Any
) -> Path:
    """A GGUF of one layer with all metadata a config needs, and tensors: a format and numbers or blocks of each."""
    writer = gguf.GGUFWriter(path, architecture)
    values = {"block_count": 1, "embedding_length": 8, "feed_forward_length": 16, "context_length": 32, **changes}
    for key, value in values.items():
        add = {str: writer.add_string, float: writer.add_float32}.get(type(value), writer.add_uint32)
        add(f"{architecture}.{key}", value)
    writer.add_head_count(2)
    writer.add_head_count_kv(1)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(["a", "b", "<|im_end|>", "ab"])
    writer.add_token_types([1, 1, 3, 1])
    writer.add_token_merges(["a b"])
    writer.add_eos_token_id(2)
    for name, (kind, data) in (tensors or {"token_embd.weight": ("F32", np.zeros((4, 8), np.float32))}).items():
        writer.add_tensor(name, data, raw_dtype=gguf.GGMLQuantizationType[kind])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
