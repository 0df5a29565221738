"""The reference for exactness: one token at a time over transformers, which shares only the noise with the engine."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    SuppressTokensLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from langchain_card.core.request import SamplingParams
from langchain_card.runtime.sampling import gumbel_noise

Forward = Callable[[list[int]], Tensor]
"""Maps all tokens so far to the logits [vocabulary] after the last: first the prompt, then one token more a call."""


@dataclass
class PlainAnswer:
    """An answer of the plain loop.

    Attributes:
        prompt_ids: tokens before it.
        params: how its tokens were chosen.
        token_ids: its tokens.
        logits: for each token, [vocabulary].
    """

    prompt_ids: Sequence[int]
    params: SamplingParams
    token_ids: list[int] = field(default_factory=list)
    logits: list[Tensor] = field(default_factory=list)


def load(folder: str, dtype: torch.dtype) -> Any:
    """Load a model of transformers, unchanged."""
    experts = {"experts_implementation": "eager"} if dtype == torch.float64 else {}  # grouped products have no float64
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, **experts).eval()
    assert model.config._attn_implementation in ("sdpa", "eager")  # eager where scores are capped
    return model


def reading(model: Any, cache: Any = None) -> Forward:
    """Return a forward function over transformers' own cache, which the model chooses if none is given."""
    begun = False

    @torch.inference_mode()
    def forward(token_ids: list[int]) -> Tensor:
        nonlocal cache, begun
        new, begun = token_ids[-1:] if begun else token_ids, True
        out = model(input_ids=torch.tensor([new]), past_key_values=cache, use_cache=True, logits_to_keep=1)
        cache = out.past_key_values
        logits: Tensor = out.logits[0, -1]
        return logits

    return forward


@torch.inference_mode()
def process(logits: Tensor, prompt_ids: Sequence[int], output_ids: Sequence[int], params: SamplingParams) -> Tensor:
    """Apply penalties, bias, bans, temperature, top-k, top-p and min-p: [vocabulary] -> float64 [vocabulary]."""
    token_ids, scores = torch.tensor([[*prompt_ids, *output_ids]]), logits.double()[None]
    if params.repetition_penalty != 1:
        scores = RepetitionPenaltyLogitsProcessor(params.repetition_penalty)(token_ids, scores)
    for token in set(output_ids):
        scores[0, token] -= params.presence_penalty + params.frequency_penalty * output_ids.count(token)
    for token, bias in params.logit_bias:
        scores[0, token] += bias
    if params.banned_ids:
        scores = SuppressTokensLogitsProcessor(params.banned_ids)(token_ids, scores)
    warpers = LogitsProcessorList()
    if params.temperature > 0:
        warpers.append(TemperatureLogitsWarper(float(params.temperature)))
        if params.top_k:
            warpers.append(TopKLogitsWarper(params.top_k))
        if params.top_p < 1:
            warpers.append(TopPLogitsWarper(params.top_p))
        if params.min_p:
            warpers.append(MinPLogitsWarper(params.min_p))
    processed: Tensor = warpers(token_ids, scores)[0]
    return processed


def generate(
    forward: Forward, prompt_ids: Sequence[int], params: SamplingParams, eos_ids: Sequence[int] = ()
) -> PlainAnswer:
    """Write one answer, token by token."""
    answer = PlainAnswer(prompt_ids, params)
    while len(answer.token_ids) < params.max_tokens and not set(answer.token_ids[-1:]) & set(eos_ids):
        logits = forward([*prompt_ids, *answer.token_ids])
        answer.token_ids.append(choose(logits, prompt_ids, answer.token_ids, params))
        answer.logits.append(logits)
    return answer


def choose(logits: Tensor, prompt_ids: Sequence[int], output_ids: Sequence[int], params: SamplingParams) -> int:
    """Return the token with the best processed score, after noise at a temperature above 0."""
    scores = process(logits, prompt_ids, output_ids, params)
    if params.temperature > 0:
        scores = scores + gumbel_noise(params.seed, len(prompt_ids) + len(output_ids), len(scores), scores.device)
    return int(scores.argmax())
