"""A model run along a given text: its logits there, and the models and vocabularies that this needs."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

from torch import Tensor

from langchain_card.errors import InvalidInputError
from langchain_card.models.loader import ModelSpec, Pair, acquire_model, release_model
from langchain_card.runtime.runner import ModelRunner


def logits_along(model: ModelRunner, prompt_ids: Sequence[int], token_ids: Sequence[int]) -> Iterator[Tensor]:
    """Yield the model's logits [rows, vocabulary] before each of `token_ids`, some rows at a time."""
    cache = model.open()
    try:
        model.prefill(cache, prompt_ids[:-1])
        yield from model.follow(cache, [prompt_ids[-1], *token_ids[:-1]])
    finally:
        model.close(cache)


@contextlib.contextmanager
def shared_model(spec: ModelSpec) -> Iterator[Any]:
    """Acquire the loaded model that all engines of this process share."""
    model = acquire_model(spec)
    try:
        yield model
    finally:
        release_model(spec)


def check_same_vocabulary(pair: Pair) -> None:
    """Refuse drafts whose vocabulary is not the target's, because predictions are compared token by token.

    Raises:
        InvalidInputError: a draft or a level of the stack has another vocabulary.
    """
    for spec, vocabulary in zip((pair.draft, *pair.stack), pair.vocabularies):  # noqa: B905 - none without a draft
        if spec is not None and vocabulary is not None:
            limit = f"has another vocabulary than {pair.target.name}, so that it cannot be compared token by token"
            hint = "langchain-card chat --demo shows what this pair gains"
            raise InvalidInputError("draft_model", spec.name, limit, hint)
