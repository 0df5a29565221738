"""Constrained answers: what is asked, the reference without ours, and a drafter that knows the answer and lies."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from llguidance import LLMatcher, LLTokenizer
from torch import Tensor

from langchain_card.core.messages import Proposal
from langchain_card.core.request import Request, SamplingParams
from langchain_card.engine.engine import Engine
from langchain_card.engine.generation import Completion
from langchain_card.ports import Budget, Setting
from tests.support import naive, tiny

TOKENIZER = tiny.byte_tokenizer()
EOS = TOKENIZER.eos_token_id
_LLGUIDANCE = LLTokenizer(TOKENIZER.backend_tokenizer.to_str(), n_vocab=len(TOKENIZER), eos_token=EOS)

WORD = {"type": "string", "maxLength": 6}
PERSON = {
    "type": "object",
    "properties": {"name": WORD, "kind": {"enum": ["customer", "supplier"]}, "age": {"type": "integer", "minimum": 0}},
    "required": ["name", "kind"],
    "additionalProperties": False,
}
TREE = {
    "type": "object",
    "properties": {"value": WORD, "next": {"anyOf": [{"$ref": "#/$defs/tree"}, {"type": "null"}]}},
    "required": ["value", "next"],
    "additionalProperties": False,
}
SCHEMAS: dict[str, dict[str, Any]] = {
    "person": PERSON,
    "people": {"type": "array", "items": PERSON, "minItems": 1, "maxItems": 2},
    "tree": {"$defs": {"tree": TREE}, "$ref": "#/$defs/tree"},
    "pattern": {"type": "string", "pattern": "^(ab)*c$"},
    "text": {"type": "object", "properties": {"text": {"type": "string"}}, "required": ["text"]},
}
Asked = tuple[list[int], SamplingParams]


def encode(text: str) -> list[int]:
    return list(TOKENIZER(text).input_ids)


def shortest(engine: Engine, grammar: str) -> int:
    """The least that `max_tokens` may be."""
    engine.grammars.check(grammar, 10**6)
    return len(engine.grammars.start(grammar).closing(0) or ())


def matcher(grammar: str, token_ids: Sequence[int] = ()) -> LLMatcher:
    """llguidance's own, behind some tokens."""
    fresh = LLMatcher(_LLGUIDANCE, grammar, log_level=0)
    assert fresh.consume_tokens([*token_ids])
    return fresh


def mask(matcher: LLMatcher, width: int = tiny.VOCAB) -> Tensor:
    """Whether each token may come next."""
    bits = np.frombuffer(matcher.compute_bitmask(), dtype=np.uint8)
    allowed = np.unpackbits(bits, bitorder="little")[:width]
    return torch.from_numpy(np.pad(allowed, (0, width - len(allowed)))).bool()


def reference(model: Any, prompt_ids: Sequence[int], params: SamplingParams) -> list[int]:
    """One token at a time over transformers, masked by a matcher that is made anew for each."""
    forward = naive.reading(model)

    def masked(token_ids: list[int]) -> Tensor:
        allowed = mask(matcher(params.grammar, token_ids[len(prompt_ids) :]))
        return forward(token_ids).masked_fill(~allowed, -math.inf)

    return naive.generate(masked, prompt_ids, params, [EOS]).token_ids


def decode(
    engine: Engine, asked: Sequence[Asked], schedule: str = "plain", *, at_once: bool = False
) -> list[Completion]:
    """Answers one after the other, or all submitted before the first is read."""
    every = [(ids, replace(params, schedule=schedule)) for ids, params in asked]  # type: ignore[arg-type]
    if not at_once:
        return [engine.submit(*one).result() for one in every]
    return [generation.result() for generation in [engine.submit(*one) for one in every]]


def outcome(done: Completion) -> tuple[tuple[int, ...], str, bool]:
    """What no schedule may change."""
    return done.token_ids, done.finish_reason.value, done.stats.closed


class Oracle:
    """Knows the answers: proposes their next tokens, and beside and within them what is wrong.

    Lies are drawn from all tokens, the end of text among them, and the truth goes on below them as well.
    """

    name, paced = "ngram", False
    answers: dict[Asked, tuple[int, ...]]
    lies: float = 0.0

    def __init__(self, setting: Setting) -> None:
        self._known: dict[int, tuple[int, ...]] = {}
        self._done: dict[int, int] = {}
        self._epochs = itertools.count()
        self._rng = random.Random(0)

    def begin(self, request: Request, output_ids: Sequence[int]) -> None:
        key = (tuple(request.prompt_ids), replace(request.params, schedule="auto"))
        self._known[request.request_id] = self.answers.get(key, ())
        self._done[request.request_id] = len(output_ids)

    def correct(self, request_id: int, start: int, token_ids: Sequence[int]) -> None:
        if start <= self._done.get(request_id, -1):
            self._done[request_id] = max(self._done[request_id], start + len(token_ids))

    def step(self, budgets: Sequence[Budget]) -> list[Proposal]:
        return [self._propose(budget.request_id) for budget in budgets if budget.request_id in self._done]

    def end(self, request_id: int) -> None:
        self._known.pop(request_id, None)
        self._done.pop(request_id, None)

    def close(self) -> None:
        self._done.clear()

    def _propose(self, request_id: int) -> Proposal:
        done = self._done[request_id]
        parents, tokens, last = list[int](), list[int](), 0
        for token in self._known[request_id][done : done + 12]:
            for lie in self._lies():
                parents.append(last)
                tokens.append(lie)
            parents.append(self._rng.randrange(last, len(parents)) if self._rng.random() < self.lies / 3 else last)
            tokens.append(token)
            last = len(tokens)
        scores = tuple(-0.01 for _ in tokens)
        return Proposal(self.name, request_id, next(self._epochs), 0, done, 1, tuple(parents), tuple(tokens), scores)

    def _lies(self) -> list[int]:
        drawn = [self._rng.choice([EOS, *range(256)]) for _ in range(2)]
        return [lie for lie in drawn if self._rng.random() < self.lies]


def knowing(asked: Sequence[Asked], done: Sequence[Completion], lies: float = 0.0) -> type[Oracle]:
    """An oracle of these answers, to stand where prompt lookup does."""
    known = {
        (tuple(ids), replace(params, schedule="auto")): answer.token_ids
        for (ids, params), answer in zip(asked, done, strict=True)
    }
    return type("Knowing", (Oracle,), {"answers": known, "lies": lies})
