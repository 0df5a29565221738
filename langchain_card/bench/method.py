"""What is measured of a method of decoding, and the seam that all of them have: ours and those of others."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import psutil
import torch

_OWN = Path("/proc/self")


@dataclass(frozen=True, slots=True)
class Run:
    """What a method made of prompts that it was given at once.

    Attributes:
        token_ids: of each answer.
        first: seconds until the first token of the first answer: mostly the reading of prompts.
        seconds: from there to the end of the last.
        tokens: of all answers, without the first of each.
        peak: bytes of the device's memory that the method's process held at most, weights and all.
        figures: by name what only some methods count: `accepted_length`, `acceptance`, `hit_rate`, `target_busy`,
            `draft_busy`, `schedule`.
    """

    token_ids: tuple[tuple[int, ...], ...]
    first: float
    seconds: float
    tokens: int
    peak: int = 0
    figures: Mapping[str, Any] = field(default_factory=dict)

    @property
    def speed(self) -> float:
        """Tokens per second after the first token; 0 where there were none."""
        return self.tokens / self.seconds if self.seconds > 0 else 0.0


class Method(Protocol):
    """A way to decode.

    Attributes:
        name: that users give.
        weights: what it runs on, in words.
    """

    name: str
    weights: str

    def run(self, prompts: Sequence[Sequence[int]], repeat: int) -> Run:
        """Answers prompts at once. What was learnt from texts under another `repeat` is not used."""


class PeakMemory:
    """The most memory that this process has held since `reset`; what processes of its own hold is not counted.

    Args:
        cuda: of all CUDA devices; else of the machine.
    """

    def __init__(self, *, cuda: bool) -> None:
        self._devices = range(torch.cuda.device_count() if cuda else 0)

    def reset(self) -> None:
        """From now on."""
        for index in self._devices:
            torch.cuda.reset_peak_memory_stats(index)
        with contextlib.suppress(OSError):  # where there is no such file the peak is what is held when it is read
            (_OWN / "clear_refs").write_text("5")

    def read(self) -> int:
        """In bytes."""
        if self._devices:
            return sum(torch.cuda.max_memory_allocated(index) for index in self._devices)
        try:
            lines = (_OWN / "status").read_text().splitlines()
            return next(1024 * int(line.split()[1]) for line in lines if line.startswith("VmHWM:"))
        except (OSError, StopIteration):
            return int(psutil.Process().memory_info().rss)
