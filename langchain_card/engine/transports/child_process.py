"""Child processes, both ends: a fresh interpreter (no fork, and the caller's main module is not run again)."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from langchain_card.engine.transports.frames import MAX_TEXT_CHARS, Direction, Failed, Logged, Wire
from langchain_card.engine.transports.thread import MessageQueue
from langchain_card.errors import CARDError, EngineError

log = logging.getLogger(__name__)

END_SECONDS = 2.0
"""Time for a process to end by itself before it is killed, if it has nothing to write."""
PARENT_POLL_SECONDS = 1.0
HEARTBEAT_SECONDS = 1.0

# Ctrl-C reaches every process of a terminal, and SIGTERM every process of a service; the parent handles them. Cores are
# set before libraries count them.
_CODE = (
    "import os, signal, sys; [signal.signal(number, signal.SIG_IGN) for number in (signal.SIGINT, signal.SIGTERM)]; "
    "{}sys.path[:] = sys.argv[4:]; from {} import main; main()"
)


# The parent's end.


class ChildProcess:
    """A child process. Two threads send and receive, so that callers never wait for a process that hangs.

    Args:
        module: its `main`, run in the process, calls `serve_parent`.
        name: of the process, for errors.
        thread_name: prefix of the threads' names.
        sends, takes: kinds of messages to the process and from it.
        first: the first message to the process.
        outbox: queue of all later messages.
        on_message: takes the messages of the process, in order, except `Logged` (logged here) and `Failed` (a death).
        on_death: called once, after the last message, unless `close` ended the process: it was killed, it raised, it
            sent a malformed message, or a message could not be sent to it.
        end_seconds: time for it to end by itself before it is killed.
        cores: numbers of the cores that it may use; () for those of this process.
        environment: variables of its environment, besides those of this process.

    Raises:
        EngineError: no process could be started.
    """

    def __init__(
        self,
        module: str,
        name: str,
        *,
        thread_name: str,
        sends: Direction,
        takes: Direction,
        first: Any,
        outbox: MessageQueue[Any],
        on_message: Callable[[Any], None],
        on_death: Callable[[BaseException], None],
        end_seconds: float = END_SECONDS,
        cores: Sequence[int] = (),
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self._end_seconds = end_seconds
        self._name, self._first, self._outbox = name, first, outbox
        self._on_message, self._on_death = on_message, on_death
        self._error: BaseException | None = None
        self._closing = False
        self._process, connection = _spawn(module, name, cores, environment or {})
        self._wire = Wire(connection, sends=sends, takes=takes)
        self._threads = [
            threading.Thread(target=target, name=f"{thread_name}-{target.__name__.strip('_')}", daemon=True)
            for target in (self._write, self._read)
        ]
        for thread in self._threads:
            thread.start()

    @property
    def pid(self) -> int:
        """Id of the process."""
        return self._process.pid

    def send(self, message: Any) -> None:
        """Queue a message. Never waits; raises what the outbox raises."""
        if not self._outbox.closed:
            self._outbox.put(message)

    def kill(self) -> None:
        """Kill the process; its death is reported after its last message."""
        self._process.kill()

    def close(self) -> None:
        """End the process, with force if it takes too long. May be called twice."""
        self._closing = True
        self._outbox.close()
        self._wire.shutdown()
        for thread in self._threads:
            thread.join()
        self._wire.close()

    def _write(self) -> None:
        try:
            self._wire.send(self._first)
            while (message := self._outbox.take(wait=True)) is not None:
                self._wire.send(message)
        except OSError:
            pass  # the process is gone; the other thread notices
        except Exception as error:
            self._error = error
            self._wire.shutdown()

    def _read(self) -> None:
        try:
            while (message := self._wire.receive()) is not None:
                match message:
                    case Logged(name, level, text):
                        logging.getLogger(name).log(level, "%s", text)
                    case Failed():
                        raise message.error(self._name)
                    case _:
                        self._on_message(message)
        except Exception as error:
            self._error = self._error or error
        self._outbox.close()
        self._wire.shutdown()  # the process ends when its connection does
        code = _reap(self._process, self._end_seconds)
        if not self._closing:
            self._on_death(self._error or EngineError(self._name, self.pid, *_describe_exit(code)))


def _spawn(
    module: str, name: str, cores: Sequence[int], environment: Mapping[str, str]
) -> tuple[subprocess.Popen[bytes], socket.socket]:
    """Start an interpreter with this one's module path; return the process and the parent's end of the connection."""
    ours, theirs = socket.socketpair()
    level = logging.getLogger("langchain_card").getEffectiveLevel()
    numbers = map(str, (theirs.fileno(), level, os.getpid()))
    pinned = f"os.sched_setaffinity(0, {[*cores]}); " if cores else ""
    command = [sys.executable, "-c", _CODE.format(pinned, module), *numbers, *map(str, sys.path)]
    with theirs:
        try:
            process = subprocess.Popen(  # noqa: S603
                command, stdin=subprocess.DEVNULL, pass_fds=[theirs.fileno()], env={**os.environ, **environment}
            )
        except OSError as error:
            ours.close()
            hint = "is there enough memory"
            raise EngineError(name, sys.executable, f"could not be started ({error})", hint) from error
    return process, ours


def _reap(process: subprocess.Popen[bytes], seconds: float) -> int:
    """Wait for a process whose connection has ended, kill it if needed, and return its exit code."""
    with contextlib.suppress(subprocess.TimeoutExpired):
        return process.wait(seconds)
    process.kill()
    return process.wait()


def _describe_exit(code: int) -> tuple[str, str]:
    """Return limit and hint of an error for an exit code."""
    if code < 0:
        return f"was ended by signal {-code} ({signal.strsignal(-code)})", "is there enough memory"
    return f"ended with exit code {code}", "standard error may say more"


# The child's end.


def serve_parent(serve: Callable[[Wire], None], *, sends: Direction, takes: Direction) -> None:
    """Run `serve` with the connection to the parent; never returns: the process ends with `serve` or with the parent.

    Log records of this package and errors of `serve` are sent to the parent.
    """
    os.dup2(2, 1)  # what a library prints must not mix with the parent's output
    descriptor, level, parent = map(int, sys.argv[1:4])
    wire = Wire(socket.socket(fileno=descriptor), sends=sends, takes=takes)
    logging.getLogger().addHandler(_Forward(wire))
    logging.getLogger("langchain_card").setLevel(level)
    threading.Thread(target=_watch_parent, args=(parent,), daemon=True).start()
    try:
        serve(wire)
    except Exception as error:
        fail(wire, error)
    os._exit(0)


def fail(wire: Wire, error: Exception) -> None:
    """Send `error` to the parent and end this process."""
    try:
        if not isinstance(error, CARDError):
            log.error("an error ends this process", exc_info=error)
        wire.send(Failed.of(error))
    finally:
        os._exit(1)


def send_heartbeats(wire: Wire, make: Callable[[], Any]) -> None:
    """Start a thread that sends the message that `make` returns, every `HEARTBEAT_SECONDS`."""

    def run() -> None:
        with contextlib.suppress(OSError):  # the parent is gone
            while True:
                wire.send(make())
                time.sleep(HEARTBEAT_SECONDS)

    threading.Thread(target=run, daemon=True).start()


def _watch_parent(parent: int) -> None:
    """End this process with its parent: the connection stays open while a fork of the parent holds a copy of it."""
    while os.getppid() == parent:
        time.sleep(PARENT_POLL_SECONDS)
    os._exit(0)


class _Forward(logging.Handler):
    """A log handler that sends records to the parent."""

    def __init__(self, wire: Wire) -> None:
        super().__init__()
        self._wire = wire

    def emit(self, record: logging.LogRecord) -> None:
        """Send a record."""
        try:
            text = self.format(record)[:MAX_TEXT_CHARS]
            with contextlib.suppress(OSError):  # the parent is gone
                self._wire.send(Logged(record.name, record.levelno, text))
        except Exception:
            self.handleError(record)
