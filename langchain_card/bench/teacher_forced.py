"""Logits of a draft along a given text."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

from torch import Tensor

from langchain_card.engine.engine import Engine
from langchain_card.errors import InvalidInputError
from langchain_card.models.loader import ModelSpec, Pair, acquire_model, release_model
from langchain_card.runtime.runner import ModelRunner


def along(draft: ModelRunner, prompt_ids: Sequence[int], token_ids: Sequence[int]) -> Iterator[Tensor]:
    """The draft's logits [rows, vocabulary] before each of `token_ids`, some rows at a time."""
    cache = draft.open()
    try:
        draft.prefill(cache, prompt_ids[:-1])
        yield from draft.follow(cache, [prompt_ids[-1], *token_ids[:-1]])
    finally:
        draft.close(cache)


@contextlib.contextmanager
def borrowed(spec: ModelSpec) -> Iterator[Any]:
    """The model that engines of this process share."""
    model = acquire_model(spec)
    try:
        yield model
    finally:
        release_model(spec)


def check_alike(pair: Pair) -> None:
    """Refuses drafts with a vocabulary of their own: what they say is compared token by token.

    Raises:
        InvalidInputError: there is one.
    """
    for spec, vocabulary in zip((pair.draft, *pair.stack), pair.vocabularies):  # noqa: B905 - none without a draft
        if spec is not None and vocabulary is not None:
            limit = f"has another vocabulary than {pair.target.name}, so that it cannot be compared token by token"
            hint = "langchain-card chat --demo shows what this pair gains"
            raise InvalidInputError("draft_model", spec.name, limit, hint)


def asked_as_user(engine: Engine, text: str) -> tuple[int, ...]:
    """The prompt of a conversation that begins with this text."""
    message = [{"role": "user", "content": text}]
    return tuple(engine.tokenizer.apply_chat_template(message, add_generation_prompt=True, return_dict=False))
