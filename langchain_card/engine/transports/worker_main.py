"""What runs in the process of a `ProcessTransport`: one worker."""

from __future__ import annotations

import importlib
import os
import threading
from collections.abc import Callable

from langchain_card.engine.transports.child_process import beat, fail, serve_parent
from langchain_card.engine.transports.frames import DOWN, UP, Alive, Exhausted, Ready, Start, Wire
from langchain_card.engine.transports.thread import Mailbox, work
from langchain_card.errors import CARDError
from langchain_card.ports import Worker


def main() -> None:
    """Never returns."""
    serve_parent(_serve, sends=UP, takes=DOWN)


def _serve(wire: Wire) -> None:
    start = wire.receive()
    if not isinstance(start, Start):
        return  # the parent is gone
    mailbox = Mailbox()
    threading.Thread(target=_listen, args=(wire, mailbox), daemon=True).start()
    worker = _factory(start.factory)(
        wire.send, lambda request_ids: wire.send(Exhausted(request_ids)), **start.arguments
    )
    wire.send(Ready())
    beat(wire, lambda: _alive(worker))
    work(worker, mailbox)


def _alive(worker: Worker) -> Alive:
    health = worker.health()
    return Alive(health.busy, health.budget)


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
