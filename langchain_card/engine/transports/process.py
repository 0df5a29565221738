"""`ProcessTransport`: a drafter in a process, for models on separate devices; their loops share no interpreter lock.

The process ends with its parent, however that ends.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable, Mapping

from langchain_card.core.drafter_state import is_valid
from langchain_card.core.messages import Proposal
from langchain_card.engine.transports.child_process import ChildProcess
from langchain_card.engine.transports.frames import DOWN, UP, Argument, Exhausted, Ready, Start, WorkerHeartbeat
from langchain_card.engine.transports.thread import Mailbox
from langchain_card.errors import EngineError
from langchain_card.ports import DraftCommand, Health

log = logging.getLogger(__name__)

SILENCE_SECONDS = 60.0
"""Time without a heartbeat after which a process is taken to hang; it does not apply before the first heartbeat."""


class ProcessTransport:
    """A transport to a worker in another process, which it starts and ends.

    Args:
        factory: "module:function", imported and called in the process; see `frames.Start`.
        arguments: of the factory, by name.
        name: of the drafter.
        publish: takes each proposal.
        report_out_of_memory: takes the ids of requests that the worker had no memory for.
        on_ready: called when the worker was made.
        on_death: called once when the process ends, unless `close` ended it; see `ChildProcess`.

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
        self._started = threading.Event()  # also set when the start failed
        self._error: BaseException | None = None
        self._health, self._last_heartbeat = Health(), math.inf
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
        """Id of the process."""
        return self._child.pid

    @property
    def ready(self) -> bool:
        """State of the worker: True once it was made, until it dies."""
        return self._started.is_set() and self._error is None

    def wait_ready(self) -> None:
        """Wait until the worker is made.

        Raises:
            CARDError: the factory failed.
        """
        self._started.wait()
        if self._error is not None:
            raise self._error

    def send(self, command: DraftCommand) -> None:
        """Queue a command. Never waits; while the process does not read, later commands replace earlier ones."""
        self._child.send(command)

    def work(self) -> None:
        """Do nothing: the process takes its granted steps by itself."""

    def health(self) -> Health:
        """Return the health that the worker last reported; a worker that was silent for too long hangs."""
        silence = time.monotonic() - self._last_heartbeat
        return self._health if silence < SILENCE_SECONDS else Health("up", silence, SILENCE_SECONDS)

    def kill(self) -> None:
        """Kill the process."""
        self._child.kill()

    def close(self) -> None:
        """End the process, with force after two seconds. May be called twice."""
        self._child.close()
        self._started.set()

    def _take(self, report: Proposal | Exhausted | WorkerHeartbeat | Ready) -> None:
        match report:
            case Proposal():
                if not is_valid(report):
                    raise EngineError("frame", report, "makes no sense as a proposal", "do both ends run one version")
                self._publish(report)
            case Exhausted(request_ids):
                self._report_out_of_memory(request_ids)
            case WorkerHeartbeat(busy, budget):
                self._health, self._last_heartbeat = Health("up", busy, budget), time.monotonic()
            case Ready():
                self._started.set()
                self._on_ready()

    def _die(self, error: BaseException) -> None:
        self._error = error
        log.error("the process of drafter %r died; requests go on without it: %s", self._name, error)
        self._on_death(error)
        self._started.set()
