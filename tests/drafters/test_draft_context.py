"""What a draft model reads of a long text (`draft_context`)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from transformers import AutoModelForCausalLM

from langchain_card.core.messages import Proposal
from langchain_card.core.request import Request, SamplingParams
from langchain_card.drafters.model import ModelDrafter
from langchain_card.ports import Budget
from langchain_card.runtime.attention import register
from langchain_card.runtime.runner import ModelRunner
from tests.support import tiny


def candidates(folder: str, text: Sequence[int], context: int | None) -> list[Proposal]:
    """Returns five steps of a draft on a text."""
    register()
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64, attn_implementation="card").eval()
    runner = ModelRunner(model, max_len=256, num_scratch=32)
    drafter = ModelDrafter(runner, vocab_size=tiny.VOCAB, context=context, num_children=4)
    drafter.begin(Request(0, tuple(text), SamplingParams()), ())
    return [proposal for _ in range(5) for proposal in drafter.step([Budget(0)])]


def test_it_reads_the_first_tokens_and_the_end(tiny_pairs: dict[str, tuple[str, str]]) -> None:
    """Cut at multiples of half the context, so that texts that begin alike share what was read."""
    draft, text = tiny_pairs["llama"][1], [*(range(40, 90)), *range(20, 60), *range(90, 190)]

    def shown(text: Sequence[int], context: int | None) -> list[tuple[object, ...]]:
        return [(p.parents, p.token_ids, p.scores) for p in candidates(draft, text, context)]

    assert shown(text, 64) == shown([*text[:4], *text[96:]], None)
    assert shown(text, 64) != shown(text[96:], None)
    assert shown(text, 250) == shown(text, None) != shown(text, 64)
