"""`Adapters`: LoRA adapters (arXiv 2106.09685) on a loaded model, of which each row of a step may have one."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn

from langchain_card.errors import InvalidInputError

NONE = -1
"""Number of a row without an adapter."""


class LowRankPair(NamedTuple):
    """What an adapter adds to a linear layer: the product `b @ a`.

    Attributes:
        a: [rank, in_features].
        b: [out_features, rank], with the adapter's scale.
    """

    a: Tensor
    b: Tensor


@dataclass(frozen=True, slots=True, eq=False)
class Adapter:
    """An adapter.

    Attributes:
        name: the user's name of it.
        digest: hash of its files.
        pairs: by the name of a linear layer in transformers' model.
    """

    name: str
    digest: str
    pairs: Mapping[str, LowRankPair]


class _Step(NamedTuple):
    """The step that a thread runs, and its rows."""

    adapters: Adapters
    rows: Tensor


class _Steps(threading.local):
    now: _Step | None = None


_steps = _Steps()


class Stacked(NamedTuple):
    """The adapters of one linear layer, padded with zeros to one rank.

    Attributes:
        a: [adapters, rank, in_features].
        b: [adapters, rank, out_features].
    """

    a: Tensor
    b: Tensor


TakeAdapters: TypeAlias = Callable[[str, int, int], Stacked | None]
"""Takes the adapters of a linear layer by its name, and the numbers of its features and outputs; None for none."""


class Adapters:
    """The adapters of a model. Layers that are not compiled get hooks, until `remove`; the model may be shared.

    Args:
        model: the model; its layers may be compiled (`runtime.cpu.fused_layers`).
        adapters: at least one.

    Raises:
        InvalidInputError: an adapter is that of another model.
    """

    def __init__(self, model: Any, adapters: Sequence[Adapter]) -> None:
        self._numbers = {adapter.name: number for number, adapter in enumerate(adapters)}
        self._digests = {adapter.name: adapter.digest for adapter in adapters}
        self.fused = dict[nn.Module, Any]()
        self._left = {layer: [adapter.pairs.get(layer) for adapter in adapters] for layer in _layers(adapters)}
        modules: dict[str, Any] = dict(model.named_modules())
        for path, compiled in modules.items():
            if hasattr(compiled, "lay_out_adapters"):
                self.fused.update(compiled.lay_out_adapters(path.rpartition(".")[0], self._take))
        self._handles = list[Any]()
        for layer, pairs in self._left.items():
            module: Any = modules.get(layer)
            if ".layers." not in layer or ".experts." in layer or not hasattr(module, "in_features"):
                first = next(adapter.name for adapter, pair in zip(adapters, pairs, strict=True) if pair)
                hint = "adapters of linear layers within the decoder's layers are supported"
                raise InvalidInputError(f"adapters[{first!r}]", layer, "is no such layer of this model", hint)
            stacked = self._stack(layer, pairs, module.in_features, module.out_features)
            weight = next(module.parameters(), None)
            device, dtype = (model.device, model.dtype) if weight is None else (weight.device, model.dtype)
            stacked = Stacked(*(part.to(device, dtype) for part in stacked))
            self._handles.append(module.register_forward_hook(self._hook(*stacked)))
        del self._left

    def remove(self) -> None:
        """Remove the hooks."""
        for handle in self._handles:
            handle.remove()

    def number(self, name: str) -> int:
        """Return the number of an adapter, `NONE` for ""."""
        return self._numbers[name] if name else NONE

    def digest(self, name: str) -> str:
        """Return the hash of an adapter's files, "" for ""."""
        return self._digests[name] if name else ""

    @contextlib.contextmanager
    def on(self, rows: Tensor) -> Iterator[None]:
        """Run the passes of this thread with these adapters: [rows] numbers, on the model's device."""
        _steps.now = _Step(self, rows)
        try:
            yield
        finally:
            _steps.now = None

    def _take(self, layer: str, features: int, outputs: int) -> Stacked | None:
        """Return what compiled code adds to a linear layer, float32; None for nothing."""
        pairs = self._left.pop(layer, None)
        return None if pairs is None else self._stack(layer, pairs, features, outputs)

    def _stack(self, layer: str, pairs: Sequence[LowRankPair | None], features: int, outputs: int) -> Stacked:
        rank = max(len(pair.a) for pair in pairs if pair is not None)
        dtype = torch.promote_types(torch.float32, next(pair.b.dtype for pair in pairs if pair is not None))
        a, b = (torch.zeros(len(pairs), rank, size, dtype=dtype) for size in (features, outputs))
        for number, (name, pair) in enumerate(zip(self._numbers, pairs, strict=True)):
            if pair is None:
                continue
            shapes = (pair.a.shape[1], pair.b.shape[0]), (features, outputs)
            if shapes[0] != shapes[1]:
                limit = f"is of {shapes[0]} features in and out, where the model has {shapes[1]}"
                raise InvalidInputError(f"adapters[{name!r}]", layer, limit, "take the adapter's own base model")
            a[number, : len(pair.a)], b[number, : len(pair.a)] = pair.a, pair.b.T
        return Stacked(a, b)

    def _hook(self, a: Tensor, b: Tensor) -> Any:
        def add(module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor | None:
            step = _steps.now
            if step is None or step.adapters is not self:
                return None
            x = inputs[0].reshape(-1, a.shape[2])
            numbers = torch.arange(len(a), device=x.device)
            mask = (step.rows.to(x.device)[:, None] == numbers).to(x.dtype)  # [rows, adapters]
            inner = (x @ a.flatten(0, 1).T).view(len(x), len(a), -1) * mask[:, :, None]
            return output + (inner.flatten(1) @ b.flatten(0, 1)).view(output.shape)

        return add


def _layers(adapters: Sequence[Adapter]) -> list[str]:
    return sorted({layer for adapter in adapters for layer in adapter.pairs})


def rows_with_adapters(module: nn.Module) -> tuple[Any, Tensor] | None:
    """Return the laid out adapters of a compiled module and the rows' numbers; None if no row of the step has one."""
    step = _steps.now
    return None if step is None or module not in step.adapters.fused else (step.adapters.fused[module], step.rows)
