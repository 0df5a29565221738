"""What runs in the process of an isolated engine: the engine, and nobody it would outlive."""

from __future__ import annotations

import os
import socket
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from langchain_card.core.messages import Emit
from langchain_card.core.request import FinishReason, Request, RequestStats
from langchain_card.engine.engine import Engine
from langchain_card.errors import CARDError
from langchain_card.ports import Backend
from langchain_card.transports.child import fail, send_logs, watch_parent
from langchain_card.transports.engine_frames import (
    FROM_ENGINE,
    TO_ENGINE,
    Alive,
    Announce,
    Ask,
    Began,
    Drain,
    Ended,
    Load,
    Loaded,
    Pause,
    Refused,
    Stop,
    Wrote,
)
from langchain_card.transports.frames import Failed, Wire

BEAT_SECONDS = 1.0


def main() -> None:
    """Serves the connection whose file descriptor is the first argument of the command line, and never returns."""
    os.dup2(2, 1)  # what a library prints must not mix with the parent's output
    wire = Wire(socket.socket(fileno=int(sys.argv[1])), sends=FROM_ENGINE, takes=TO_ENGINE)
    try:
        _serve(wire)
    except Exception as error:
        fail(wire, error)


def _serve(wire: Wire) -> None:
    load = wire.receive()
    if isinstance(load, Load):
        send_logs(wire, load.log_level)
        engines: list[Engine] = []
        threading.Thread(target=watch_parent, args=(load.parent,), daemon=True).start()
        threading.Thread(target=_beat, args=(wire, engines), daemon=True).start()
        _hide_progress_bars()
        engines.append(engine := Engine(replace(load.config, isolate=False)))
        wire.send(Loaded(engine.config.limits))
        while (message := wire.receive()) is not None:
            _take(message, engine, wire)
    os._exit(0)  # the parent is gone, or wants no more


def _take(message: Any, engine: Engine, wire: Wire) -> None:
    backend: Backend = engine.backend
    match message:
        case Ask(request, output_ids):
            answer = _Answer(request, wire)
            try:
                if request.params.grammar:
                    engine.grammars.start(request.params.grammar)  # compiled here, not while the target waits
            except CARDError as error:
                answer.fail(error)
            else:
                backend.submit(answer, output_ids)
        case Stop(request_id, num_tokens):
            backend.stop(request_id, num_tokens)
        case Pause(request_id, paused):
            backend.pause(request_id, paused)
        case Announce(count):
            backend.announce(count)
        case Drain():
            backend.drain()


class _Answer:
    """A `ports.Consumer` that hands everything to the parent."""

    def __init__(self, request: Request, wire: Wire) -> None:
        self.request, self._wire = request, wire
        self._stats = RequestStats()

    def watch(self, stats: RequestStats) -> None:
        """The request starts."""
        self._stats = stats
        self._wire.send(Began(self.request.request_id))

    def push(self, emit: Emit) -> None:
        """Stop strings are looked for in the parent."""
        self._wire.send(Wrote(emit.request_id, emit.token_ids, emit.sources, emit.logprobs, self._stats))

    def finish(self, reason: FinishReason, stats: RequestStats) -> None:
        """It ended."""
        self._wire.send(Ended(self.request.request_id, reason, stats))

    def fail(self, error: BaseException) -> None:
        """It could not be served."""
        self._wire.send(Refused(self.request.request_id, Failed.of(error)))


def _beat(wire: Wire, engines: Sequence[Engine]) -> None:
    """Of the engine, as soon as it is there."""
    while True:
        wire.send(Alive(engines[0].backend.health() if engines else {}))
        time.sleep(BEAT_SECONDS)


def _hide_progress_bars() -> None:
    """The terminal is the parent's."""
    from transformers.utils import logging

    logging.disable_progress_bar()
