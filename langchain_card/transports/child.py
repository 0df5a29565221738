"""What runs in the process of a `ProcessTransport`: one worker, and nobody it would outlive."""

from __future__ import annotations

import contextlib
import importlib
import logging
import os
import socket
import sys
import threading
import time
from collections.abc import Callable

from langchain_card.errors import CARDError
from langchain_card.ports import Worker
from langchain_card.transports.frames import (
    DOWN,
    MAX_TEXT_CHARS,
    UP,
    Alive,
    Exhausted,
    Failed,
    Logged,
    Ready,
    Start,
    Wire,
)
from langchain_card.transports.thread import Mailbox, work

log = logging.getLogger(__name__)

PARENT_POLL_SECONDS = 1.0
BEAT_SECONDS = 1.0


def main() -> None:
    """Serves the connection whose file descriptor is the first argument of the command line, and never returns."""
    os.dup2(2, 1)  # what a library prints must not mix with the parent's output
    wire = Wire(socket.socket(fileno=int(sys.argv[1])), sends=UP, takes=DOWN)
    try:
        _serve(wire)
    except Exception as error:
        fail(wire, error)


def _serve(wire: Wire) -> None:
    start = wire.receive()
    if not isinstance(start, Start):
        os._exit(1)  # the parent is gone
    send_logs(wire, start.log_level)
    mailbox = Mailbox()
    threading.Thread(target=_listen, args=(wire, mailbox), daemon=True).start()
    threading.Thread(target=watch_parent, args=(start.parent,), daemon=True).start()
    worker = _factory(start.factory)(
        wire.send, lambda request_ids: wire.send(Exhausted(request_ids)), **start.arguments
    )
    wire.send(Ready())
    threading.Thread(target=_beat, args=(wire, worker), daemon=True).start()
    work(worker, mailbox)


def _beat(wire: Wire, worker: Worker) -> None:
    with contextlib.suppress(OSError):  # the parent is gone
        while True:
            health = worker.health()
            wire.send(Alive(health.busy, health.budget))
            time.sleep(BEAT_SECONDS)


def _factory(name: str) -> Callable[..., Worker]:
    module, _, function = name.partition(":")
    factory: Callable[..., Worker] = getattr(importlib.import_module(module), function)
    return factory


def _listen(wire: Wire, mailbox: Mailbox) -> None:
    """Takes commands as they come, so that the parent need not wait for a step, and those in the mailbox stay few."""
    try:
        while (command := wire.receive()) is not None:
            mailbox.put(command)
    except CARDError as error:
        fail(wire, error)
    os._exit(0)  # in the midst of a step, too: nothing here is worth keeping


def watch_parent(parent: int) -> None:
    """The connection does not end with the parent while a fork of it holds a copy."""
    while os.getppid() == parent:
        time.sleep(PARENT_POLL_SECONDS)
    os._exit(0)


def fail(wire: Wire, error: Exception) -> None:
    """Says what this process dies of."""
    try:
        if not isinstance(error, CARDError):
            log.error("a process of its own fails", exc_info=error)
        wire.send(Failed.of(error))
    finally:
        os._exit(1)


class _Forward(logging.Handler):
    """Hands records to the parent, whose handlers and filters they are for."""

    def __init__(self, wire: Wire) -> None:
        super().__init__()
        self._wire = wire

    def emit(self, record: logging.LogRecord) -> None:
        """Sends it."""
        try:
            text = self.format(record)[:MAX_TEXT_CHARS]
            with contextlib.suppress(OSError):  # the parent is gone
                self._wire.send(Logged(record.name, record.levelno, text))
        except Exception:
            self.handleError(record)


def send_logs(wire: Wire, level: int) -> None:
    """Hands this package's records of a level and above to the parent."""
    logging.getLogger().addHandler(_Forward(wire))
    logging.getLogger("langchain_card").setLevel(level)
