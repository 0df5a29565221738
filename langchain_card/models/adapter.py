"""LoRA adapters (arXiv 2106.09685) as PEFT saves them: `adapter_config.json` and `adapter_model.safetensors`."""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Mapping
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
    for pattern in config.get("alpha_pattern") or {}:
        if _LOOPS.search(pattern):
            limit = "repeats something, which may take for ever to match"
            raise InvalidInputError(f"adapters[{name!r}]: alpha_pattern", pattern, limit, "list names of layers")
    check_safetensors(folder / WEIGHTS)
    return dict(config)


def adapter_bytes(name: str, folder: Path) -> int:
    """Return the memory that an adapter takes at most: its numbers may be stored in half as many bytes.

    Raises:
        CARDError: see `check_adapter`.
    """
    check_adapter(name, folder)
    return 2 * (folder.expanduser() / WEIGHTS).stat().st_size


def read_adapter(name: str, folder: Path) -> Adapter:
    """Read an adapter.

    Raises:
        InvalidInputError: see `check_adapter`; or it changes something besides linear layers.
        CorruptModelError: half of a pair is missing, its shapes do not fit, or its numbers are not finite.
    """
    import safetensors.torch

    folder = folder.expanduser()
    config, found = check_adapter(name, folder), dict[str, dict[str, Tensor]]()
    for key, tensor in safetensors.torch.load_file(folder / WEIGHTS).items():
        if (match := _TENSOR.fullmatch(key)) is None:
            limit = "is no part of a linear layer's adapter"
            raise InvalidInputError(f"adapters[{name!r}]", key, limit, "merge it into its base model")
        found.setdefault(match["layer"], {})[match["part"]] = tensor
    pairs = {layer: _pair(name, layer, parts, config) for layer, parts in found.items()}
    digest = hashlib.sha256()
    for file in (CONFIG, WEIGHTS):
        digest.update((folder / file).read_bytes())
    return Adapter(name, digest.hexdigest(), pairs)


def _pair(name: str, layer: str, parts: Mapping[str, Tensor], config: Mapping[str, Any]) -> LowRankPair:
    a, b = parts.get("A"), parts.get("B")
    if a is None or b is None or a.ndim != 2 or b.ndim != 2 or a.shape[0] != b.shape[1]:
        raise CorruptModelError(f"adapters[{name!r}]", layer, "has not two matrices of one rank", "save it again")
    if not (a.isfinite().all() and b.isfinite().all()):
        raise CorruptModelError(f"adapters[{name!r}]", layer, "has numbers that are not finite", "train it again")
    alpha, rank = _alpha(layer, config), a.shape[0]
    scale = alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)
    return LowRankPair(a, (b.double() * scale).to(torch.promote_types(b.dtype, torch.float32)))


def _alpha(layer: str, config: Mapping[str, Any]) -> float:
    """Return the numerator of a layer's scale: the first of `alpha_pattern` that its name ends with, or the common."""
    for pattern, alpha in (config.get("alpha_pattern") or {}).items():
        if re.match(rf"(.*\.)?({pattern})$", layer):
            return float(alpha)
    return float(config.get("lora_alpha", 8))
