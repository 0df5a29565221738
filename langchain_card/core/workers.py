"""Which workers are there, and when one that died may start again."""

from __future__ import annotations

from collections.abc import Iterable

from langchain_card.config import Limits

MAX_RESTART_SECONDS = 10.0


class Workers:
    """Liveness of the target and the drafters.

    Args:
        names: of all workers; all are there at first.
        limits: how many deaths are borne.
    """

    def __init__(self, names: Iterable[str], limits: Limits) -> None:
        self.limits = limits
        self._up = dict.fromkeys(names, True)
        self._deaths: dict[str, tuple[float, ...]] = dict.fromkeys(self._up, ())

    def copy(self) -> Workers:
        """An independent copy."""
        copied = Workers((), self.limits)
        copied._up, copied._deaths = self._up.copy(), self._deaths.copy()
        return copied

    def __contains__(self, worker: str) -> bool:
        """Whether the worker can be given work."""
        return self._up.get(worker, False)

    def given_up(self, worker: str) -> bool:
        """Whether the worker died too often and will not come back."""
        return not self._up[worker] and len(self._deaths[worker]) > self.limits.max_deaths

    def started(self, worker: str) -> bool:
        """Whether that is news: the worker is known and was not there."""
        if self._up.get(worker, True):
            return False
        self._up[worker] = True
        return True

    def died(self, worker: str, now: float) -> float | None:
        """The time at which it may start again, or None when it has died too often and is given up."""
        self._up[worker] = False
        recent = tuple(t for t in self._deaths[worker] if now - t < self.limits.deaths_seconds)
        self._deaths[worker] = (*recent, now)
        if len(recent) >= self.limits.max_deaths:
            return None
        return now + min(self.limits.restart_seconds * float(2 ** len(recent)), MAX_RESTART_SECONDS)
