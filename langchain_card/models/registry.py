"""Values that are made once and shared by all their users."""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

V = TypeVar("V")


class Registry(Generic[V]):
    """A registry that counts the users of each key's value; the last `release` closes the value.

    Args:
        close: called with a value that has no users left.
    """

    def __init__(self, close: Callable[[V], None]) -> None:
        self._close = close
        self._lock = threading.Lock()
        self._making: dict[Hashable, threading.Lock] = {}
        self._values: dict[Hashable, V] = {}
        self._users: dict[Hashable, int] = {}

    def acquire(self, key: Hashable, make: Callable[[], V]) -> V:
        """Return the value of `key`, made by `make` if it has no users yet. Each call needs one `release`."""
        with self._lock:
            making = self._making.setdefault(key, threading.Lock())
        with making:
            with self._lock:
                if key in self._values:
                    self._users[key] += 1
                    return self._values[key]
            value = make()
            with self._lock:
                self._values[key], self._users[key] = value, 1
            return value

    def release(self, key: Hashable) -> None:
        """Release one use of the value of `key`."""
        with self._lock:
            self._users[key] -= 1
            if self._users[key]:
                return
            del self._users[key]
            value = self._values.pop(key)
        self._close(value)

    def __contains__(self, key: Hashable) -> bool:
        return key in self._values

    def __len__(self) -> int:
        return len(self._values)
