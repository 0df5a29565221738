"""Which workers are there, and when one that died may start again."""

from __future__ import annotations

from collections.abc import Iterable
from enum import Enum

from langchain_card.config import Limits

MAX_RESTART_SECONDS = 10.0


class Life(Enum):
    """Where a worker is between its deaths."""

    UP = "up"
    DOWN = "down"
    GIVEN_UP = "given up"


class Workers:
    """Liveness of the target and the drafters.

    Args:
        names: of all workers; all are there at first.
        limits: how many deaths are borne.
    """

    def __init__(self, names: Iterable[str], limits: Limits) -> None:
        self.limits = limits
        self._life = dict.fromkeys(names, Life.UP)
        self._deaths: dict[str, tuple[float, ...]] = dict.fromkeys(self._life, ())

    def copy(self) -> Workers:
        """An independent copy."""
        copied = Workers((), self.limits)
        copied._life, copied._deaths = self._life.copy(), self._deaths.copy()
        return copied

    def __contains__(self, worker: str) -> bool:
        """Whether the worker can be given work."""
        return self._life.get(worker) is Life.UP

    def life(self, worker: str) -> Life:
        """Where it is."""
        return self._life.get(worker, Life.GIVEN_UP)

    def given_up(self, worker: str) -> bool:
        """Whether the worker died too often and will not come back, or never was."""
        return self._life.get(worker, Life.GIVEN_UP) is Life.GIVEN_UP

    def started(self, worker: str) -> bool:
        """Whether that is news: the worker was down."""
        if self._life.get(worker) is not Life.DOWN:
            return False
        self._life[worker] = Life.UP
        return True

    def died(self, worker: str, now: float, forgiven: int = 0) -> float | None:
        """A worker died, or could not start again.

        Args:
            worker: which.
            now: when.
            forgiven: how many of its last deaths, this one included, were the fault of a request that is gone now.

        Returns:
            The time at which it may start again, or None when it has died too often and is given up.
        """
        recent = [t for t in self._deaths[worker] if now - t < self.limits.deaths_seconds]
        recent = recent[: max(0, len(recent) + 1 - forgiven)] if forgiven else recent
        self._deaths[worker] = tuple(recent) if forgiven else (*recent, now)
        if len(recent) >= self.limits.max_deaths:
            self._life[worker] = Life.GIVEN_UP
            return None
        self._life[worker] = Life.DOWN
        return now + min(self.limits.restart_seconds * float(2 ** len(recent)), MAX_RESTART_SECONDS)
