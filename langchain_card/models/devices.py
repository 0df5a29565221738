"""Which devices a configuration means on this machine."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from langchain_card.config import EngineConfig
from langchain_card.errors import DeviceError


def find_device(name: str, asked: str) -> torch.device:
    """The device that `asked` means here; `"auto"` is CUDA when there is one, else the CPU."""
    if asked == "auto":
        asked = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(asked)
    except RuntimeError as error:
        raise DeviceError(name, asked, "is not a device", 'use "auto", "cpu", "cuda" or "cuda:1"') from error
    if device.type == "cuda" and not (torch.cuda.is_available() and (device.index or 0) < torch.cuda.device_count()):
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        raise DeviceError(name, asked, f"this machine has {count} CUDA devices", 'use "auto" or "cpu"')
    if device.type not in ("cpu", "cuda"):
        raise DeviceError(name, asked, "only CPU and CUDA devices are supported", 'use "auto" or "cpu"')
    return torch.device("cuda", device.index or 0) if device.type == "cuda" else device  # equal when they are one


def find_devices(name: str, asked: str) -> list[torch.device]:
    """The device, or the CUDA devices between commas, that `asked` means here."""
    devices = [find_device(name, part.strip()) for part in asked.split(",")]
    if len(devices) > 1 and (len(set(devices)) < len(devices) or any(device.type != "cuda" for device in devices)):
        raise DeviceError(name, asked, "layers spread over CUDA devices that are all different", 'use "cuda:0,cuda:1"')
    return devices


def draft_device(config: EngineConfig, target: Sequence[torch.device]) -> torch.device:
    """Where the draft runs: by default on a CUDA device that the target leaves free, else with the target.

    Args:
        config: of the engine.
        target: devices of the target.
    """
    if config.draft_device != "auto":
        return find_device("draft_device", config.draft_device)
    if target[0].type == "cuda":
        devices = [torch.device("cuda", index) for index in range(torch.cuda.device_count())]
        return next((device for device in devices if device not in target), target[-1])
    return target[0]
