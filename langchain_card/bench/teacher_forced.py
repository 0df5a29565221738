"""A model or a head run along a given text: what it predicts there, and the models and vocabularies that this needs."""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from langchain_card.core.messages import ROOT, Window
from langchain_card.engine.kinds import hash_model
from langchain_card.errors import InvalidInputError
from langchain_card.heads.folder import find_head, load_head
from langchain_card.models.loader import ModelSpec, Pair, acquire_model, release_model
from langchain_card.runtime.heads import HeadRunner, ObservedRows, ObservedWindow
from langchain_card.runtime.rows import Rows
from langchain_card.runtime.runner import ModelRunner
from langchain_card.runtime.taps import Taps
from langchain_card.runtime.threads import num_cores, use_threads

WINDOW = 4
"""Rows of a window, which are tokens of the answer; as many as an engine verifies with a head."""


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


def predict_with_head(
    file: str, pair: Pair, texts: Sequence[tuple[Sequence[int], Sequence[int]]], depth: int
) -> tuple[list[list[list[int]]], float, float]:
    """Draft a chain at each place of given answers.

    Args:
        file: folder of the head; "" for the package's own.
        pair: has the target.
        texts: prompts and answers.
        depth: tokens of a chain; a head that drafts several tokens at once has no more of them.

    Returns:
        The chains by text and place, the seconds of a draft step, and those that the head takes after each pass.
    """
    use_threads(num_cores(), in_torch=pair.target.form == "float")
    chains, timed, after = list[list[list[int]]](), list[float](), list[float]()
    with shared_model(pair.target) as model:
        head = HeadRunner(load_head(find_head(file, functools.partial(hash_model, pair.target)), model))
        taps = Taps(model, head.taps)
        try:
            scratch = WINDOW + head.num_scratch
            runner = ModelRunner(
                model, max_len=pair.max_len, num_scratch=scratch, taps=taps, more_layers=head.num_layers
            )
            head.bind(runner)
            for prompt_ids, token_ids in texts:
                text, first = [*prompt_ids, *token_ids], len(prompt_ids)
                read = _windows(runner, head, text, max(0, first - 2), after)
                chains.append([_draft(head, *place, depth, timed) for place in read])
        finally:
            taps.remove()
    return chains, sum(timed) / max(1, len(timed)), sum(after) / max(1, len(after))


def _windows(
    runner: ModelRunner, head: HeadRunner, text: Sequence[int], first: int, after: list[float]
) -> Iterator[tuple[ObservedWindow, int]]:
    """Read a text; yield the window and the row from which each token is drafted, from two places after `first` on.

    The seconds that the head takes after each pass are appended to `after`.
    """
    cache = runner.open()
    try:
        if first:
            rows = Rows(cache, text[:first], 0)
            runner.step([rows])
            head.observe([ObservedRows(0, rows, text[1 : first + 1])])
        for start in range(first, len(text) - 2, WINDOW):
            tokens = text[start : min(start + WINDOW, len(text) - 2)]
            parents = (ROOT, *range(len(tokens) - 1))
            rows = Rows(cache, tokens, start, [(*range(row + 1),) for row in range(len(tokens))])
            runner.step([rows])
            window = Window(0, 0, start, (*tokens,), parents)
            begun = time.perf_counter()
            head.observe([ObservedRows(0, rows, text[start + 1 : start + 1 + len(tokens)], window)])
            after.append(time.perf_counter() - begun)
            for row in range(len(tokens)):
                yield head.windows[0], row
            cache.keep([*range(len(tokens))], tokens)
    finally:
        head.end(0)
        runner.close(cache)


@torch.inference_mode()
def _draft(head: HeadRunner, window: ObservedWindow, row: int, depth: int, timed: list[float]) -> list[int]:
    """Draft a chain after a row of a window; append the seconds of each step."""
    output, token = window.outputs[row : row + 1], window.observed.next_ids[row]
    if head.num_slots:
        begun, chain = time.perf_counter(), list[int]()
        for slot in head.slots(output)[:depth]:
            chain.append(_first(head, head.slot_logits(slot[None], [chain[-1] if chain else token])))
        timed.append((time.perf_counter() - begun) / len(chain))
        return chain
    path, chain = (*window.slots([*range(row + 1)]),), [_first(head, head.logits(output))]
    while len(chain) < depth:
        begun = time.perf_counter()
        path = (*path, head.first_slot + len(chain) - 1)
        output = head.step([Rows(window.cache, chain[-1:], window.observed.rows.start, [path], features=output)])
        chain.append(_first(head, head.logits(output)))
        timed.append(time.perf_counter() - begun)
    return chain


def _first(head: HeadRunner, logits: Tensor) -> int:
    """Return the likeliest token of one row."""
    return int(head.token_ids(logits.argmax(dim=-1)))
