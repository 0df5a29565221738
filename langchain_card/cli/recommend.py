"""`langchain-card models recommend`: the built-in pairs on this machine, and the line of code of each."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from langchain_card.bench.doctor import about_load
from langchain_card.config import EngineConfig
from langchain_card.engine.drafter_hosts import SCRATCH
from langchain_card.errors import DeviceError
from langchain_card.models.budget import (
    ModelNeeds,
    check_needs,
    expected_weight_bytes,
    free_bytes,
    total_bytes,
)
from langchain_card.models.download import BUILTINS
from langchain_card.models.headers import DEFAULT_MAX_LEN
from langchain_card.models.loader import ModelSpec
from langchain_card.models.placement import find_device
from langchain_card.models.store import ModelStore
from langchain_card.runtime import draft_form
from langchain_card.runtime.step_timer import memory_bandwidth

PAIRS = (
    ("code", "qwen2.5-coder-1.5b", "qwen2.5-coder-0.5b"),
    ("chat", "qwen2.5-1.5b", "qwen2.5-0.5b"),
    ("chat; thinks first", "qwen3-4b", "qwen3-0.6b"),
    ("chat; thinks first", "qwen3-8b", "qwen3-0.6b"),
)
"""What each pair is for, its target and its draft. The first is the default; the others are in the order of quality."""

READABLE = 8.0
"""Tokens per second of plain decoding below which a pair for chats is not recommended: a reader would wait for it."""

_GIB = 1 << 30


@dataclass(frozen=True, slots=True)
class Fit:
    """A pair on a device.

    Attributes:
        use: what it is for.
        model, draft_model: its names.
        download: bytes that are not on this machine yet.
        alone: bytes of memory with one full sequence.
        full: bytes of memory with `num_seqs` full sequences.
        num_seqs: sequences at once; 0 if not even one fits.
        plain: tokens per second of plain decoding if each takes as long as reading the target's weights; None if
            unknown.
    """

    use: str
    model: str
    draft_model: str
    download: int
    alone: int
    full: int
    num_seqs: int
    plain: float | None

    @property
    def code(self) -> str:
        """The line of code that makes the chat model."""
        default = EngineConfig()
        if (self.model, self.draft_model) == (default.model, default.draft_model):
            return "CARDChatModel()"
        return f'CARDChatModel(model="{self.model}", draft_model="{self.draft_model}")'

    @property
    def options(self) -> str:
        """The options of the command line that name the pair."""
        return f"--model {self.model} --draft-model {self.draft_model}"


def run() -> int:
    """Print the machine, a line for each pair, and the recommended ones with their code."""
    device = find_device("device", "auto")
    bandwidth = None if device.type == "cuda" else memory_bandwidth()
    fits = measure(device, free_bytes(device), bandwidth)
    for line in describe(fits, device, free_bytes(device), bandwidth):
        print(line)
    return 0


def measure(device: torch.device, free: int, bandwidth: float | None) -> list[Fit]:
    """Return what each pair takes on a device.

    Args:
        device: of both models.
        free: its free bytes.
        bandwidth: bytes that it reads in a second, if known.
    """
    return [_fit(*pair, device, free, bandwidth) for pair in PAIRS]


def _fit(use: str, model: str, draft_model: str, device: torch.device, free: int, bandwidth: float | None) -> Fit:
    parts = [
        expected_needs("target", model, device, EngineConfig().limits.max_window),
        expected_needs("draft", draft_model, device, SCRATCH),
    ]
    try:
        num_seqs = check_needs(parts, None, DEFAULT_MAX_LEN, lambda _: free)
    except DeviceError:
        num_seqs = 0
    states = {stored.name: stored.state for stored in ModelStore().list()}
    absent = [name for name in (model, draft_model) if states[name] == "absent"]
    return Fit(
        use,
        model,
        draft_model,
        download=sum(BUILTINS[name].size for name in absent),
        alone=total_bytes(parts, 1, DEFAULT_MAX_LEN)[device],
        full=total_bytes(parts, max(1, num_seqs), DEFAULT_MAX_LEN)[device],
        num_seqs=num_seqs,
        plain=None if bandwidth is None else bandwidth / parts[0].weights,
    )


def expected_needs(role: str, name: str, device: torch.device, scratch: int) -> ModelNeeds:
    """Return what a built-in model takes on a device with the default formats; nothing is downloaded for that."""
    from transformers import AutoConfig

    builtin, on_cpu = BUILTINS[name], device.type == "cpu"
    kind, shape = builtin.shape["model_type"], {k: v for k, v in builtin.shape.items() if k != "model_type"}
    config: Any = AutoConfig.for_model(kind, **shape, max_position_embeddings=builtin.context_length)
    form, dtype = ("file", torch.float32) if on_cpu else ("float", torch.bfloat16)
    draft = role == "draft" and draft_form.changes(config, form)
    spec = ModelSpec(name, Path(), form, device, dtype, draft=draft, integer_kv=on_cpu)  # type: ignore[arg-type]
    return ModelNeeds(role, spec, scratch, (config, expected_weight_bytes(spec, config, builtin.size)))


def recommended(fits: Sequence[Fit]) -> list[Fit]:
    """Return the pair for code and the best one for each kind of chat, of those that fit.

    The best one is the last that decodes at a readable speed. If no pair for chats does, it is the first of them.
    """
    code, general = fits[0], [fit for fit in fits[1:] if fit.num_seqs]
    readable = [fit for fit in general if fit.plain is None or fit.plain >= READABLE]
    best = {fit.use: fit for fit in readable or general[:1]}
    return [*([code] if code.num_seqs else []), *best.values()]


def describe(fits: Sequence[Fit], device: torch.device, free: int, bandwidth: float | None) -> Iterator[str]:
    """Yield the lines of the report."""
    gpu = torch.cuda.get_device_name(device) if device.type == "cuda" else "no GPU that CUDA finds"
    speed = f", read at {bandwidth / 1e9:.1f} GB/s" if bandwidth else ""
    disk = shutil.disk_usage(_existing(ModelStore().cache)).free
    yield f"{free / _GIB:.1f} GiB of {device} are free{speed}; {gpu}; {disk / 1e9:.0f} GB of disk are free."
    yield ""
    rows = [("for", "target", "draft", "download", "memory, alone", "memory, full", "plain, about"), *map(_row, fits)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        yield "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
    yield ""
    chosen = recommended(fits)
    for fit in chosen:
        yield f"For {fit.use}: {fit.code}"
    if not chosen:
        yield f"None fits. Less memory is needed with a smaller max_model_len than {DEFAULT_MAX_LEN:,}."
        return
    yield f"Memory is that of one or of several full sequences of {DEFAULT_MAX_LEN:,} positions; speeds follow from the"
    yield f"memory's. `langchain-card plan {chosen[-1].options}` measures whether the draft pays."
    yield from about_load()
    if device.type == "cuda":
        yield "On a GPU, drafts pay little so far (docs/guides/models.md#gpus)."


def _row(fit: Fit) -> tuple[str, ...]:
    full = f"{fit.full / _GIB:.1f} GiB ({fit.num_seqs} at once)" if fit.num_seqs else "does not fit"
    speed = f"{fit.plain:.0f} tokens/s" if fit.plain else "-"
    download = f"{fit.download / 1e9:.1f} GB" if fit.download else "here"
    return fit.use, fit.model, fit.draft_model, download, f"{fit.alone / _GIB:.1f} GiB", full, speed


def _existing(path: Path) -> Path:
    """Return the path, or the nearest folder above it that exists."""
    return next(folder for folder in (path, *path.parents) if folder.exists())
