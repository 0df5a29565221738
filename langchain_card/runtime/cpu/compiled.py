"""Settings of numba for code that runs on rows: compilation and its cache."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeAlias

import numba
import numpy as np
from numba.core import event
from numba.core.ccallback import CFunc

from langchain_card.runtime.cpu import compilations

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


_functions = list[Any]()


def compiled(**options: Any) -> Callable[[Callable[..., Any]], Any]:
    """Return a decorator that compiles a function, without the GIL; the result is cached on disk if possible."""

    def compile_now(function: Callable[..., Any]) -> Any:
        try:
            found = numba.njit(nogil=True, cache=True, **options)(function)
        except RuntimeError:  # no writable cache
            return numba.njit(nogil=True, **options)(function)
        with contextlib.suppress(AttributeError):  # numba's own names may change
            _stamp_cache(found._cache._cache_file)
        _functions.append(found)
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


class _Counter(event.Listener):
    """Counts compilations of this package's functions: numba reports only those that no cache held."""

    def on_start(self, event: Any) -> None:
        if any(function is event.data["dispatcher"] for function in _functions):
            compilations.begin()

    def on_end(self, event: Any) -> None:
        pass


event.register("numba:compile", _Counter())  # type: ignore[no-untyped-call]


def _stamp_cache(file: Any) -> None:
    """Make numba's index of a function valid for the present state of all files of this folder."""
    file._source_stamp, load = _stamp(), file._load_index  # numba's stamp covers the function's own file only

    def load_index() -> Any:
        with contextlib.suppress(AttributeError, ImportError):  # an earlier version's index may name classes of its own
            return load()
        return {}

    file._load_index = load_index


# Sums may be split over vector lanes, the same way for every row; kinds of NaN and signs of zero do not matter.
row_wise = compiled(error_model="numpy", fastmath={"reassoc", "contract", "nnan", "nsz"})
