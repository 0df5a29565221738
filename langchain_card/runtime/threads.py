"""Share CPU threads between target and draft: together they never use more threads than there are cores."""

from __future__ import annotations

import os
import platform
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch


def num_cores() -> int:
    """Return the number of cores that this process may use: those it may run on, at most `OMP_NUM_THREADS`."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    threads = os.environ.get("OMP_NUM_THREADS", "").partition(",")[0]
    return min(cores, int(threads)) if threads.isdecimal() and int(threads) else cores


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


_own = threading.local()


@contextmanager
def single_threaded() -> Iterator[None]:
    """Run the calling thread alone, in compiled code and in torch; the threads of others stay unchanged.

    For work that is too small to share, and for threads that must not start a pool of torch: it would slow all others.
    """
    before, in_torch = getattr(_own, "count", None), torch.get_num_threads()
    use_threads(1)
    try:
        yield
    finally:
        _own.count = before
        torch.set_num_threads(in_torch)


def use_threads(count: int, *, in_torch: bool = True) -> None:
    """Set how many threads share the work of the calling one, in compiled code (`cpu.team`) and in torch.

    Args:
        count: number of threads.
        in_torch: False for models whose weights are in blocks: most of their work is in compiled code. Threads of torch
            that wait for the rest would keep the cores for milliseconds.
    """
    _own.count, wanted = count, count if in_torch else 1
    if torch.get_num_threads() != wanted:
        torch.set_num_threads(wanted)


def used_threads() -> int:
    """Return how many threads share the work of the calling one in compiled code."""
    return getattr(_own, "count", None) or torch.get_num_threads()
