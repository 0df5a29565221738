"""Compilations of kernels in this process, counted as they begin. Imports no compiler."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

_begun = 0
_watchers = list[Callable[[], None]]()


def num_begun() -> int:
    """Return how many kernels this process began to compile because no cache held them."""
    return _begun


def begin() -> None:
    """Count a compilation that begins, and call the watchers."""
    global _begun
    _begun += 1  # under the compiler's lock
    for watcher in [*_watchers]:
        watcher()


@contextmanager
def watched(watcher: Callable[[], None]) -> Iterator[None]:
    """Call `watcher`, on the compiling thread, whenever a compilation begins while the context is open."""
    _watchers.append(watcher)
    try:
        yield
    finally:
        _watchers.remove(watcher)
