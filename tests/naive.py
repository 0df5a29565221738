"""The reference for ever: one token at a time over transformers, nothing of ours but the noise."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from langchain_card.core.request import SamplingParams
from langchain_card.runtime.sampling import gumbel_noise


def load(folder: str, dtype: torch.dtype) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation="sdpa").eval()


@torch.inference_mode()
def generate(
    model: Any, prompt_ids: Sequence[int], params: SamplingParams, eos_ids: Sequence[int] = ()
) -> tuple[list[int], list[float]]:
    """Tokens of the answer, and for each the gap between the two largest logits by the logits' range."""
    token_ids, gaps, cache = list(prompt_ids), [], None
    while len(token_ids) < len(prompt_ids) + params.max_tokens:
        new = token_ids if cache is None else token_ids[-1:]
        out = model(input_ids=torch.tensor([new]), past_key_values=cache, use_cache=True, logits_to_keep=1)
        cache, logits = out.past_key_values, out.logits[0, -1]
        if params.temperature > 0:
            noise = gumbel_noise(params.seed, len(token_ids), logits.shape[-1], logits.device)
            logits = logits.double() / params.temperature + noise
        top = logits.topk(2)
        gaps.append(((top.values[0] - top.values[1]) / (logits.max() - logits.min())).item())
        token_ids.append(int(top.indices[0]))
        if token_ids[-1] in eos_ids:
            break
    return token_ids[len(prompt_ids) :], gaps
