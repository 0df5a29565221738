"""What is measured of a method of decoding, and the seam that all of them have: ours and those of others."""

from __future__ import annotations

import resource
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch

_OWN = Path("/proc/self")


@dataclass(frozen=True, slots=True)
class Run:
    """What a method made of prompts that it was given at once.

    Attributes:
        token_ids: of each answer.
        first: seconds until the first token of the first answer: mostly the reading of prompts.
        seconds: from there to the end of the last.
        tokens: of all answers, that came in these.
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

    def close(self) -> None:
        """Frees everything."""


class PeakMemory:
    """The most memory that this process has held since `reset`: of its CUDA devices, else of the machine."""

    def reset(self) -> None:
        """From now on."""
        if torch.cuda.is_available():
            for index in range(torch.cuda.device_count()):
                torch.cuda.reset_peak_memory_stats(index)
        try:
            (_OWN / "clear_refs").write_text("5")
        except OSError:  # the peak is that of the whole life, then
            return

    def read(self) -> int:
        """In bytes."""
        if torch.cuda.is_available():
            return sum(torch.cuda.max_memory_allocated(index) for index in range(torch.cuda.device_count()))
        try:
            lines = (_OWN / "status").read_text().splitlines()
            return next(1024 * int(line.split()[1]) for line in lines if line.startswith("VmHWM:"))
        except (OSError, StopIteration):
            return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
