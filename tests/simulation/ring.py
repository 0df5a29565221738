"""Consistent hashing of sessions, as Ray Serve's `ConsistentHashRouter` does it."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator

import numpy as np

NUM_NODES = 100
"""Virtual nodes of each replica."""


class Ring:
    """Replicas by number, each at `NUM_NODES` places of a ring.

    Args:
        seed: of the places.
    """

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._places = np.empty(0, np.uint64)
        self._numbers = np.empty(0, np.int64)

    def add(self, number: int) -> None:
        """Add a replica; sessions come to it from all others."""
        places = np.sort(np.array([_place(f"{self._seed}:{number}:{node}") for node in range(NUM_NODES)], np.uint64))
        indices = np.searchsorted(self._places, places)
        self._places = np.insert(self._places, indices, places)
        self._numbers = np.insert(self._numbers, indices, number)

    def remove(self, number: int) -> None:
        """Remove a replica; its sessions go to all others."""
        kept = self._numbers != number
        self._places, self._numbers = self._places[kept], self._numbers[kept]

    def walk(self, session: str) -> Iterator[int]:
        """Yield the number of each replica once, that of the session's own first."""
        start, seen = int(np.searchsorted(self._places, np.uint64(_place(session)), "right")), set[int]()
        for offset in range(len(self._places)):
            number = int(self._numbers[(start + offset) % len(self._numbers)])
            if number not in seen:
                seen.add(number)
                yield number


def _place(name: str) -> int:
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "big")
