"""The interface of the methods that `langchain-card bench` compares, and what it measures of a run."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import psutil
import torch

_PROC = Path("/proc")


@dataclass(frozen=True, slots=True)
class Run:
    """One run of a method over a batch of prompts.

    Attributes:
        token_ids: of each answer.
        first: seconds until the first token of the first answer, mostly spent on prefill.
        seconds: from the first token to the end of the last answer.
        tokens: generated in `seconds`: all tokens but those of the first step.
        gap: longest time without a new token after the first, in seconds.
        peak: most bytes of memory that the method's process held, weights included.
        figures: statistics that only some methods report: `accepted_length`, `acceptance`, `hit_rate`, `target_busy`,
            `draft_busy`, `schedule`.
    """

    token_ids: tuple[tuple[int, ...], ...]
    first: float
    seconds: float
    tokens: int
    gap: float = 0.0
    peak: int = 0
    figures: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def of_steps(
        cls,
        token_ids: tuple[tuple[int, ...], ...],
        begun: float,
        ended: Sequence[float],
        first_tokens: int,
        figures: Mapping[str, Any] | None = None,
    ) -> Run:
        """Return a run from the times of its steps.

        Args:
            token_ids: of each answer.
            begun: time at which the prompts were passed.
            ended: times at which the steps ended.
            first_tokens: tokens of the first step.
            figures: see the class.
        """
        tokens = sum(map(len, token_ids)) - first_tokens
        return cls(token_ids, ended[0] - begun, ended[-1] - ended[0], tokens, longest_gap(ended), figures=figures or {})

    @property
    def whole(self) -> float:
        """Seconds from the prompt to the end of the last answer."""
        return self.first + self.seconds

    @property
    def speed(self) -> float:
        """Tokens per second after the first token; 0 if no time was measured."""
        return self.tokens / self.seconds if self.seconds > 0 else 0.0


@dataclass(frozen=True, slots=True)
class Served:
    """An answer that was written beside others.

    Attributes:
        token_ids: of the answer.
        sent, first, ended: times at which the prompt was sent, and the first and the last token came; seconds.
    """

    token_ids: tuple[int, ...]
    sent: float
    first: float
    ended: float

    @property
    def speed(self) -> float:
        """Tokens per second from the prompt to the last token."""
        return len(self.token_ids) / (self.ended - self.sent)

    def tokens_until(self, time: float) -> float:
        """Return how many tokens had been written by then; the tokens after the first one came at an even pace."""
        if time >= self.ended:
            return len(self.token_ids)
        if time < self.first:
            return 0
        return 1 + (len(self.token_ids) - 1) * (time - self.first) / (self.ended - self.first)


def longest_gap(times: Iterable[float]) -> float:
    """Return the longest time between two of `times`, which rise; 0 if there are fewer than two."""
    return max((after - before for before, after in itertools.pairwise(times)), default=0.0)


class Method(Protocol):
    """A way to decode.

    Attributes:
        name: as users write it.
        weights: number format of the weights, in words.
    """

    name: str
    weights: str

    def run(self, prompts: Sequence[Sequence[int]], max_tokens: int, repeat: int) -> Run:
        """Answer a batch of prompts with at most `max_tokens` each. Texts of another `repeat` are not reused."""


class PeakMemory:
    """The peak memory of a process since `reset`, without its child processes.

    Args:
        cuda: True measures the memory of all CUDA devices that this process uses, False that of the machine.
        pid: of another process; None for this one.
    """

    def __init__(self, *, cuda: bool, pid: int | None = None) -> None:
        self._pid, self._folder = pid, _PROC / ("self" if pid is None else str(pid))
        self._devices = range(torch.cuda.device_count() if cuda else 0)

    def reset(self) -> None:
        """Start a new measurement."""
        for index in self._devices:
            torch.cuda.reset_peak_memory_stats(index)
        with contextlib.suppress(OSError):  # without this file, `read` returns the current memory
            (self._folder / "clear_refs").write_text("5")

    def read(self) -> int:
        """Return the peak in bytes."""
        if self._devices:
            return sum(torch.cuda.max_memory_allocated(index) for index in self._devices)
        try:
            lines = (self._folder / "status").read_text().splitlines()
            return next(1024 * int(line.split()[1]) for line in lines if line.startswith("VmHWM:"))
        except (OSError, StopIteration):
            return int(psutil.Process(self._pid).memory_info().rss)
