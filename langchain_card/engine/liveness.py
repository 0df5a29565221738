"""Liveness checks: steps that take too long, and an engine's process that falls silent. An idle worker is healthy."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from langchain_card.core.workers import Life
from langchain_card.ports import Clock, Health

FIRST_STEP_SECONDS = 600.0
"""Limit for a worker's first step, which may compile kernels."""
MIN_STEP_SECONDS = 20.0
"""Smallest limit for a step: the machine may be busy with something else."""
SLOWDOWN = 10.0
"""Factor by which a step may exceed the slowest step of its size so far."""
STEP_DUE_SECONDS = 60.0
"""Limit for a step to begin once there is work for it."""
PROCESS_START_SECONDS = 60.0
"""Extra time that a new process has until its first message."""
GRACE_SECONDS = 1.5
"""Extra time for a silent process: this process may have been suspended together with it (Ctrl-Z, a paused machine)."""
BAD_HEARTBEATS = 2
"""Consecutive heartbeats with a hanging or lost target after which the process is killed."""


class StepWatch:
    """A timer of one worker's steps. One thread runs the steps; any thread may read the health.

    Args:
        clock: source of time.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._began: tuple[float, int] | None = None  # start time and size of the current step
        self._slowest: dict[int, float] = {}  # seconds, by the bit length of the size
        self._idle_since = clock()

    @contextlib.contextmanager
    def step(self, size: int) -> Iterator[None]:
        """Time a step of at most `size` rows."""
        began = self._clock()
        self._began = began, size
        try:
            yield
        finally:
            self._idle_since, self._began, bits = self._clock(), None, size.bit_length()
            self._slowest[bits] = max(self._idle_since - began, self._slowest.get(bits, 0.0))

    def expect(self) -> None:
        """Note that work has arrived for an idle worker."""
        self._idle_since = self._clock()

    def health(self, due: bool = False) -> Health:
        """Return the worker's health, judged by its steps.

        Args:
            due: whether there is work, so that the next step should begin soon.
        """
        if (began := self._began) is not None:
            return Health("up", self._clock() - began[0], self.budget(began[1]))
        return Health("up", self._clock() - self._idle_since, STEP_DUE_SECONDS) if due else Health()

    def budget(self, size: int) -> float:
        """Return the seconds that a step may take; times of smaller steps are scaled up to `size`."""
        known = [seconds * max(1.0, size / 2 ** (bits - 1)) for bits, seconds in [*self._slowest.items()]]
        return max(MIN_STEP_SECONDS, SLOWDOWN * min(known)) if known else FIRST_STEP_SECONDS


class ProcessWatch:
    """A monitor that decides when an engine's process must be killed. Each process has its own.

    Args:
        clock: source of time.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._last_message = clock() + PROCESS_START_SECONDS
        self._grace_ends: float | None = None  # set while the process is suspected
        self._bad_heartbeats = 0

    @property
    def silence(self) -> float:
        """Seconds since the last message."""
        return max(0.0, self._clock() - self._last_message)

    def seconds_left(self, allowed: float) -> float:
        """Return the seconds until `is_lost` should be checked again."""
        due = self._last_message + allowed if self._grace_ends is None else self._grace_ends
        return max(0.0, due - self._clock())

    def saw_message(self) -> None:
        """Note that the process sent a message."""
        self._last_message, self._grace_ends = self._clock(), None

    def is_lost(self, allowed: float) -> bool:
        """Return whether the process was silent for `allowed` seconds, and for `GRACE_SECONDS` after that."""
        if self.seconds_left(allowed):
            return False
        is_lost, self._grace_ends = self._grace_ends is not None, self._clock() + GRACE_SECONDS
        return is_lost

    def hangs(self, target: Health) -> bool:
        """Count a heartbeat; return whether the target was hanging or lost in too many of them in a row."""
        is_bad = target.state == Life.GIVEN_UP.value or target.busy > target.budget
        self._bad_heartbeats = self._bad_heartbeats + 1 if is_bad else 0
        return self._bad_heartbeats >= BAD_HEARTBEATS
