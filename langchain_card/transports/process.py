"""A drafter in a process of its own, for models that each have a device: two Python loops share no interpreter lock.

The process is a fresh interpreter (no fork, and the caller's main module is not run again). It ends with this one,
however this one ends.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping

from langchain_card.core.messages import Proposal
from langchain_card.errors import EngineError
from langchain_card.ports import DraftCommand
from langchain_card.transports.frames import DOWN, UP, Argument, Exhausted, Failed, Logged, Ready, Start, Wire
from langchain_card.transports.thread import Mailbox

log = logging.getLogger(__name__)

END_SECONDS = 1.0
"""For the process to end by itself; as much again after it was asked to; then it is killed."""

# Ctrl-C reaches every process of a terminal; it is the parent's to decide what it means.
_CODE = (
    "import signal, sys; signal.signal(signal.SIGINT, signal.SIG_IGN); sys.path[:] = sys.argv[2:]; "
    "from langchain_card.transports.child import main; main()"
)


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
        self._mailbox = Mailbox()
        self._started = threading.Event()  # or it never will
        self._error: BaseException | None = None
        self._closing = False
        level = logging.getLogger("langchain_card").getEffectiveLevel()
        self._start = Start(factory, dict(arguments), level, os.getpid())
        self._process, connection = _spawn()
        self._wire = Wire(connection, sends=DOWN, takes=UP)
        self._threads = [
            threading.Thread(target=target, name=f"card-{name}-{target.__name__.strip('_')}", daemon=True)
            for target in (self._write, self._read)
        ]
        for thread in self._threads:
            thread.start()

    @property
    def pid(self) -> int:
        """Of the process."""
        return self._process.pid

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
        if not self._mailbox.closed:
            self._mailbox.put(command)

    def work(self) -> None:
        """Nothing: the process takes all steps that it has leave for."""

    def close(self) -> None:
        """Ends the process, with force after two seconds. May be called twice."""
        self._closing = True
        self._mailbox.close()
        self._wire.hang_up()
        for thread in self._threads:
            thread.join()
        self._wire.close()

    def _write(self) -> None:
        try:
            self._wire.send(self._start)
            while (command := self._mailbox.take(wait=True)) is not None:
                self._wire.send(command)
        except OSError:
            pass  # it is gone, as the other thread has noticed
        except Exception as error:
            self._error = error
            self._wire.hang_up()

    def _read(self) -> None:
        try:
            while (report := self._wire.receive()) is not None:
                self._take(report)
        except Exception as error:
            self._error = error
        self._mailbox.close()
        self._wire.hang_up()  # upon which the process ends
        code = self._reap()
        if not self._closing:
            self._error = self._error or EngineError("draft process", self.pid, *_last_words(code))
            log.error("the process of drafter %r died; requests go on without it: %s", self._name, self._error)
            self._on_death(self._error)
        self._started.set()

    def _take(self, report: Proposal | Exhausted | Logged | Ready | Failed) -> None:
        match report:
            case Proposal():
                self._publish(report)
            case Exhausted(request_ids):
                self._report_out_of_memory(request_ids)
            case Logged(name, level, text):
                logging.getLogger(name).log(level, "%s", text)
            case Ready():
                self._started.set()
                self._on_ready()
            case Failed():
                raise report.error()

    def _reap(self) -> int:
        """Waits for the process, with more and more force; its exit code."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            return self._process.wait(END_SECONDS)
        self._process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            return self._process.wait(END_SECONDS)
        self._process.kill()
        return self._process.wait()


def _spawn() -> tuple[subprocess.Popen[bytes], socket.socket]:
    """A fresh interpreter with this one's module path, and this end of the connection to it."""
    ours, theirs = socket.socketpair()
    command = [sys.executable, "-c", _CODE, str(theirs.fileno()), *map(str, sys.path)]
    with theirs:
        try:
            process = subprocess.Popen(command, stdin=subprocess.DEVNULL, pass_fds=[theirs.fileno()])  # noqa: S603
        except OSError as error:
            ours.close()
            hint = 'is there enough memory? draft_transport="thread" needs no process'
            raise EngineError("draft process", sys.executable, f"could not be started ({error})", hint) from error
    return process, ours


def _last_words(code: int) -> tuple[str, str]:
    """What happened, and a hint, from an exit code."""
    if code < 0:
        return f"was ended by signal {-code} ({signal.strsignal(-code)})", "is there enough memory?"
    return f"ended with exit code {code}", "standard error may say more"
