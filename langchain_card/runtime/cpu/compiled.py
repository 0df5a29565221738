"""How numba compiles what runs on rows, and on how many threads it runs."""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeAlias

import numba
import numpy as np
import torch

Array: TypeAlias = np.ndarray[Any, np.dtype[np.float32]]
Slots: TypeAlias = np.ndarray[Any, np.dtype[np.int64]]
Numbers: TypeAlias = np.ndarray[Any, np.dtype[np.float64]]


@functools.cache
def _stamp() -> tuple[tuple[str, int, int], ...]:
    """Tells versions of these files apart: what was compiled of others stays behind."""
    files = [(path.name, path.stat()) for path in sorted(Path(__file__).parent.glob("*.py"))]
    return tuple((name, stat.st_mtime_ns, stat.st_size) for name, stat in files)


def compiled(**options: Any) -> Callable[[Callable[..., Any]], Any]:
    """Compiles a function that leaves Python's lock; what was compiled is kept on disk, where there is a place."""

    def compile_now(function: Callable[..., Any]) -> Any:
        try:
            found = numba.njit(nogil=True, cache=True, **options)(function)
        except RuntimeError:  # no such place
            return numba.njit(nogil=True, **options)(function)
        with contextlib.suppress(AttributeError):  # numba itself looks at the function's own file only
            found._cache._cache_file._source_stamp = _stamp()
        return found

    return compile_now


_POOL = numba.get_num_threads()  # its size, which NUMBA_NUM_THREADS may have made smaller
_own = threading.local()
_alone = threading.RLock()


@functools.cache
def _may_meet() -> bool:
    """Whether several threads may use the pool at once; numba's own fallback has none of its better ones' care."""
    with _alone:
        compiled(parallel=True)(_start)(2)
    kind: Any = numba
    return bool(kind.threading_layer() != "workqueue")


def _start(count: int) -> None:
    for _ in numba.prange(count):
        pass


class cores:
    """Says how many threads compiled code may use meanwhile: as many as torch may in the calling one."""

    def __enter__(self) -> int:
        self._threads = min(torch.get_num_threads(), _POOL)
        if self._threads > 1:
            if not _may_meet():
                _alone.acquire()
            if getattr(_own, "threads", 0) != self._threads:
                numba.set_num_threads(self._threads)
                _own.threads = self._threads
        return self._threads

    def __exit__(self, *_: object) -> None:
        if self._threads > 1 and not _may_meet():
            _alone.release()


# Sums may be split over vector lanes, the same way for every row; nobody asks which NaN or zero it was.
row_wise = compiled(error_model="numpy", fastmath={"reassoc", "contract", "nnan", "nsz"})
