"""The real engine made to say chosen texts: the tokens that a target likes best are scripted, all else is as ever.

Guide, drafters, caches, parser and streams see a model that wants to say just this; what a grammar forbids it cannot.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from langchain_card.engine import target_worker
from langchain_card.runtime.guide import Guide
from langchain_card.runtime.sampling import Sampler
from tests.support import tiny

Say = Callable[[str], str]
"""From a prompt's text to the answer."""


@contextmanager
def played(say: Say, tokenizer: Any) -> Iterator[None]:
    """Engines say what `say` has for each prompt, and end there; where that is forbidden, whatever is allowed."""

    class Played(Sampler):
        def __init__(self, params: Any, prompt_ids: Sequence[int], guide: Guide | None = None) -> None:
            super().__init__(params, prompt_ids, guide)
            self.idle, self._said = False, ()
            self._answer = (*tokenizer.encode(say(tokenizer.decode(prompt_ids))), tokenizer.eos_token_id)

        def commit(self, token_ids: Sequence[int]) -> None:
            super().commit(token_ids)
            self._said: tuple[int, ...] = (*self._said, *token_ids)

        def scores(self, logits: Tensor, paths: Sequence[Sequence[int]]) -> Tensor:
            liked = torch.zeros_like(logits)
            for row, path in zip(liked, paths, strict=True):
                said = (*self._said, *path)
                follows = said == self._answer[: len(said)] and len(said) < len(self._answer)
                row[self._answer[len(said)] if follows else tokenizer.eos_token_id] = 100.0
            return super().scores(liked, paths)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(target_worker, "Sampler", Played)
        yield


def make_pair(
    folder: Path, template: str = "", tokens: Sequence[str] = (), *, special: bool = False, seed: int = 0
) -> dict[str, Any]:
    """Fields of a random pair with room for tools: its chat template, and what it has for tokens besides bytes."""
    config = tiny.CONFIGS["llama"]()
    config.max_position_embeddings = 16384
    torch.manual_seed(seed)
    target = tiny.save_random(config, folder / "target")
    draft = tiny.make_draft(target, folder / "draft", noise=0.02)
    for path in (target, draft):
        tokenizer = tiny.byte_tokenizer()
        tokenizer.chat_template = template or tokenizer.chat_template
        tokenizer.add_tokens([*tokens], special_tokens=special)
        tokenizer.save_pretrained(path)
    return {"model": target, "draft_model": draft, "dtype": "float64", "max_tokens": 150, "max_model_len": 8192}
