"""A drafter on a thread of its own."""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable

from langchain_card.ports import DraftCommand, Worker

log = logging.getLogger(__name__)


class ThreadTransport:
    """Queues commands for a worker thread, which steps while it has leave and reads commands between two steps.

    Args:
        worker: the drafter's worker; only the thread touches it.
        name: of the thread.
        on_death: called on the thread when the worker raised; it takes no commands from then on.
    """

    def __init__(self, worker: Worker, *, name: str, on_death: Callable[[BaseException], None]) -> None:
        self._worker = worker
        self._on_death = on_death
        self._commands: queue.SimpleQueue[DraftCommand | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def send(self, command: DraftCommand) -> None:
        """Hands the command over."""
        self._commands.put(command)

    def close(self) -> None:
        """Ends the thread after its current step."""
        self._commands.put(None)
        self._thread.join()

    def _run(self) -> None:
        try:
            busy = False
            while True:
                try:
                    command = self._commands.get(block=not busy)
                except queue.Empty:
                    busy = self._worker.step()
                    continue
                if command is None:
                    break
                self._worker.handle(command)
                busy = True
        except BaseException as error:
            log.exception("the drafter on thread %s died; requests go on without it", self._thread.name)
            self._on_death(error)
        finally:
            self._worker.close()
