"""A drafter on a thread of its own, for requests that decode in parallel with it."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable

from langchain_card.core.messages import Begin, End
from langchain_card.ports import DraftCommand, Worker
from langchain_card.transports.inline import InlineTransport


class ThreadTransport:
    """Queues commands for a worker thread, which steps while it has leave and reads commands between two steps.

    Requests under any other schedule than `parallel` have nothing to overlap: their steps are taken on the sender's
    thread. That is not only simpler: every thread that runs torch on several cores keeps a pool of its own, and with
    more pooled threads than cores each parallel region waits for a sleeping thread (30 to 100 % per step on two cores).

    Args:
        worker: the drafter's worker; may be called from both threads, one at a time.
        name: of the thread.
        on_death: called when the worker raised; it takes no commands from then on.
    """

    def __init__(self, worker: Worker, *, name: str, on_death: Callable[[BaseException], None]) -> None:
        self._worker = worker
        self._inline = InlineTransport(worker, on_death=on_death)
        self._inline_ids: set[int] = set()
        self._commands: queue.SimpleQueue[DraftCommand | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def send(self, command: DraftCommand) -> None:
        """Hands the command over, or carries it out at once."""
        if self._inline.dead:
            return
        request_id = command.request.request_id if isinstance(command, Begin) else command.request_id
        if isinstance(command, Begin) and command.schedule != "parallel":
            self._inline_ids.add(request_id)
        if request_id not in self._inline_ids:
            self._commands.put(command)
            return
        if isinstance(command, End):
            self._inline_ids.discard(request_id)
        self._inline.send(command)

    def close(self) -> None:
        """Ends the thread after its current step."""
        self._commands.put(None)
        self._thread.join()
        self._inline.close()

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
        except Exception as error:
            self._inline.fail(error)
