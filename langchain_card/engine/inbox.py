"""Events on their way to the driver, and for how long an idle engine waits for more of them."""

from __future__ import annotations

import math
import queue
import threading
from collections.abc import Callable

from langchain_card.core.messages import Event
from langchain_card.ports import Clock

GATHER_SECONDS = 0.05
"""How long an idle engine waits for the next of the requests that were announced; for all at most five times."""


class Inbox:
    """Any thread posts; one takes.

    Args:
        clock: source of time.

    Attributes:
        closed: whether the one that takes has come to the end.
    """

    def __init__(self, clock: Clock) -> None:
        self.closed = False
        self._clock = clock
        self._events: queue.SimpleQueue[Callable[[float], Event] | None] = queue.SimpleQueue()
        self._announced, self._next_until, self._all_until = 0, -math.inf, -math.inf
        self._lock = threading.Lock()

    def post(self, event: Callable[[float], Event]) -> None:
        """Queues an event; `event` is called with the time at which it is taken."""
        self._events.put(event)

    def close(self) -> None:
        """Nothing more is taken than what was posted before."""
        self._events.put(None)

    def announce(self, count: int) -> None:
        """So many requests are about to come."""
        with self._lock:
            self._announced, now = count, self._clock()
            self._next_until, self._all_until = now + GATHER_SECONDS, now + 5 * GATHER_SECONDS

    def count_request(self) -> None:
        """One of them was posted."""
        with self._lock:
            now = self._clock()
            self._announced = max(0, self._announced - 1) if now < self._next_until else 0
            self._next_until = min(now + GATHER_SECONDS, self._all_until)

    def take(self, until: float, is_idle: Callable[[], bool]) -> list[Event]:
        """All events; sleeps until `until` while there are none, and for requests that were announced if it is idle."""
        timeout = None if until == math.inf else max(0.0, until - self._clock())
        events: list[Event] = []
        while True:
            try:
                event = self._events.get(timeout != 0.0, timeout)
            except queue.Empty:
                timeout = max(0.0, self._next_until - self._clock()) if self._announced and is_idle() else 0.0
                if timeout > 0.0:
                    continue
                return events
            timeout = 0.0
            if event is None:
                self.closed = True
                return events
            events.append(event(self._clock()))
