"""A drafter in a process of its own, for models that each have a device: two Python loops share no interpreter lock.

The process ends with this one, however this one ends.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable, Mapping

from langchain_card.core.messages import Proposal
from langchain_card.engine.transports.child_process import ChildProcess
from langchain_card.engine.transports.frames import DOWN, UP, Alive, Argument, Exhausted, Ready, Start
from langchain_card.engine.transports.thread import Mailbox
from langchain_card.ports import DraftCommand, Health

log = logging.getLogger(__name__)


SILENCE_SECONDS = 60.0
"""After which a process that was heard of is taken to hang."""


class ProcessTransport:
    """Starts a process with a worker in it, sends it commands and takes its reports.

    Args:
        factory: "module:function", found in the process; called with `publish`, `report_out_of_memory` and the
            arguments, it gives the worker.
        arguments: of the factory, by name.
        name: of the drafter.
        publish: takes each proposal.
        report_out_of_memory: told the requests that the worker had no memory for.
        on_ready: called when the worker is there.
        on_death: called once when the process is gone for another reason than `close`, whatever that is: it was killed,
            it raised, it could not make its worker, or it sent what makes no sense.

    Raises:
        EngineError: no process could be started.
    """

    def __init__(
        self,
        factory: str,
        arguments: Mapping[str, Argument],
        *,
        name: str,
        publish: Callable[[Proposal], None],
        report_out_of_memory: Callable[[tuple[int, ...]], None],
        on_ready: Callable[[], None],
        on_death: Callable[[BaseException], None],
    ) -> None:
        self._name = name
        self._publish, self._report_out_of_memory = publish, report_out_of_memory
        self._on_ready, self._on_death = on_ready, on_death
        self._started = threading.Event()  # or it never will
        self._error: BaseException | None = None
        self._health, self._heard = Health(), math.inf  # until it has said something
        self._mailbox = Mailbox()
        self._child = ChildProcess(
            "langchain_card.engine.transports.worker_main",
            "draft process",
            thread_name=f"card-{name}",
            sends=DOWN,
            takes=UP,
            first=Start(factory, dict(arguments)),
            outbox=self._mailbox,
            on_message=self._take,
            on_death=self._die,
        )

    @property
    def pid(self) -> int:
        """Of the process."""
        return self._child.pid

    @property
    def ready(self) -> bool:
        """Whether the worker was made, and has not died."""
        return self._started.is_set() and self._error is None

    def wait_ready(self) -> None:
        """Returns when the worker is made.

        Raises:
            CARDError: why it never will be: whatever its factory raised.
        """
        self._started.wait()
        if self._error is not None:
            raise self._error

    def send(self, command: DraftCommand) -> None:
        """Queues a command. Never waits: while the process does not read, later commands take the place of earlier."""
        self._child.send(command)

    def work(self) -> None:
        """Nothing: the process takes all steps that it has leave for."""

    def health(self) -> Health:
        """Of the worker, as it said last; one that says nothing for long hangs."""
        silence = time.monotonic() - self._heard
        return self._health if silence < SILENCE_SECONDS else Health("up", silence, SILENCE_SECONDS)

    def kill(self) -> None:
        """Ends the process at once."""
        self._child.kill()

    def close(self) -> None:
        """Ends the process, with force after two seconds. May be called twice."""
        self._child.close()
        self._started.set()

    def _take(self, report: Proposal | Exhausted | Alive | Ready) -> None:
        match report:
            case Proposal():
                self._publish(report)
            case Exhausted(request_ids):
                self._report_out_of_memory(request_ids)
            case Alive(busy, budget):
                self._health, self._heard = Health("up", busy, budget), time.monotonic()
            case Ready():
                self._started.set()
                self._on_ready()

    def _die(self, error: BaseException) -> None:
        self._error = error
        log.error("the process of drafter %r died; requests go on without it: %s", self._name, error)
        self._on_death(error)
        self._started.set()
