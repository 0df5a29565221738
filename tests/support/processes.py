"""Wait for a condition; find the processes that tests started, and those that have ended."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable

import psutil


def wait_until(condition: Callable[[], bool], seconds: float = 20.0) -> float:
    """Wait for a condition and return the seconds that this took; fail after `seconds`."""
    start = time.monotonic()
    while not condition():
        assert time.monotonic() - start < seconds, "the condition never held"
        time.sleep(0.005)
    return time.monotonic() - start


def gone(pid: int) -> bool:
    """Return whether a process has ended; a zombie that its parent has not waited for has ended too."""
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def child_processes() -> set[psutil.Process]:
    """Return the processes that this process has started, without those of `multiprocessing`, which may stay."""
    started = set()
    for child in psutil.Process().children():
        with contextlib.suppress(psutil.Error):  # a child that has just ended has no command line
            if "multiprocessing" not in " ".join(child.cmdline()):
                started.add(child)
    return started
