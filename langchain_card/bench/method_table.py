"""The names and requirements of the methods that `langchain-card bench` compares. Imports nothing heavy."""

from __future__ import annotations

import importlib.metadata
from dataclasses import dataclass
from typing import Any, Literal

from langchain_card.config import EngineConfig, Schedule
from langchain_card.errors import InvalidInputError, check_choice

PLAIN = "plain"
"""The baseline: plain decoding."""

DEFAULTS = (PLAIN, "sequential", "parallel", "card")
"""Methods that are compared by default."""

SCHEDULES: dict[str, Schedule] = {PLAIN: "plain", "sequential": "sequential", "parallel": "parallel", "card": "auto"}
"""Schedule by method, for methods of this engine. `card` is the default of the chat model."""

DRAFTS: dict[str, dict[str, Any]] = {
    "ngram": {"draft_model": "ngram", "drafters": None, "stack": ()},
    "model": {"drafters": (), "stack": ()},
    "beside": {"drafters": ("ngram",), "stack": ()},
    "below": {"drafters": (), "stack": ("ngram",)},
}
"""Fields of `EngineConfig` by method, for methods with an engine of their own over the same weights.

N-grams alone, the draft model alone, n-grams beside the draft model, and n-grams below it, all under `auto`."""


@dataclass(frozen=True)
class PeerKind:
    """Requirements and abilities of another package's decoding loop.

    Attributes:
        drafts: True if it needs a draft model.
        batches: True if it accepts several prompts at once.
        weights: this engine's, the same in float32, or those of the GGUF file.
        package: required besides transformers.
        room: memory of its process as a multiple of its weights. An estimate.
    """

    drafts: bool = False
    batches: bool = False
    weights: Literal["same", "float32", "gguf"] = "same"
    package: str = ""
    room: float = 1.3


PEERS: dict[str, PeerKind] = {
    "hf-float32": PeerKind(batches=True, weights="float32"),
    "hf-generate": PeerKind(batches=True),
    "hf-assisted": PeerKind(drafts=True),
    "hf-prompt-lookup": PeerKind(),
    "flashspec": PeerKind(drafts=True, package="flashspec"),
    "llama-cpp": PeerKind(weights="gguf", package="llama-cpp-python"),
    "openvino": PeerKind(weights="gguf", package="openvino-genai", room=4.0),
}
"""Loops of other packages.

transformers' `generate` in float32, on this engine's weights, with its draft, and with prompt lookup; FlashSpec with
its own choice of strategy; llama.cpp and OpenVINO GenAI without a draft."""

METHODS = (*SCHEDULES, *DRAFTS, *PEERS)


def check_methods(names: tuple[str, ...], config: EngineConfig, batch: int) -> tuple[str, ...]:
    """Return the methods to compare, plain decoding first.

    Raises:
        InvalidInputError: a method does not exist, is not installed, or does not support this draft or batch.
    """
    for name in names:
        check_choice("--methods", name, METHODS)
        kind = PEERS.get(name, PeerKind(batches=True))
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
