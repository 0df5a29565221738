"""Share CPU threads between target and draft: together they never use more threads than there are cores."""

from __future__ import annotations

import os
import platform
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch


def num_cores() -> int:
    """Return the number of cores that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def processor() -> str:
    """Return the name of the processor."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


class ThreadPlan:
    """The threads of target and draft.

    Args:
        target_on_cpu, draft_on_cpu: whether each model runs on the CPU.
        cores: number of cores to share; None for all.
    """

    def __init__(self, *, target_on_cpu: bool, draft_on_cpu: bool, cores: int | None = None) -> None:
        self._both = target_on_cpu and draft_on_cpu
        self._cores = cores or num_cores()

    def target(self, schedule: str) -> int:
        """Return the threads of a target step."""
        return max(1, self._cores - self._cores // 2) if self._both and schedule == "parallel" else self._cores

    def draft(self, schedule: str) -> int:
        """Return the threads of a draft step."""
        return max(1, self._cores // 2) if self._both and schedule == "parallel" else self._cores


@contextmanager
def single_threaded() -> Iterator[None]:
    """Run the calling thread with one intra-op thread; the pools of other threads stay unchanged.

    For work that is too small to share, and for threads that must not start a pool: it would slow all other pools.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def use_threads(count: int) -> None:
    """Set the calling thread's number of intra-op threads."""
    if torch.get_num_threads() != count:
        torch.set_num_threads(count)
