"""LoRA adapters (arXiv 2106.09685) as PEFT saves them: `adapter_config.json` and `adapter_model.safetensors`."""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from langchain_card.errors import CorruptModelError, InvalidInputError
from langchain_card.models.safety import MAX_CONFIG_BYTES, check_safetensors, read_json
from langchain_card.runtime.adapters import Adapter, LowRankPair

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_TENSOR = re.compile(r"base_model\.model\.(?P<layer>.+)\.lora_(?P<part>[AB])\.weight")
_LOOPS = re.compile(r"[*+?{]")
_REFUSED = ("use_dora", "use_qalora", "lora_bias", "layer_replication", "alora_invocation_tokens", "target_parameters")
"""Options of PEFT that make more of an adapter than a product that is added to a matrix."""
_CHANGE_THE_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga")
"""Starts of PEFT's `init_lora_weights` that subtract from the base model what the untrained adapter adds."""


@dataclass(frozen=True, slots=True)
class _Scales:
    """The fields of a configuration from which the scales of its products follow."""

    lora_alpha: float
    alpha_pattern: Mapping[str, float]
    use_rslora: bool

    def of(self, layer: str, rank: int) -> float:
        """Return a layer's scale; its numerator is that of the first pattern with which its name ends."""
        own = (alpha for pattern, alpha in self.alpha_pattern.items() if re.match(rf"(.*\.)?({pattern})$", layer))
        return next(own, self.lora_alpha) / (math.sqrt(rank) if self.use_rslora else rank)


def check_adapter(name: str, folder: Path) -> dict[str, Any]:
    """Return the configuration of an adapter whose files can be read. No weights are read.

    Raises:
        InvalidInputError: there is no adapter in this folder, or it is not LoRA.
        CorruptModelError: a file is damaged.
    """
    folder = folder.expanduser()
    for file in (CONFIG, WEIGHTS):
        if not (folder / file).is_file():
            hint = f"name the folder with {CONFIG} and {WEIGHTS}, as PEFT's save_pretrained writes it"
            raise InvalidInputError(f"adapters[{name!r}]", str(folder), f"has no {file}", hint)
    config: Any = read_json(folder / CONFIG, MAX_CONFIG_BYTES)
    kind = config.get("peft_type") if isinstance(config, dict) else None
    if kind != "LORA":
        raise InvalidInputError(f"adapters[{name!r}]", kind, "is no LoRA adapter", "merge it into its base model")
    for option in _REFUSED:
        if config.get(option):
            limit = f"has {option}, which is not supported"
            raise InvalidInputError(f"adapters[{name!r}]", str(folder), limit, "merge it into its base model")
    if str(start := config.get("init_lora_weights")).lower().startswith(_CHANGE_THE_BASE):
        hint = "convert it to plain LoRA: save_pretrained(..., path_initial_model_for_weight_conversion=...)"
        raise InvalidInputError(f"adapters[{name!r}]: init_lora_weights", start, "changes the base model, too", hint)
    for pattern in _scales(name, config).alpha_pattern:
        _check_pattern(name, pattern)
    check_safetensors(folder / WEIGHTS)
    return dict(config)


def _scales(name: str, config: Mapping[str, Any]) -> _Scales:
    patterns: Any = config.get("alpha_pattern") or {}
    if not isinstance(patterns, dict):
        raise InvalidInputError(f"adapters[{name!r}]: alpha_pattern", patterns, "must be an object", "save it again")
    numbers = {"lora_alpha": config.get("lora_alpha", 8), **patterns}
    for field, value in numbers.items():
        if not isinstance(value, (int, float)) or not math.isfinite(value):
            raise InvalidInputError(f"adapters[{name!r}]: {field}", value, "must be a number", "save it again")
    return _Scales(float(numbers["lora_alpha"]), patterns, bool(config.get("use_rslora")))


def _check_pattern(name: str, pattern: str) -> None:
    field = f"adapters[{name!r}]: alpha_pattern"
    if _LOOPS.search(pattern):
        limit = "repeats something, which may take for ever to match"
        raise InvalidInputError(field, pattern, limit, "list names of layers")
    try:
        re.compile(pattern)
    except re.error as error:
        raise InvalidInputError(field, pattern, f"is no pattern ({error})", "list names of layers") from error


def adapters_bytes(adapters: Sequence[tuple[str, str]]) -> int:
    """Return the memory of adapters, by name and folder: those of a layer are padded to the largest rank of them.

    Raises:
        CARDError: see `check_adapter`.
    """
    from safetensors import safe_open

    ranks, sizes = dict[str, int](), dict[str, list[int]]()
    for name, path in adapters:
        folder = Path(path).expanduser()
        check_adapter(name, folder)
        with safe_open(folder / WEIGHTS, framework="np") as file:
            keys = file.keys()
            for key in keys:
                shape = file.get_slice(key).get_shape()
                if (match := _TENSOR.fullmatch(key)) and len(shape) == 2:
                    size, rank = sorted(shape)[::-1]
                    ranks[match["layer"]] = max(rank, ranks.get(match["layer"], 0))
                    sizes.setdefault(match["layer"], [0, 0])["AB".index(match["part"])] = size
    return len(adapters) * sum(4 * ranks[layer] * sum(sizes[layer]) for layer in ranks)


def read_adapter(name: str, folder: Path) -> Adapter:
    """Read an adapter.

    Raises:
        InvalidInputError: see `check_adapter`; or it changes something besides linear layers.
        CorruptModelError: half of a pair is missing, its shapes do not fit, or its numbers are not finite.
    """
    import safetensors.torch

    folder = folder.expanduser()
    scales, found = _scales(name, check_adapter(name, folder)), dict[str, dict[str, Tensor]]()
    for key, tensor in safetensors.torch.load_file(folder / WEIGHTS).items():
        if (match := _TENSOR.fullmatch(key)) is None:
            limit = "is no part of a linear layer's adapter"
            raise InvalidInputError(f"adapters[{name!r}]", key, limit, "merge it into its base model")
        found.setdefault(match["layer"], {})[match["part"]] = tensor
    pairs = {layer: _pair(name, layer, parts, scales) for layer, parts in found.items()}
    digest = hashlib.sha256((folder / CONFIG).read_bytes())
    with (folder / WEIGHTS).open("rb") as file:
        while chunk := file.read(1 << 20):
            digest.update(chunk)
    return Adapter(name, digest.hexdigest(), pairs)


def _pair(name: str, layer: str, parts: Mapping[str, Tensor], scales: _Scales) -> LowRankPair:
    a, b = parts.get("A"), parts.get("B")
    if a is None or b is None or a.ndim != 2 or b.ndim != 2 or not 0 < a.shape[0] == b.shape[1]:
        raise CorruptModelError(f"adapters[{name!r}]", layer, "has not two matrices of one rank", "save it again")
    scaled = (b.double() * scales.of(layer, a.shape[0])).to(torch.promote_types(b.dtype, torch.float32))
    if not (a.isfinite().all() and scaled.isfinite().all()):
        raise CorruptModelError(f"adapters[{name!r}]", layer, "has numbers that are not finite", "train it again")
    return LowRankPair(a, scaled)
