"""Read the int8 form of a model's weights (written by `models.convert`) into the layers that run it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn

from langchain_card.errors import CorruptModelError
from langchain_card.runtime.cpu.fused_layers import fuse_layers
from langchain_card.runtime.cpu.integer_layers import IntegerLinear, fuse_norm, split_by_layer
from langchain_card.runtime.threads import num_cores, use_threads

_SAME_INPUT = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))


def read_int8(model: Any, files: Iterable[Path], dtype: torch.dtype, *, fused: bool = True) -> None:
    """Load weights into an empty model: linear layers in int8 and the rest in `dtype`.

    Args:
        model: a model on the meta device, except for its buffers.
        files: safetensors in the int8 form.
        dtype: type of embeddings, norms and biases.
        fused: whether decoder layers of the common kind become one compiled call each.

    Raises:
        CorruptModelError: a tensor is missing or has another shape than the model's.
    """
    with ExitStack() as opened:
        handles = [opened.enter_context(safe_open(file, framework="pt")) for file in files]
        weights = {name: handle for handle in handles for name in handle.keys()}  # noqa: SIM118 (not a mapping)
        stacks = _stacks([name for name, _ in model.named_modules() if f"{name}.weight_int8" in weights])
        # Packing for the kernel is most of the time, and runs on one core.
        with ThreadPoolExecutor(num_cores(), initializer=use_threads, initargs=(1,)) as pool:
            packed = pool.map(lambda stack: _integer_layers(weights, stack), stacks)
            for stack, layers in zip(stacks, packed, strict=True):
                for name, layer in zip(stack, layers, strict=True):
                    model.set_submodule(name, layer)
        for name, module in list(model.named_modules()):
            _fill(module, name, weights, dtype)
            if (norm := fuse_norm(module)) is not None:
                model.set_submodule(name, norm)
    if fused:
        fuse_layers(model.get_decoder())


def _stacks(names: list[str]) -> list[tuple[str, ...]]:
    """Group the names of layers that read the same input."""
    stacks = []
    for name in names:
        parent, _, last = name.rpartition(".")
        group = next((group for group in _SAME_INPUT if last in group), (last,))
        members = tuple(f"{parent}.{member}" if parent else member for member in group)
        stack = members if all(member in names for member in members) else (name,)
        if name == stack[0]:
            stacks.append(stack)
    return stacks


def _tensor(weights: Mapping[str, Any], name: str) -> Tensor:
    """Read a tensor from the open file that holds it."""
    if name not in weights:
        raise CorruptModelError("weights", name, "is missing from the int8 weights", "remove the folder and load again")
    tensor: Tensor = weights[name].get_tensor(name)
    return tensor


def _integer_layers(weights: Mapping[str, Any], stack: tuple[str, ...]) -> Sequence[nn.Module]:
    parts = [_tensor(weights, f"{name}.weight_int8") for name in stack]
    scale = torch.cat([_tensor(weights, f"{name}.weight_scale") for name in stack])
    biases = [_tensor(weights, f"{name}.bias").float() for name in stack if f"{name}.bias" in weights]
    if len(biases) not in (0, len(stack)):
        raise CorruptModelError("weights", stack, "some of these layers have a bias and some have none")
    whole = IntegerLinear(torch.cat(parts), scale, torch.cat(biases) if biases else None)
    return [whole] if len(stack) == 1 else split_by_layer(whole, [len(part) for part in parts])


def _fill(module: nn.Module, name: str, weights: Mapping[str, Any], dtype: torch.dtype) -> None:
    """Set a module's own parameters."""
    for key, parameter in list(module.named_parameters(recurse=False)):
        full = f"{name}.{key}" if name else key
        if full not in weights:
            raise CorruptModelError(
                "weights", full, "is missing from the int8 weights", "remove the model and pull it again"
            )
        # A copy: a view would keep the whole file mapped, and counted as memory.
        tensor = _tensor(weights, full).to(dtype, copy=True)
        if tensor.shape != parameter.shape:
            raise CorruptModelError("weights", full, f"has shape {list(tensor.shape)}, not {list(parameter.shape)}")
        setattr(module, key, nn.Parameter(tensor, requires_grad=False))
