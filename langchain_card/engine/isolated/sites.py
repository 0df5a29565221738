"""The parts of a machine that replicas of an engine share out: cores and GPUs."""

from __future__ import annotations

import itertools
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

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
    """Return a part of this machine for each replica, with no core and no GPU in two of them.

    Raises:
        InvalidInputError: there are fewer cores or GPUs than replicas, or the devices are named one by one.
    """
    if config.replicas == 1:
        return [Site()]
    for field in ("device", "draft_device"):
        if (device := getattr(config, field)) not in ("auto", "cpu", "cuda"):
            limit = f"names its devices, where {config.replicas} replicas have devices of their own"
            raise InvalidInputError(field, device, limit, f'use "auto" or "cpu"; {VISIBLE} limits the GPUs')
    on_gpus = torch.cuda.is_available() and {config.device, config.draft_device} != {"cpu"}
    gpus = _parts("GPUs", _visible(), config.replicas) if on_gpus else None
    if not hasattr(os, "sched_getaffinity"):  # not on Linux: all replicas run on all cores
        cores: list[Sequence[str]] = [()] * config.replicas
    else:
        cores = _parts("cores", sorted(map(str, os.sched_getaffinity(0)), key=_place), config.replicas)
    return [
        Site(tuple(map(int, part)), None if gpus is None else ",".join(gpus[number]))
        for number, part in enumerate(cores)
    ]


def _visible() -> list[str]:
    named = os.environ.get(VISIBLE)
    if named is None:
        return [*map(str, range(torch.cuda.device_count()))]
    return [name.strip() for name in named.split(",") if name.strip()]


def _place(core: str) -> tuple[int, ...]:
    """Return the processor, the physical core and the number of a core: threads of one physical core stay together."""
    folder = Path(f"/sys/devices/system/cpu/cpu{core}/topology")
    try:
        places = [int((folder / name).read_text()) for name in ("physical_package_id", "core_id")]
    except (OSError, ValueError):
        places = [0, 0]
    return (*places, int(core))


def _parts(what: str, names: Sequence[str], count: int) -> list[Sequence[str]]:
    """Split names into parts, of which the first are longer by one where the number does not divide."""
    if len(names) < count:
        limit = f"must be {len(names)} at most: this process may use {len(names)} {what}"
        raise InvalidInputError("replicas", count, limit)
    size, more = divmod(len(names), count)
    ends = [number * size + min(number, more) for number in range(count + 1)]
    return [names[first:last] for first, last in itertools.pairwise(ends)]
