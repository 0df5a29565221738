"""Memory budget: add up what an engine needs and compare it with what is free before weights are read.

A device holds the weights of its models, KV for every sequence at its full length, and working memory. KV counts at
full length although a CPU takes its pages only when they are written: memory must not run out in mid-answer.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import psutil
import torch

from langchain_card.errors import DeviceError
from langchain_card.models.files import size_on_disk
from langchain_card.models.loader import ModelSpec, Pair, device_map, is_loaded
from langchain_card.models.placement import shares
from langchain_card.models.quantization import find_quantizer, quantized_bytes
from langchain_card.models.safety import weight_files
from langchain_card.runtime.families import empty_model, kv_shape, read_config
from langchain_card.runtime.grid_attention import MAX_GRAPH_ROWS
from langchain_card.runtime.heads import NO_OBSERVER, ObserverNeeds
from langchain_card.runtime.runner import TEXT_CHUNK

FIXED_RESERVE = 256 << 20
"""Bytes of a device that are reserved for libraries, allocators and the rest of the process."""

MAX_SEQS = 16
"""Default upper bound of sequences at once, chosen for few CPU cores, where a pass gains little from more sequences."""

_PACKED = 1.03
"""Memory of a matrix as the kernel reads it over its blocks in a file."""

_INTEGER_TILE, _INTEGER_BLOCK = 32, 64
"""Integer KV is padded to whole tiles of a head's features, and to whole blocks of positions."""

_SCORE_BYTES = 8  # the sampler works in float64
_SCORE_COPIES = 4
_GIB = 1 << 30


def free_bytes(device: torch.device) -> int:
    """Return the free memory of a device, in bytes."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    return int(psutil.virtual_memory().available)


def weight_bytes(spec: ModelSpec) -> int:
    """Return the bytes that a model's weights take on their device."""
    if spec.form != "float":
        return _block_bytes(spec)
    config = read_config(spec.folder)
    quantizer, model = find_quantizer(config, spec.quantization, spec.device), empty_model(config).to(spec.dtype)
    if quantizer is None:
        return _parameter_bytes(model)
    if quantizer.pre_quantized:
        return sum(file.stat().st_size for file in weight_files(spec.folder))
    return quantized_bytes(model, quantizer)


def expected_weight_bytes(spec: ModelSpec, config: Any, file_bytes: int) -> int:
    """Return about what the weights of a GGUF file will take that is not on this machine.

    Args:
        spec: how it will run.
        config: of the model.
        file_bytes: size of the file.
    """
    if spec.form == "float":
        return _parameter_bytes(empty_model(config).to(spec.dtype))
    if not spec.draft:
        return int(file_bytes * _PACKED)
    numbers = sum(parameter.numel() for parameter in empty_model(config).parameters())
    return int(min(file_bytes, numbers * _draft_bytes()) * _PACKED)


def disk_bytes(folder: Path) -> int:
    """Return the bytes of a model's folder, and of the GGUF file whose blocks it refers to."""
    from langchain_card.models.block_index import outer_file  # imports numba, which float weights do not need

    return size_on_disk(folder) + (source.stat().st_size if (source := outer_file(folder)) else 0)


def check_budget(
    pair: Pair,
    num_seqs: int | None,
    target_scratch: int,
    draft_scratch: int,
    free: Callable[[torch.device], int] = free_bytes,
) -> int:
    """Raise unless target, draft and the KV of all sequences fit. Weights that are loaded already cost nothing.

    Args:
        pair: the models to load.
        num_seqs: sequences at once; None for as many, up to `MAX_SEQS`, as fit in half of the free memory.
        target_scratch: unverified rows of a sequence on the target.
        draft_scratch: unverified rows of a sequence on the draft.
        free: returns the free bytes of a device.

    Returns:
        The number of sequences at once.

    Raises:
        DeviceError: it does not fit; the message lists what each part takes, and what would fit.
    """
    return check_needs(needs_of(pair, target_scratch, draft_scratch), num_seqs, pair.max_len, free)


def needs_of(pair: Pair, target_scratch: int, draft_scratch: int) -> list[ModelNeeds]:
    """Return what each model of a pair takes; the arguments are those of `check_budget`."""
    scratch = target_scratch + pair.observers.scratch
    parts = [ModelNeeds("target", pair.target, scratch, adapters=pair.adapter_bytes, observers=pair.observers)]
    if pair.draft is not None:
        parts.append(ModelNeeds("draft", pair.draft, draft_scratch))
    parts += [ModelNeeds(f"stack {n} ({spec.name})", spec, draft_scratch) for n, spec in enumerate(pair.stack, 1)]
    for before, part in enumerate(parts):
        if any(part.spec == other.spec for other in parts[1:before]):
            part.weights = 0  # levels of a stack share one process; a draft that is the target may have its own
    return parts


def check_needs(
    parts: Sequence[ModelNeeds],
    num_seqs: int | None,
    max_len: int,
    free: Callable[[torch.device], int] = free_bytes,
) -> int:
    """Check as `check_budget` does, for sequences of `max_len` positions."""
    loads = _loads(parts, free)
    if num_seqs is None:
        halves = [replace(load, free=load.free // 2) for load in loads]
        num_seqs = max(1, _most(MAX_SEQS, halves, lambda load, n: load.fits(n, max_len)))
    for load in loads:
        if not load.fits(num_seqs, max_len):
            limit = load.sum_up(num_seqs, max_len)
            raise DeviceError("device", str(load.device), limit, _what_fits(loads, num_seqs, max_len))
    return num_seqs


def total_bytes(parts: Sequence[ModelNeeds], num_seqs: int, positions: int) -> dict[torch.device, int]:
    """Return what all parts take on each device while so many sequences of this length are full."""
    loads = _loads(parts, lambda device: 0)
    return {load.device: sum(load.shares(num_seqs, positions).values()) for load in loads}


def _loads(parts: Sequence[ModelNeeds], free: Callable[[torch.device], int]) -> list[_Load]:
    devices = dict.fromkeys(device for part in parts for device in part.shares)
    return [_Load(device, free(device), [part for part in parts if device in part.shares]) for device in devices]


class ModelNeeds:
    """The bytes that one model takes on its devices.

    Args:
        role: "target", "draft" or "stack 1 (its name)".
        spec: the model.
        scratch: unverified rows of a sequence.
        expected: config and bytes of the weights of a model that is not on this machine; None to read them.
        adapters: bytes of adapters.
        observers: memory of what reads its states.

    Attributes:
        weights: bytes of parameters; 0 if the process has loaded them already, or another level of the stack loads
            them. Buffers are too small to count.
        shares: by device, its shares of the weights and of the KV.
    """

    def __init__(
        self,
        role: str,
        spec: ModelSpec,
        scratch: int,
        expected: tuple[Any, int] | None = None,
        adapters: int = 0,
        observers: ObserverNeeds = NO_OBSERVER,
    ) -> None:
        self.role, self.spec, self.scratch = role, spec, scratch
        self.adapters, self.observers = adapters, observers
        if expected is None:
            expected = read_config(spec.folder), 0 if is_loaded(spec) else weight_bytes(spec)
        self._config, self.weights = expected[0].get_text_config(), expected[1]
        self.shares = {spec.device: (1.0, 1.0)}
        if spec.others:
            self.shares = shares(empty_model(read_config(spec.folder)), device_map(spec))

    def kv(self, positions: int) -> int:
        """Return the bytes of KV of one sequence with this many positions, prompt and answer together."""
        positions = min(positions, int(self._config.max_position_embeddings))
        shape = kv_shape(self._config)
        shape = replace(shape, layers=shape.layers + self.observers.layers)
        if self.spec.integer_kv:  # `runtime.cpu.integer_kv`: 2 bytes in keys and 1 in values, and 3 scales for both
            slots = _round_up(positions, _INTEGER_BLOCK) + _round_up(self.scratch, _INTEGER_BLOCK)
            width = _round_up(shape.head_dim, _INTEGER_TILE)
            return shape.numbers // shape.head_dim * slots * (3 * width + 3 * 4) // 2
        return (
            shape.numbers
            * (positions + self.scratch)
            * max(self.spec.itemsize, 4 if self.spec.device.type == "cpu" else 0)
        )

    def working(self, positions: int) -> int:
        """Return the bytes of steps beside weights and KV: a prompt chunk, scores of unverified rows, captures."""
        config, scores = self._config, _SCORE_BYTES * _SCORE_COPIES
        wide = getattr(config, "intermediate_size", None) or 4 * config.hidden_size
        row: int = 4 * config.hidden_size + 3 * wide + config.num_attention_heads * positions
        vocab_size: int = config.vocab_size
        captured = MAX_GRAPH_ROWS if self.spec.device.type == "cuda" else 0  # graphs share the largest one's memory
        numbers = TEXT_CHUNK * row + captured * (row + vocab_size)
        return numbers * self.spec.itemsize + self.scratch * vocab_size * scores


def _round_up(count: int, size: int) -> int:
    return -(-count // size) * size


@dataclass(frozen=True, slots=True)
class _Load:
    """The models that one device holds, and its free memory."""

    device: torch.device
    free: int
    parts: list[ModelNeeds]

    def shares(self, num_seqs: int, positions: int) -> dict[str, int]:
        """Return the bytes by their purpose."""
        of = {part: part.shares[self.device] for part in self.parts}
        sizes = {f"{part.role} weights": round(part.weights * of[part][0]) for part in self.parts}
        sizes |= {f"{part.role} KV": round(num_seqs * part.kv(positions) * of[part][1]) for part in self.parts}
        sizes |= {f"{part.role} adapters": round(part.adapters * of[part][0]) for part in self.parts if part.adapters}
        sizes |= {f"{part.role} head": part.observers.weights for part in self.parts if part.observers.weights}
        return sizes | {"working memory": FIXED_RESERVE + sum(part.working(positions) for part in self.parts)}

    def fits(self, num_seqs: int, positions: int) -> bool:
        return sum(self.shares(num_seqs, positions).values()) <= self.free

    def sum_up(self, num_seqs: int, positions: int) -> str:
        shares = self.shares(num_seqs, positions)
        listed = ", ".join(f"{name} {_gib(size)}" for name, size in shares.items())
        sequences = f"{num_seqs:,} sequence{'s' * (num_seqs > 1)} of {positions:,} positions"
        return f"{sequences} need {_gib(sum(shares.values()))} GiB ({listed}), {_gib(self.free)} GiB are free"


def _most(high: int, loads: Sequence[_Load], fits: Callable[[_Load, int], bool]) -> int:
    """Return the largest number up to `high` that fits on every device; 0 if none does."""
    return bisect_left(range(1, high + 1), True, key=lambda n: not all(fits(load, n) for load in loads))


def _what_fits(loads: list[_Load], num_seqs: int, max_len: int) -> str:
    """Return a hint: the most sequences of this length, the longest single sequence, or smaller weights."""
    if sequences := _most(num_seqs, loads, lambda load, n: load.fits(n, max_len)):
        return f"limits.max_num_seqs = {sequences} fits at this max_model_len"
    if positions := _most(max_len, loads, lambda load, n: load.fits(1, n)):
        return f"max_model_len = {positions} fits for one sequence"
    return "the weights alone do not fit: use a smaller model, a quantized form of it, or several CUDA devices"


def _block_bytes(spec: ModelSpec) -> int:
    """Return the bytes of weights in blocks. A table of embeddings in a file takes memory only where it is used."""
    from langchain_card.models.block_index import read_tensors  # imports numba, which float weights do not need
    from langchain_card.runtime.cpu.blocks.formats import FORMATS

    total = 0.0
    for tensor in read_tensors(spec.folder).values():
        size = spec.itemsize if tensor.form is None else FORMATS[tensor.form].size / FORMATS[tensor.form].features
        if spec.draft and tensor.form is not None:
            size = min(size, _draft_bytes())
        total += math.prod(tensor.shape) * size * (1 if tensor.form is None else _PACKED)
    return int(total)


def _draft_bytes() -> float:
    """Return the most bytes that a number of a draft's matrices takes in blocks."""
    from langchain_card.runtime.cpu.blocks.formats import FORMATS, Q4_0  # imports numba

    return FORMATS[Q4_0].size / FORMATS[Q4_0].features


def _parameter_bytes(model: Any) -> int:
    return sum(parameter.nbytes for parameter in model.parameters())


def _gib(size: int) -> str:
    return f"{size / _GIB:,.2f}"
