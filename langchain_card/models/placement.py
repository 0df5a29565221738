"""Which part of a model lies on which of several devices: a device map for accelerate."""

from __future__ import annotations

from bisect import bisect
from collections.abc import Iterator, Sequence
from itertools import accumulate

import psutil
import torch
from torch import nn

from langchain_card.runtime.families import decoder_layers


def capacity(device: torch.device) -> int:
    """All memory of a device, used or not, in bytes: what is used now must not decide where a layer lies."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    return int(psutil.virtual_memory().total)


def place(model: nn.Module, devices: Sequence[torch.device], sizes: Sequence[int]) -> dict[str, torch.device]:
    """Spreads a model's layers, in order, so that each device holds weights in proportion to its size.

    Args:
        model: a causal language model, on the meta device or any other.
        devices: at least one; the first also holds all that is no layer: embeddings, last norm and head.
        sizes: [devices] of their memory, in any unit.

    Returns:
        The device of each module, by its name; every parameter lies in one of them.
    """
    layers = decoder_layers(model)
    names = {module: name for name, module in model.named_modules()}
    weights = [_bytes(layer) for layer in layers]
    total = _bytes(model)
    bounds = [total * size / sum(sizes) for size in accumulate(sizes)][:-1]
    found = dict.fromkeys(_around(model, "", layers), devices[0])
    filled = total - sum(weights)
    for layer, size in zip(layers, weights, strict=True):
        found[names[layer]] = devices[bisect(bounds, filled + size / 2)]
        filled += size
    return found


def shares(model: nn.Module, placed: dict[str, torch.device]) -> dict[torch.device, tuple[float, float]]:
    """By device, the parts of a model's weights and of its layers' KV that it holds; each add up to 1."""
    names, layers = {module: name for name, module in model.named_modules()}, decoder_layers(model)
    first = next(iter(placed.values()))
    found = dict.fromkeys(placed.values(), (0.0, 0.0)) | {first: (1.0, 0.0)}
    for layer in layers:
        device, weight = placed[names[layer]], _bytes(layer) / _bytes(model)
        for holder, part, kv in ((first, -weight, 0.0), (device, weight, 1 / len(layers))):
            found[holder] = found[holder][0] + part, found[holder][1] + kv
    return found


def _around(module: nn.Module, prefix: str, inside: nn.Module) -> Iterator[str]:
    """Names of the largest modules that lie beside one."""
    for name, child in module.named_children():
        if child is inside:
            continue
        if any(part is inside for part in child.modules()):
            yield from _around(child, f"{prefix}{name}.", inside)
        else:
            yield prefix + name


def _bytes(module: nn.Module) -> int:
    return sum(parameter.nbytes for parameter in module.parameters())
