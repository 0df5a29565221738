"""A drafter that works where its command is sent."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from langchain_card.ports import DraftCommand, Worker

log = logging.getLogger(__name__)


class InlineTransport:
    """Carries out each command at once, on the sender's thread.

    Args:
        worker: the drafter's worker.
        on_death: called when the worker raised; it takes no commands from then on.

    Attributes:
        dead: whether the worker raised.
    """

    def __init__(self, worker: Worker, *, on_death: Callable[[BaseException], None]) -> None:
        self._worker = worker
        self._on_death = on_death
        self.dead = False
        self._dying = threading.Lock()

    def send(self, command: DraftCommand) -> None:
        """Applies the command and takes the steps that it grants."""
        if self.dead:
            return
        try:
            self._worker.carry_out(command)
        except Exception as error:
            self.fail(error)

    def fail(self, error: Exception) -> None:
        """The worker raised: frees the drafter, and takes no commands from now on."""
        with self._dying:
            if self.dead:
                return
            self.dead = True
        log.error("a drafter died; requests go on without it", exc_info=error)
        self._worker.close()
        self._on_death(error)

    def close(self) -> None:
        """Frees the drafter."""
        self._worker.close()
