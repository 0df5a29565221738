"""Liveness of the workers, and the time at which a worker that died may start again."""

from __future__ import annotations

from collections.abc import Iterable
from enum import Enum

from langchain_card.limits import Limits

MAX_RESTART_SECONDS = 10.0


class Life(Enum):
    """The state of a worker."""

    UP = "up"
    DOWN = "down"
    GIVEN_UP = "given up"


class Workers:
    """Liveness of the target and the drafters.

    Args:
        names: names of all workers; all are up at first.
        limits: bounds on the deaths of a worker.
    """

    def __init__(self, names: Iterable[str], limits: Limits) -> None:
        self.limits = limits
        self._life = dict.fromkeys(names, Life.UP)
        self._deaths: dict[str, tuple[float, ...]] = dict.fromkeys(self._life, ())

    def copy(self) -> Workers:
        """Return an independent copy."""
        copied = Workers((), self.limits)
        copied._life, copied._deaths = self._life.copy(), self._deaths.copy()
        return copied

    def __contains__(self, worker: str) -> bool:
        """Return whether the worker is up."""
        return self._life.get(worker) is Life.UP

    def life(self, worker: str) -> Life:
        """Return the state of a worker; an unknown one counts as given up."""
        return self._life.get(worker, Life.GIVEN_UP)

    def given_up(self, worker: str) -> bool:
        """Return whether the worker will not come back: it died too often, or there is no such worker."""
        return self.life(worker) is Life.GIVEN_UP

    def started(self, worker: str) -> bool:
        """Note that a worker is up; return False when it was not down."""
        if self._life.get(worker) is not Life.DOWN:
            return False
        self._life[worker] = Life.UP
        return True

    def died(self, worker: str, now: float, forgiven: int = 0) -> float | None:
        """Note that a worker died, or could not start again.

        Args:
            worker: its name.
            now: the time of its death.
            forgiven: how many of its last deaths, this one included, were the fault of a request that has ended.

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
