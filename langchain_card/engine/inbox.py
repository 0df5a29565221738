"""`Inbox`: events from any thread on their way to the driver."""

from __future__ import annotations

import math
import queue
import threading
from collections.abc import Callable

from langchain_card.core.messages import Event
from langchain_card.ports import Clock

GATHER_SECONDS = 0.05
"""Seconds that an idle engine waits for the next announced request; at most five times that for all of them."""


class Inbox:
    """A queue of events. Any thread may post; one thread takes.

    Args:
        clock: source of time.

    Attributes:
        closed: whether `take` has reached the end.
    """

    def __init__(self, clock: Clock) -> None:
        self.closed = False
        self._clock = clock
        self._events: queue.SimpleQueue[Callable[[float], Event] | None] = queue.SimpleQueue()
        self._announced, self._next_until, self._all_until = 0, -math.inf, -math.inf
        self._lock = threading.Lock()

    def post(self, event: Callable[[float], Event]) -> None:
        """Queue an event; `event` is called with the time at which it is taken."""
        self._events.put(event)

    def close(self) -> None:
        """Mark the end; events posted after it are not taken."""
        self._events.put(None)

    def announce(self, count: int) -> None:
        """Announce `count` requests that are about to be posted."""
        with self._lock:
            self._announced, now = count, self._clock()
            self._next_until, self._all_until = now + GATHER_SECONDS, now + 5 * GATHER_SECONDS

    def count_request(self) -> None:
        """Count a posted request as an announced one."""
        with self._lock:
            now = self._clock()
            self._announced = max(0, self._announced - 1) if now < self._next_until else 0
            self._next_until = min(now + GATHER_SECONDS, self._all_until)

    def take(self, until: float, is_idle: Callable[[], bool]) -> list[Event]:
        """Return all events; sleeps until `until` while there are none, and waits for announced requests if idle."""
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
