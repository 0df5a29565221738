"""Rarer garbage collections while models are loaded.

Imports and vocabularies make a million objects, and hardly any of them is garbage. Looking through them again and again
took a quarter of the time from `CARDChatModel()` to the first token (docs/LOG.md, 2026-11-26).
"""

from __future__ import annotations

import gc
import threading

_MANY_OBJECTS = 100_000


class _RareCollections:
    """A context in which the process collects its youngest garbage after `_MANY_OBJECTS` new objects.

    Contexts may be nested and overlap; the last one to end restores the threshold, unless others have changed it.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._count = 0
        self._usual = gc.get_threshold()

    @property
    def _rare(self) -> tuple[int, int, int]:
        return (_MANY_OBJECTS, *self._usual[1:])

    def __enter__(self) -> None:
        with self._lock:
            self._count += 1
            if self._count == 1:
                self._usual = gc.get_threshold()
                if 0 < self._usual[0] < _MANY_OBJECTS:  # 0 turns collections off
                    gc.set_threshold(*self._rare)

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._count -= 1
            if not self._count and gc.get_threshold() == self._rare:
                gc.set_threshold(*self._usual)


rare_collections = _RareCollections()
