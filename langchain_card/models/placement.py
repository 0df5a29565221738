"""Resolve the devices of a configuration, and place a model's layers on them (a device map for accelerate)."""

from __future__ import annotations

from bisect import bisect
from collections.abc import Iterator, Sequence
from itertools import accumulate

import psutil
import torch
from torch import nn

from langchain_card.config import EngineConfig
from langchain_card.errors import DeviceError
from langchain_card.runtime.families import decoder_layers


def find_device(field: str, name: str) -> torch.device:
    """Return the device of this name on this machine; `"auto"` is CUDA if there is one, else the CPU."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise DeviceError(field, name, "is not a device", 'use "auto", "cpu", "cuda" or "cuda:1"') from error
    if device.type == "cuda" and not (torch.cuda.is_available() and (device.index or 0) < torch.cuda.device_count()):
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        raise DeviceError(field, name, f"this machine has {count} CUDA devices", 'use "auto" or "cpu"')
    if device.type not in ("cpu", "cuda"):
        raise DeviceError(field, name, "only CPU and CUDA devices are supported", 'use "auto" or "cpu"')
    # With an index, so that equal devices compare equal.
    return torch.device("cuda", device.index or 0) if device.type == "cuda" else device


def find_devices(field: str, names: str) -> list[torch.device]:
    """Return the device of this name, or the CUDA devices of several names between commas."""
    devices = [find_device(field, part.strip()) for part in names.split(",")]
    if len(devices) > 1 and (len(set(devices)) < len(devices) or any(device.type != "cuda" for device in devices)):
        raise DeviceError(field, names, "layers spread over CUDA devices that are all different", 'use "cuda:0,cuda:1"')
    return devices


def draft_device(config: EngineConfig, target: Sequence[torch.device]) -> torch.device:
    """Return the draft's device: by default a CUDA device that the target leaves free, else the target's.

    Args:
        config: the engine's configuration.
        target: the target's devices.
    """
    if config.draft_device != "auto":
        return find_device("draft_device", config.draft_device)
    if target[0].type == "cuda":
        devices = [torch.device("cuda", index) for index in range(torch.cuda.device_count())]
        return next((device for device in devices if device not in target), target[-1])
    return target[0]


def capacity(device: torch.device) -> int:
    """Return the total memory of a device in bytes; its present use must not decide where a layer lies."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    return int(psutil.virtual_memory().total)


def place(model: nn.Module, devices: Sequence[torch.device], sizes: Sequence[int]) -> dict[str, torch.device]:
    """Spread a model's layers, in order, so that each device holds weights in proportion to its memory.

    Args:
        model: a causal language model, on the meta device or any other.
        devices: at least one; the first also holds embeddings, last norm and head.
        sizes: [devices] memory of each, in any unit.

    Returns:
        The device of each module by the module's name; together the modules hold every parameter.
    """
    layers = decoder_layers(model)
    names = {module: name for name, module in model.named_modules()}
    weights = [_bytes(layer) for layer in layers]
    total = _bytes(model)
    bounds = [total * size / sum(sizes) for size in accumulate(sizes)][:-1]
    placed = dict.fromkeys(_around(model, "", layers), devices[0])
    filled = total - sum(weights)
    for layer, size in zip(layers, weights, strict=True):
        placed[names[layer]] = devices[bisect(bounds, filled + size / 2)]
        filled += size
    return placed


def shares(model: nn.Module, placed: dict[str, torch.device]) -> dict[torch.device, tuple[float, float]]:
    """Return each device's shares of a model's weights and of its layers' KV; each kind adds up to 1."""
    names, layers = {module: name for name, module in model.named_modules()}, decoder_layers(model)
    first = next(iter(placed.values()))
    parts = dict.fromkeys(placed.values(), (0.0, 0.0)) | {first: (1.0, 0.0)}
    for layer in layers:
        device, weight = placed[names[layer]], _bytes(layer) / _bytes(model)
        for holder, part, kv in ((first, -weight, 0.0), (device, weight, 1 / len(layers))):
            parts[holder] = parts[holder][0] + part, parts[holder][1] + kv
    return parts


def _around(module: nn.Module, prefix: str, inside: nn.Module) -> Iterator[str]:
    """Yield the names of the largest modules that neither contain a module nor lie inside it."""
    for name, child in module.named_children():
        if child is inside:
            continue
        if any(part is inside for part in child.modules()):
            yield from _around(child, f"{prefix}{name}.", inside)
        else:
            yield prefix + name


def _bytes(module: nn.Module) -> int:
    return sum(parameter.nbytes for parameter in module.parameters())
