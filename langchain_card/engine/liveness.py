"""Whether workers make progress, judged by how long their steps have taken so far. Idle is healthy."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from langchain_card.ports import Clock, Health

FIRST_SECONDS = 600.0
"""For a worker's first step, which may compile kernels or capture graphs."""
LEAST_SECONDS = 20.0
"""For any step: a machine may be busy with something else."""
TIMES = 10.0
"""A step may take so many times what steps of its size took at most."""
BETWEEN_SECONDS = 60.0
"""For a step to begin, where one is due."""


class StepWatch:
    """Times one worker's steps. One thread begins and ends them, any may ask.

    Args:
        clock: source of time.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._began: tuple[float, int] | None = None  # with the step's size
        self._slowest: dict[int, float] = {}  # seconds, by the bits of the size
        self._idle_since = clock()

    @contextlib.contextmanager
    def step(self, size: int) -> Iterator[None]:
        """A step of so many rows, at most."""
        began = self._clock()
        self._began = began, size
        try:
            yield
        finally:
            self._idle_since, self._began, bits = self._clock(), None, size.bit_length()
            self._slowest[bits] = max(self._idle_since - began, self._slowest.get(bits, 0.0))

    def expect(self) -> None:
        """There was no work, and now there is."""
        self._idle_since = self._clock()

    def health(self, due: bool = False) -> Health:
        """Of the worker, as far as its steps tell.

        Args:
            due: whether there is work, so that another step should begin soon where none is taken.
        """
        if (began := self._began) is not None:
            return Health("up", self._clock() - began[0], self.budget(began[1]))
        return Health("up", self._clock() - self._idle_since, BETWEEN_SECONDS) if due else Health()

    def budget(self, size: int) -> float:
        """Seconds that a step of this size may take: in proportion, where only smaller ones were seen."""
        known = [seconds * max(1.0, size / 2 ** (bits - 1)) for bits, seconds in [*self._slowest.items()]]
        return max(LEAST_SECONDS, TIMES * min(known)) if known else FIRST_SECONDS
