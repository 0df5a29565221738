"""Whether an engine's process is to be ended: it says nothing, or what it says is bad."""

from __future__ import annotations

from langchain_card.core.workers import Life
from langchain_card.ports import Clock, Health

START_SECONDS = 60.0
"""For the process to say its first word, beside the silence that is allowed."""
DOUBT_SECONDS = 5.0
"""That a silent process gets once more: this one may have been held up with it (ctrl-Z, a machine that was paused)."""
BAD_BEATS = 2
"""In a row, of a target that hangs or is gone, that end the process."""


class Pulse:
    """Of one life of the process.

    Args:
        clock: source of time.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._heard = clock() + START_SECONDS
        self._sure_at: float | None = None  # while its silence is doubted
        self._bad_beats = 0

    @property
    def silence(self) -> float:
        """Seconds since it said something."""
        return max(0.0, self._clock() - self._heard)

    def seconds_left(self, allowed: float) -> float:
        """Until `is_lost` is to be asked."""
        due = self._heard + allowed if self._sure_at is None else self._sure_at
        return max(0.0, due - self._clock())

    def hear(self) -> None:
        """It said something."""
        self._heard, self._sure_at = self._clock(), None

    def is_lost(self, allowed: float) -> bool:
        """Whether it has said nothing for so many seconds, and nothing in `DOUBT_SECONDS` after that, either."""
        if self.seconds_left(allowed):
            return False
        is_lost, self._sure_at = self._sure_at is not None, self._clock() + DOUBT_SECONDS
        return is_lost

    def hangs(self, target: Health) -> bool:
        """Takes a beat; whether this is one too many of a target that hangs or is gone."""
        is_bad = target.state == Life.GIVEN_UP.value or target.busy > target.budget
        self._bad_beats = self._bad_beats + 1 if is_bad else 0
        return self._bad_beats >= BAD_BEATS
