"""The names of what `langchain-card bench` compares, and what each can do; nothing heavy is imported here."""

from __future__ import annotations

import importlib.metadata
from dataclasses import dataclass
from typing import Any, Literal

from langchain_card.config import EngineConfig, Schedule
from langchain_card.errors import InvalidInputError, check_choice

PLAIN = "plain"
"""The method that the others are compared with."""

DEFAULTS = (PLAIN, "sequential", "parallel", "card")

SCHEDULES: dict[str, Schedule] = {PLAIN: "plain", "sequential": "sequential", "parallel": "parallel", "card": "auto"}
"""This engine's, by method; `card` is what users get."""

DRAFTS: dict[str, dict[str, Any]] = {
    "ngram": {"draft_model": "ngram", "drafters": None, "stack": ()},
    "model": {"drafters": (), "stack": ()},
    "beside": {"drafters": ("ngram",), "stack": ()},
    "below": {"drafters": (), "stack": ("ngram",)},
}
"""Engines of their own over the same weights, under `auto`: n-grams alone, the draft model alone, both together."""


@dataclass(frozen=True)
class Kind:
    """What another package's loop can do.

    Attributes:
        drafts: whether it needs a draft model.
        batches: whether it takes several prompts at once.
        weights: those of this engine; the same in float32; or a GGUF file's as they are.
        package: that it needs beside transformers.
    """

    drafts: bool = False
    batches: bool = False
    weights: Literal["same", "float32", "gguf"] = "same"
    package: str = ""


PEERS: dict[str, Kind] = {
    "hf-float32": Kind(batches=True, weights="float32"),
    "hf-generate": Kind(batches=True),
    "hf-assisted": Kind(drafts=True),
    "hf-prompt-lookup": Kind(),
    "flashspec": Kind(drafts=True, package="flashspec"),
    "llama-cpp": Kind(weights="gguf", package="llama-cpp-python"),
}
"""transformers' `generate` in float32; the same on this engine's weights, with its draft, with prompt lookup;
FlashSpec (the package flashspec), with its own choice of strategy; and llama.cpp, which does not draft here."""

METHODS = (*SCHEDULES, *DRAFTS, *PEERS)


def check_methods(names: tuple[str, ...], config: EngineConfig, batch: int) -> tuple[str, ...]:
    """The methods to compare, plain decoding first.

    Raises:
        InvalidInputError: there is no such method, or it cannot do what is asked.
    """
    for name in names:
        check_choice("--methods", name, METHODS)
        kind = PEERS.get(name, Kind(batches=True))
        if kind.package and not _is_installed(kind.package):
            raise InvalidInputError("--methods", name, "is not installed", f"pip install {kind.package}")
        if (kind.drafts or name in ("model", "beside", "below")) and not config.has_draft:
            raise InvalidInputError("--methods", name, "needs a draft model", "name a --draft-model, or leave it out")
        if name in ("sequential", "parallel", "card") and config.draft_model is None:
            raise InvalidInputError("--methods", name, "needs a draft", "name a --draft-model, or leave it out")
        if batch > 1 and not kind.batches:
            limit = f"takes one prompt at a time, not --batch {batch}"
            raise InvalidInputError("--methods", name, limit, "leave it out, or --batch 1")
    return tuple(dict.fromkeys((PLAIN, *names)))


def _is_installed(package: str) -> bool:
    try:
        importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True
