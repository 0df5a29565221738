"""How many CPU threads each side may use: never more than there are cores, both sides together."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch


def num_cores() -> int:
    """Cores that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class ThreadPlan:
    """Threads per side.

    Args:
        target_on_cpu, draft_on_cpu: where the two models run.
        cores: cores to share.
    """

    def __init__(self, *, target_on_cpu: bool, draft_on_cpu: bool, cores: int | None = None) -> None:
        self._both = target_on_cpu and draft_on_cpu
        self._cores = cores or num_cores()

    def target(self, schedule: str) -> int:
        """Threads of a target step."""
        return max(1, self._cores - self._cores // 2) if self._both and schedule == "parallel" else self._cores

    def draft(self, schedule: str) -> int:
        """Threads of a draft step."""
        return max(1, self._cores // 2) if self._both and schedule == "parallel" else self._cores


@contextmanager
def single_threaded() -> Iterator[None]:
    """One intra-op thread for the caller; the others' pools are left alone.

    For what is too small to be shared, and for threads that must not start a pool of their own: that would slow every
    other thread's down.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def use_threads(count: int) -> None:
    """Sets the calling thread's number of intra-op threads."""
    if torch.get_num_threads() != count:
        torch.set_num_threads(count)
