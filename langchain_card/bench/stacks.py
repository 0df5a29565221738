"""Runs planned stacks for real: as planned, blocks pinned, draft and target in turns."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from langchain_card import plugins
from langchain_card.bench.bounds import Measured
from langchain_card.bench.plan import Case, Plan
from langchain_card.bench.teacher_forced import asked_as_user
from langchain_card.config import EngineConfig, Pins
from langchain_card.core.request import SamplingParams
from langchain_card.engine.engine import Engine

_PLAIN = "plain decoding"


def configured(fields: Mapping[str, Any], case: Case, plan: Plan) -> EngineConfig:
    """The engine of a planned stack.

    Args:
        fields: of the configuration, but for the models below the target.
        case: what was planned with.
        plan: the stack.
    """
    if not plan.blocks:
        return EngineConfig(**{**fields, "draft_model": None})
    draft, *lower = (case.names[level] for level in reversed(plan.levels[:-1]))
    *blocks, block = plan.blocks
    stack = tuple(_with_block(name, each) for name, each in zip(lower, reversed(blocks), strict=True))
    pins = Pins(draft_width=1, lead=block, window=block + 1)
    return EngineConfig(**{**fields, "draft_model": draft}, drafters=(), stack=stack, pins=pins)


def _with_block(name: str, block: int) -> str:
    bare, _ = plugins.take_option(name, "block")
    return f"{bare}{'&' if '?' in bare else '?'}block={block}"


def times_plain(
    fields: Mapping[str, Any], case: Case, plans: Sequence[Plan], texts: Sequence[str], max_tokens: int
) -> list[Measured]:
    """Speeds of stacks after the first token, over that of plain decoding; the order changes with each text."""
    seconds: list[list[float]] = []
    with contextlib.ExitStack() as held:
        configs = [configured(fields, case, plan) for plan in (Plan(0.0, (case.target,)), *plans)]
        engines = [held.enter_context(Engine(config)) for config in configs]
        params = SamplingParams(max_tokens=max_tokens, schedule="sequential")
        for engine in engines:  # what is loaded and compiled at the first step
            engine.submit(asked_as_user(engine, texts[0]), replace(params, max_tokens=8)).result()
        for number, text in enumerate(texts):
            spent = [0.0] * len(engines)
            for place in range(len(engines)):
                i = (place + number) % len(engines)
                stats = engines[i].submit(asked_as_user(engines[i], text), params).result().stats
                spent[i] = (stats.ended - stats.first_token) / max(1, stats.output_tokens - 1)
            if all(spent):  # else the answer has one token
                seconds.append(spent)
    return [Measured.of([row[0] / row[i] for row in seconds]) for i in range(1, len(engines))]


def verdict(measured: Mapping[str, Measured]) -> str:
    """What measuring says, in a sentence.

    Args:
        measured: by what was run; plain decoding is 1.
    """
    every = {**measured, _PLAIN: Measured(1.0, 1.0, 1.0)}
    best = max(every, key=lambda name: every[name].value)
    level = [name for name, each in every.items() if name != best and each.high >= every[best].low]
    if best == _PLAIN and not level:
        return "Do not speculate: plain decoding is the fastest here."
    if level:
        return f"The fastest: {best}; but too close to tell from {' and '.join(level)} with so few prompts."
    return f"The fastest: {best}."
