"""Settings of numba for code that runs on rows: compilation, its cache, and the number of threads."""

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
from numba.core.ccallback import CFunc

Array: TypeAlias = np.ndarray[Any, np.dtype[np.float32]]
Bytes: TypeAlias = np.ndarray[Any, np.dtype[np.uint8]]
Levels: TypeAlias = np.ndarray[Any, np.dtype[np.int8]]
Integers: TypeAlias = np.ndarray[Any, np.dtype[np.int32]]
Slots: TypeAlias = np.ndarray[Any, np.dtype[np.int64]]
Numbers: TypeAlias = np.ndarray[Any, np.dtype[np.float64]]


@functools.cache
def _stamp() -> tuple[tuple[str, int, int], ...]:
    """Return a stamp of all files of this folder; code compiled under another stamp is not used."""
    files = [(path.name, path.stat()) for path in sorted(Path(__file__).parent.rglob("*.py"))]
    return tuple((name, stat.st_mtime_ns, stat.st_size) for name, stat in files)


def compiled(**options: Any) -> Callable[[Callable[..., Any]], Any]:
    """Return a decorator that compiles a function, without the GIL; the result is cached on disk if possible."""

    def compile_now(function: Callable[..., Any]) -> Any:
        try:
            found = numba.njit(nogil=True, cache=True, **options)(function)
        except RuntimeError:  # no writable cache
            return numba.njit(nogil=True, **options)(function)
        with contextlib.suppress(AttributeError):  # numba's own names may change
            _stamp_cache(found._cache._cache_file)
        return found

    return compile_now


def compiled_c(function: Callable[..., None], arguments: tuple[Any, ...]) -> Any:
    """Compile a function for calls by its `address`; the result is cached on disk if possible."""
    found: Any = CFunc(function, (arguments, numba.types.void), locals={}, options={"error_model": "numpy"})
    with contextlib.suppress(RuntimeError):  # no writable cache
        found.enable_caching()
        with contextlib.suppress(AttributeError):
            _stamp_cache(found._cache._cache_file)
    found.compile()
    return found


def _stamp_cache(file: Any) -> None:
    """Make numba's index of a function valid for the present state of all files of this folder."""
    file._source_stamp, load = _stamp(), file._load_index  # numba's stamp covers the function's own file only

    def load_index() -> Any:
        with contextlib.suppress(AttributeError, ImportError):  # an earlier version's index may name classes of its own
            return load()
        return {}

    file._load_index = load_index


_POOL = numba.get_num_threads()  # size of numba's pool, which NUMBA_NUM_THREADS may reduce
_own = threading.local()
_alone = threading.RLock()


@functools.cache
def _may_meet() -> bool:
    """Return whether several threads may use numba's pool at once, which its fallback layer does not allow."""
    with _alone:
        started = threading.Event()
        threading.Thread(target=_keep_a_pool, args=(started,), name="card-idle-pool", daemon=True).start()
        started.wait()
    kind: Any = numba
    return bool(kind.threading_layer() != "workqueue")


def _keep_a_pool(started: threading.Event) -> None:
    """Keep a second pool, which never works, so that threads of the first one wait asleep.

    GNU OpenMP has a pool for each thread that calls it. While all pools together have no more threads than the machine
    has cores, a thread that waits for others keeps its core for milliseconds, which another process may need: two
    processes side by side were up to 90 times slower than one (docs/LOG.md). With one thread more, it waits for
    microseconds and then sleeps, at the same speed.
    """
    try:
        numba.set_num_threads(2)
        compiled(parallel=True)(_touch)(np.zeros(2, np.int32))
    finally:
        started.set()
    threading.Event().wait()


def _touch(places: Integers) -> None:
    for i in numba.prange(len(places)):
        places[i] = 1


class cores:
    """A context that lets compiled code use as many threads as torch may use in the calling thread."""

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


# Sums may be split over vector lanes, the same way for every row; kinds of NaN and signs of zero do not matter.
row_wise = compiled(error_model="numpy", fastmath={"reassoc", "contract", "nnan", "nsz"})
