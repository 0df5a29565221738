"""Texts, and engines whose target keeps them in a folder."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from langchain_card.config import EngineConfig
from langchain_card.core.request import SamplingParams
from langchain_card.engine.engine import Engine
from langchain_card.engine.prefix_folder import BLOCK, LEAST_TOKENS

Answer = tuple[Any, int]
WHOLE = LEAST_TOKENS // BLOCK * BLOCK
EACH = WHOLE // BLOCK
PROMPT = random.Random(0).choices(range(256), k=WHOLE + BLOCK // 2)
OTHER = random.Random(1).choices(range(256), k=len(PROMPT))


def folder_config(target: str, **options: Any) -> EngineConfig:
    return EngineConfig(**{"model": target, "draft_model": None, "prefix_cache": "folder", **options})


def answers(config: EngineConfig, *texts: tuple[Sequence[int], str]) -> list[Answer]:
    """Answer texts of tenants with one engine, one by one.

    Returns:
        Tokens with log-probabilities, and how many tokens need not be read.
    """
    with Engine(config) as engine:
        results = [
            engine.submit(text, SamplingParams(max_tokens=8, logprobs=2, tenant=tenant)).result()
            for text, tenant in texts
        ]
    return [((result.token_ids, result.logprobs), result.stats.cached_tokens) for result in results]


def answer(config: EngineConfig, text: Sequence[int], tenant: str = "") -> Answer:
    return answers(config, (text, tenant))[0]


def blocks(folder: Path) -> list[Path]:
    """The files of the folder, latest use first: of one text, its beginning first."""
    return sorted(folder.glob("*.safetensors"), key=lambda file: -file.stat().st_mtime_ns)


def size(folder: Path) -> int:
    return sum(file.stat().st_size for file in blocks(folder))
