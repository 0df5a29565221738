"""Records what a draft would have said along the target's own text."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from torch import Tensor

from langchain_card.bench.traces import Trace
from langchain_card.config import EngineConfig
from langchain_card.core.request import SamplingParams
from langchain_card.drafters.tree import NUM_CHILDREN
from langchain_card.engine.engine import Engine
from langchain_card.errors import InvalidInputError
from langchain_card.runtime.loader import ModelSpec, Pair, acquire_model, release_model, resolve
from langchain_card.runtime.runner import ModelRunner


def record(engine: Engine, draft: ModelRunner, prompt_ids: Sequence[int], max_tokens: int) -> Trace:
    """One trace.

    Args:
        engine: writes the text, greedily.
        draft: says what it would have said.
        prompt_ids: of the text.
        max_tokens: of the text.
    """
    token_ids = engine.submit(prompt_ids, SamplingParams(max_tokens=max_tokens)).result().token_ids
    ids: list[tuple[int, ...]] = []
    logs: list[tuple[float, ...]] = []
    for logits in along(draft, prompt_ids, token_ids):
        top = logits.double().log_softmax(dim=-1).topk(NUM_CHILDREN)
        ids += map(tuple, top.indices.tolist())
        logs += map(tuple, top.values.tolist())
    return Trace(tuple(prompt_ids), tuple(token_ids), tuple(ids), tuple(logs))


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


def record_all(
    config: EngineConfig, texts: Sequence[str], max_tokens: int, report: Callable[[int, Trace], None]
) -> list[Trace]:
    """A trace for each text, asked as a user would.

    Args:
        config: a target and a model draft.
        texts: what is asked.
        max_tokens: of each answer.
        report: told the number and the trace of each that is done.
    """
    traces: list[Trace] = []
    pair = resolve(config)
    if pair.draft is None:
        raise InvalidInputError("draft_model", config.draft_model, "must be a model", "prompt lookup needs no record")
    check_alike(pair)
    with Engine(config, pair=pair) as engine, borrowed(pair.draft) as model:
        draft = ModelRunner(model, max_len=engine.max_model_len, num_scratch=16)
        for number, text in enumerate(texts, start=1):
            traces.append(record(engine, draft, asked_as_user(engine, text), max_tokens))
            report(number, traces[-1])
    return traces
