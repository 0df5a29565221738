"""`InlineTransport`: a drafter on the sender's thread."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from langchain_card.core.messages import Grow
from langchain_card.ports import DraftCommand, Health, Worker

log = logging.getLogger(__name__)


class InlineTransport:
    """A transport that applies each command at once, and takes the granted steps in `work`.

    Args:
        worker: the drafter's worker.
        name: of the drafter.
        on_death: called when the worker raises; commands are ignored after that.

    Attributes:
        dead: whether the worker raised.
    """

    ready = True

    def __init__(self, worker: Worker, *, name: str, on_death: Callable[[BaseException], None]) -> None:
        self._worker, self._name = worker, name
        self._on_death = on_death
        self._granted: set[int] = set()
        self.dead = False
        self._dying = threading.Lock()

    def wait_ready(self) -> None:
        """Return at once."""

    def send(self, command: DraftCommand) -> None:
        """Apply a command."""
        if self.dead:
            return
        if isinstance(command, Grow):
            self._granted.add(command.request_id)
        try:
            self._worker.handle(command)
        except Exception as error:
            self.fail(error)

    def work(self) -> None:
        """Take the steps that were granted."""
        granted, self._granted = self._granted, set()
        if self.dead or not granted:
            return
        try:
            self._worker.work(granted)
        except Exception as error:
            self.fail(error)

    def fail(self, error: Exception) -> None:
        """Free the drafter of a worker that raised; commands are ignored after that."""
        with self._dying:
            if self.dead:
                return
            self.dead = True
        log.error("drafter %r died; requests go on without it", self._name, exc_info=error)
        self._worker.close()
        self._on_death(error)

    def health(self) -> Health:
        """Return the worker's health."""
        return self._worker.health()

    def kill(self) -> None:
        """Do nothing: the sender's own thread hangs."""

    def close(self) -> None:
        """Free the drafter."""
        self._worker.close()
