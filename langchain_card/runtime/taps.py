"""`Taps`: states of a model, copied between its layers while a pass runs."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from langchain_card.errors import check_range
from langchain_card.runtime.families import decoder_layers


class _Passes(threading.local):
    now: Taps | None = None


_passes = _Passes()


class Taps:
    """Copies of what some layers of a model put out. The layers have hooks until `remove`; the model may be shared.

    Args:
        model: a causal language model of transformers; its layers may be compiled (`runtime.cpu.fused_layers`).
        layers: indexes of layers, in ascending order.

    Raises:
        InvalidInputError: the model has no such layer.
    """

    def __init__(self, model: Any, layers: Sequence[int]) -> None:
        found = decoder_layers(model)
        for layer in layers:
            check_range("taps", layer, 0, len(found) - 1, "each is the index of a layer")
        self._places = {layer: place for place, layer in enumerate(layers)}
        self._states: Tensor | None = None
        self._device: torch.device = model.device
        self._handles = [found[layer].register_forward_hook(self._hook(layer)) for layer in layers]

    @contextlib.contextmanager
    def on(self, states: Tensor | None = None) -> Iterator[None]:
        """Copy states in the passes of this thread.

        Args:
            states: [taps, rows, features], where they go; by default they get new memory in each pass.
        """
        _passes.now, self._states = self, states
        try:
            yield
        finally:
            _passes.now = None

    @property
    def states(self) -> Tensor:
        """The states of the last pass, [taps, rows, features], on the model's device."""
        assert self._states is not None, "no pass has run"
        return self._states

    @property
    def layers(self) -> list[int]:
        """The tapped layers."""
        return [*self._places]

    def room(self, rows: Tensor) -> Tensor:
        """Return where states of a pass go, [taps, rows, features], by its rows [rows, features]."""
        if self._states is None:
            self._states = torch.empty(len(self._places), *rows.shape, dtype=rows.dtype, device=self._device)
        return self._states

    def remove(self) -> None:
        """Remove the hooks."""
        for handle in self._handles:
            handle.remove()

    def _hook(self, layer: int) -> Any:
        def take(module: nn.Module, inputs: Any, output: Any) -> None:
            if _passes.now is self:
                rows = (output if isinstance(output, Tensor) else output[0])[0]
                self.room(rows)[self._places[layer]].copy_(rows)

        return take


def taps_of_pass() -> Taps | None:
    """Return the taps that this thread's pass has, if any."""
    return _passes.now
