"""Entry point of a drafter's process (`ProcessTransport`), which runs one worker."""

from __future__ import annotations

import importlib
import os
import threading
from collections.abc import Callable

from langchain_card.engine.transports.child_process import fail, send_heartbeats, serve_parent
from langchain_card.engine.transports.frames import DOWN, UP, Exhausted, Ready, Start, Wire, WorkerHeartbeat
from langchain_card.engine.transports.thread import Mailbox, work
from langchain_card.errors import CARDError
from langchain_card.ports import Worker


def main() -> None:
    """Serve the parent process; never returns."""
    serve_parent(_serve, sends=UP, takes=DOWN)


def _serve(wire: Wire) -> None:
    start = wire.receive()
    if not isinstance(start, Start):
        return  # the parent is gone
    mailbox = Mailbox()
    threading.Thread(target=_receive_commands, args=(wire, mailbox), daemon=True).start()
    worker = _factory(start.factory)(
        wire.send, lambda request_ids: wire.send(Exhausted(request_ids)), **start.arguments
    )
    wire.send(Ready())
    send_heartbeats(wire, lambda: _heartbeat(worker))
    work(worker, mailbox)


def _heartbeat(worker: Worker) -> WorkerHeartbeat:
    health = worker.health()
    return WorkerHeartbeat(health.busy, health.budget)


def _factory(name: str) -> Callable[..., Worker]:
    module, _, function = name.partition(":")
    factory: Callable[..., Worker] = getattr(importlib.import_module(module), function)
    return factory


def _receive_commands(wire: Wire, mailbox: Mailbox) -> None:
    """Move commands to the mailbox as they arrive, so that the parent never waits for a step."""
    try:
        while (command := wire.receive()) is not None:
            mailbox.put(command)
    except CARDError as error:
        fail(wire, error)
    os._exit(0)  # even during a step: no state needs to be kept
