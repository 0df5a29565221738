"""Tensors of simulated devices; their numbers lie in the host's memory."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from tests.simulation.cuda import state
from tests.simulation.cuda.memory import Block
from tests.simulation.cuda.streams import Stream


class DeviceTensor(torch.Tensor):
    """A tensor of a simulated device.

    Attributes:
        host: the host's tensor with its numbers.
        place: its device.
        block: its memory.
    """

    host: Tensor
    place: torch.device
    block: Block

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        """The device."""
        return self.place

    @property
    def is_cuda(self) -> bool:  # type: ignore[override]
        """Whether it lies on a CUDA device."""
        return True

    @property
    def is_cpu(self) -> bool:  # type: ignore[override]
        """Whether the CPU could use it."""
        return False

    def record_stream(self, stream: Stream) -> None:  # type: ignore[override]
        """Let the memory go back only when a stream has done what is queued."""
        self.block.uses.kept.add(stream.id)

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Hand a call to the simulation."""
        return state.active().call(func, args, kwargs or {})


def place(host: Tensor, device: torch.device, block: Block) -> DeviceTensor:
    """Return a tensor on a device with the host's numbers."""
    made: DeviceTensor = torch.Tensor._make_subclass(DeviceTensor, host, False)
    made.host, made.place, made.block = host, device, block
    return made
