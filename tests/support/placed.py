"""Where target and draft lie on two devices, and the answers of an engine."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from langchain_card.config import EngineConfig
from langchain_card.core.request import SamplingParams
from langchain_card.engine.engine import Engine
from langchain_card.engine.generation import Completion
from tests.simulation import FixedPolicy

PLACEMENTS: dict[str, dict[str, Any]] = {
    "two devices": {"device": "cuda:0", "draft_device": "cuda:1", "draft_transport": "thread"},
    "one device": {"device": "cuda:0", "draft_device": "cuda:0"},
    "target over both": {"device": "cuda:0,cuda:1", "draft_device": "cuda:1"},
    "draft on the CPU": {"device": "cuda:0", "draft_device": "cpu"},
}
APART: dict[str, Any] = {"device": "cuda:0", "draft_device": "cuda:1"}
"""Two devices; the draft gets a process of its own there."""

SCHEDULES = ("plain", "sequential", "parallel")
GREEDY: dict[str, Any] = {}
SAMPLED: dict[str, Any] = {"temperature": 0.8, "top_p": 0.9, "repetition_penalty": 1.1, "seed": 5}
GRAMMAR: dict[str, Any] = {**SAMPLED, "grammar": "%llguidance {}\nstart: /[ -z]+/"}


def policy(**_: Any) -> FixedPolicy:
    """Make a controller that always drafts: a draft of simulated speed would hardly ever pay."""
    return FixedPolicy(widths=(4,) * 4, read=7)


def completions(
    config: EngineConfig, schedules: Sequence[str], max_tokens: int, options: dict[str, Any]
) -> list[list[Completion]]:
    """Decode two requests at once under each schedule, the second with a longer prompt."""
    found = []
    with Engine(config) as engine:
        for schedule in schedules:
            params = SamplingParams(max_tokens=max_tokens, schedule=schedule, **options)  # type: ignore[arg-type]
            running = [engine.submit([*range(40, 50 + 30 * n)], params) for n in range(2)]
            found.append([generation.result() for generation in running])
    return found


def answers(
    config: EngineConfig, schedules: Sequence[str], max_tokens: int, options: dict[str, Any]
) -> list[list[tuple[int, ...]]]:
    """Return the tokens of `completions`."""
    return [[done.token_ids for done in each] for each in completions(config, schedules, max_tokens, options)]
