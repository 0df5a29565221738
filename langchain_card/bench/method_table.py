"""The names and requirements of the methods that `langchain-card bench` compares. Imports nothing heavy."""

from __future__ import annotations

import importlib.metadata
import itertools
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeAlias

from langchain_card import plugins
from langchain_card.config import EngineConfig, Schedule
from langchain_card.errors import InvalidInputError, check_choice

PLAIN = "plain"
"""The baseline: plain decoding."""

DEFAULTS = (PLAIN, "sequential", "parallel", "card")
"""Methods that are compared by default."""

SCHEDULES: dict[str, Schedule] = {PLAIN: "plain", "sequential": "sequential", "parallel": "parallel", "card": "auto"}
"""Schedule by method, for methods of this engine. `card` is the default of the chat model."""

DRAFTS: dict[str, dict[str, Any]] = {
    "model": {"drafters": (), "stack": ()},
    "beside": {"drafters": ("ngram",), "stack": ()},
    "below": {"drafters": (), "stack": ("ngram",)},
}
"""Fields of `EngineConfig` by method, for methods with an engine of their own over the same weights.

The draft model alone, n-grams beside the draft model, and n-grams below it, all under `auto`."""


@dataclass(frozen=True)
class PeerKind:
    """Requirements and abilities of another package's decoding loop.

    Attributes:
        drafts: True if it needs a draft model.
        batches: True if it accepts several prompts at once.
        serves: True if it can be measured at a load.
        weights: this engine's, the same in float32, or those of the GGUF file.
        package: required besides transformers.
        program: a binary that it needs, a key of `PROGRAMS`.
        base: the method that decodes plainly in the same way, and is compared beside it.
        room: memory of its process as a multiple of its weights. An estimate.
    """

    drafts: bool = False
    batches: bool = False
    serves: bool = False
    weights: Literal["same", "float32", "gguf"] = "same"
    package: str = ""
    program: str = ""
    base: str = ""
    room: float = 1.3


_SERVER = PeerKind(serves=True, weights="gguf", program="llama-server", room=2.5)
_SPECULATING = replace(_SERVER, base="llama-server")

PEERS: dict[str, PeerKind] = {
    "hf-float32": PeerKind(batches=True, weights="float32"),
    "hf-generate": PeerKind(batches=True),
    "hf-assisted": PeerKind(drafts=True),
    "hf-prompt-lookup": PeerKind(),
    "flashspec": PeerKind(drafts=True, package="flashspec"),
    "llama-server": _SERVER,
    "llama-server-draft": replace(_SPECULATING, drafts=True),
    "llama-server-ngram": _SPECULATING,
    "llama-server-both": replace(_SPECULATING, drafts=True),
    "openvino": PeerKind(weights="gguf", package="openvino-genai", room=4.0),
    "openvino-lookup": PeerKind(weights="gguf", package="openvino-genai", room=4.0, base="openvino"),
    "openvino-batching": PeerKind(batches=True, serves=True, weights="gguf", package="openvino-genai", room=4.0),
}
"""Loops of other packages.

transformers' `generate` in float32, on this engine's weights, with its draft, and with prompt lookup; FlashSpec with
its own choice of strategy; llama.cpp's server alone, with its draft, with its n-grams, and with both; OpenVINO GenAI
alone, with prompt lookup, and with continuous batching. There is no OpenVINO with a draft: its reader of GGUF files
refuses Q5_0, in which the built-in draft has most of its matrices."""

PeerOptions: TypeAlias = Mapping[str, "int | float | str"]

PEER_OPTIONS: dict[str, PeerOptions] = {
    "llama-server": {"flash-attn": "off"},
    "llama-server-draft": {
        "flash-attn": "off",
        "spec-type": "draft-simple",
        "spec-draft-n-max": 16,
        "spec-draft-p-min": 0.8,
    },
    "llama-server-ngram": {
        "flash-attn": "off",
        "spec-type": "ngram-mod",
        "spec-ngram-mod-n-match": 6,
        "spec-ngram-mod-n-min": 1,
        "spec-ngram-mod-n-max": 2,
    },
    "llama-server-both": {
        "flash-attn": "off",
        "spec-type": "ngram-mod,draft-simple",
        "spec-draft-n-max": 16,
        "spec-draft-p-min": 0.8,
        "spec-ngram-mod-n-match": 12,
        "spec-ngram-mod-n-min": 1,
        "spec-ngram-mod-n-max": 8,
    },
    "openvino": {"PERFORMANCE_HINT": "LATENCY"},
    "openvino-lookup": {"PERFORMANCE_HINT": "LATENCY", "num_assistant_tokens": 2, "max_ngram_size": 2},
}
"""Options of the peers that can be tuned.

Those of llama-server are options of its command line; True and False stand for a switch. Those of OpenVINO are
properties of the pipeline in capital letters, and fields of its generation config in small ones.
`benchmarks/tune_peers.py` prints this table.

By default, llama-server's `ngram-mod` proposes nothing in short answers: a match has 24 tokens, and a draft that is
shorter than 48 tokens is dropped. It learns an answer in pieces, so that up to 33 - `n-match` of the latest tokens are
unknown. With `--model-draft` alone the server speculates nothing: the default of `spec-type` is `none`."""

LOAD_SETS, REQUESTS = ("code", "maths", "chat", "multilingual"), (1, 2, 4, 8, 16)
"""Sets of prompts, and numbers of requests at once, that are measured at a load by default."""

PROGRAMS = {"llama-server": "LLAMA_SERVER"}
"""Binaries that peers need, each with the environment variable that may hold its path."""

METHODS = (*SCHEDULES, "ngram", *DRAFTS, *PEERS)
"""Methods by name. Besides, each drafter that needs no second model is one, by its spec: n-grams, or a head."""


def own_fields(name: str) -> dict[str, Any] | None:
    """Return the fields of the engine that a method needs for itself; None if it needs none."""
    if name in SCHEDULES or name in PEERS:
        return None
    return DRAFTS.get(name, {"draft_model": name, "drafters": None, "stack": ()})


def check_methods(
    names: tuple[str, ...], config: EngineConfig, batch: int, *, at_load: bool = False
) -> tuple[str, ...]:
    """Return the methods to compare: plain decoding first, and before each peer its own plain decoding.

    Raises:
        InvalidInputError: a method does not exist, is not installed, or does not support this draft, batch or load.
    """
    for name in names:
        if not plugins.is_known("drafters", name):
            check_choice("--methods", name, METHODS)
        kind = PEERS.get(name, PeerKind(batches=True))
        if kind.package and not _is_installed(kind.package):
            raise InvalidInputError("--methods", name, "is not installed", f"pip install {kind.package}")
        if kind.program:
            find_program(name, kind.program)
        if (kind.drafts or name in ("model", "beside", "below")) and not config.has_draft:
            raise InvalidInputError("--methods", name, "needs a draft model", "name a --draft-model, or leave it out")
        if name in ("sequential", "parallel", "card") and config.draft_model is None:
            raise InvalidInputError("--methods", name, "needs a draft", "name a --draft-model, or leave it out")
        if batch > 1 and not kind.batches:
            limit = f"takes one prompt at a time, not --batch {batch}"
            raise InvalidInputError("--methods", name, limit, "leave it out, or --batch 1")
        if at_load and name in PEERS and not kind.serves:
            able = ", ".join(peer for peer in PEERS if PEERS[peer].serves)
            raise InvalidInputError("--methods", name, "does not go with --load", f"of other packages, {able} do")
    bases = ((PEERS[name].base, name) if name in PEERS else (name,) for name in names)
    return tuple(dict.fromkeys((PLAIN, *filter(None, itertools.chain(*bases)))))


def find_program(method: str, program: str) -> str:
    """Return the path of a binary: the environment variable's in `PROGRAMS`, or the one on PATH.

    Raises:
        InvalidInputError: there is none; the error names the method.
    """
    variable = PROGRAMS[program]
    if named := os.environ.get(variable):
        if (found := shutil.which(named)) is None:
            hint = f"set {variable} to the path of {program}, or unset it"
            raise InvalidInputError(variable, named, "is no program that can be run", hint)
        return found
    if (found := shutil.which(program)) is None:
        hint = f"build llama.cpp for this CPU and set {variable} to its {program}"
        raise InvalidInputError("--methods", method, f"needs the program {program}, which is not on PATH", hint)
    return found


def _is_installed(package: str) -> bool:
    try:
        importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True
