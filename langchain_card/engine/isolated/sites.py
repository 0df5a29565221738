"""The parts of a machine that replicas of an engine share out: cores and GPUs."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from langchain_card.config import EngineConfig
from langchain_card.errors import InvalidInputError

VISIBLE = "CUDA_VISIBLE_DEVICES"


@dataclass(frozen=True, slots=True)
class Site:
    """The part of the machine that a process may use.

    Attributes:
        cores: numbers of its cores; () for those of this process.
        gpus: its GPUs in the terms of `CUDA_VISIBLE_DEVICES`; None for those of this process.
    """

    cores: tuple[int, ...] = ()
    gpus: str | None = None

    @property
    def environment(self) -> dict[str, str]:
        """Variables of the process's environment."""
        return {} if self.gpus is None else {VISIBLE: self.gpus}


def split(config: EngineConfig) -> list[Site]:
    """Return a part of this machine for each replica, equal in size, with no core and no GPU in two of them.

    Raises:
        InvalidInputError: there are fewer cores or GPUs than replicas, or the devices are named one by one.
    """
    if config.replicas == 1:
        return [Site()]
    on_gpus = config.device != "cpu" and torch.cuda.is_available()
    if config.device not in ("auto", "cpu", "cuda"):
        limit = f"names its devices, where {config.replicas} replicas have one each"
        raise InvalidInputError("device", config.device, limit, 'use "auto" or "cpu"; CUDA_VISIBLE_DEVICES limits GPUs')
    cores = [*map(str, sorted(os.sched_getaffinity(0)))]
    parts = _parts("cores", cores, config.replicas)
    gpus = _parts("GPUs", _visible(), config.replicas) if on_gpus else None
    return [
        Site(tuple(map(int, part)), None if gpus is None else ",".join(gpus[number]))
        for number, part in enumerate(parts)
    ]


def _visible() -> list[str]:
    named = os.environ.get(VISIBLE)
    count = torch.cuda.device_count()
    return [*map(str, range(count))] if named is None else [name.strip() for name in named.split(",")][:count]


def _parts(what: str, names: Sequence[str], count: int) -> list[Sequence[str]]:
    size = len(names) // count
    if not size:
        limit = f"must be {len(names)} at most: this process may use {len(names)} {what}"
        raise InvalidInputError("replicas", count, limit)
    return [names[number * size : (number + 1) * size] for number in range(count)]
