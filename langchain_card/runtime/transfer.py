"""Copy what the host has made to a device, without a wait for the device."""

from __future__ import annotations

import torch
from torch import Tensor


def to_device(made: Tensor, device: torch.device) -> Tensor:
    """Return a tensor of the CPU on a device.

    On CUDA it is copied from pinned memory, in the order of the current stream. From other memory, the host would wait
    for all that is queued there.
    """
    return made if device.type == "cpu" else made.pin_memory().to(device, non_blocking=True)
