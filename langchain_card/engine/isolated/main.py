"""Entry point of an isolated engine's process."""

from __future__ import annotations

import contextlib
from dataclasses import replace
from typing import Any

from langchain_card.core.messages import Emit, Reading
from langchain_card.core.request import FinishReason, Request, RequestStats
from langchain_card.engine.driver import Driver
from langchain_card.engine.engine import Engine
from langchain_card.engine.isolated.messages import (
    FROM_ENGINE,
    TO_ENGINE,
    Announce,
    EngineHeartbeat,
    Loaded,
    LoadEngine,
    LoadStep,
    Stop,
)
from langchain_card.engine.relay.messages import Began, Committed, Ended, NotServed, Submit
from langchain_card.engine.transports.child_process import fail, send_heartbeats, serve_parent
from langchain_card.engine.transports.frames import Failed, Wire
from langchain_card.errors import DeviceLostError
from langchain_card.ports import Backend


def main() -> None:
    """Serve the parent process; never returns."""
    serve_parent(_serve, sends=FROM_ENGINE, takes=TO_ENGINE)


def _serve(wire: Wire) -> None:
    load = wire.receive()
    if not isinstance(load, LoadEngine):
        return  # the parent is gone
    engines: list[Engine] = []
    send_heartbeats(wire, lambda: EngineHeartbeat(engines[0].backend.health() if engines else {}))
    _hide_progress_bars()
    own = replace(load.config, isolate=False, replicas=1)
    engines.append(engine := Engine(own, progress=_ForwardingProgress(wire)))
    engine.warm_up(_ForwardingProgress(wire))
    assert isinstance(engine.backend, Driver)
    kind = engine.backend.kind(measured=load.config.replicas > 1)  # the lives of one alone round alike
    wire.send(EngineHeartbeat(engine.backend.health()))
    wire.send(Loaded(engine.config.limits, engine.config.draft_device, kind))
    while (message := wire.receive()) is not None:
        _handle(message, engine, wire)
    if load.config.prefix_cache == "folder":
        engine.close()  # which writes queued texts


def _handle(message: Any, engine: Engine, wire: Wire) -> None:
    backend: Backend = engine.backend
    match message:
        case Submit(request, output_ids):
            consumer = _ForwardingConsumer(request, wire)
            try:
                if request.params.grammar:
                    engine.grammars.start(request.params.grammar)  # compiled here, not while the target waits
                backend.submit(consumer, output_ids)
            except Exception as error:  # of this request alone
                consumer.fail(error)
        case Stop(request_id, num_tokens):
            backend.stop(request_id, num_tokens)
        case Announce(count):
            backend.announce(count)


class _ForwardingProgress:
    """A `Progress` that forwards each step, without its bytes: everything was downloaded by the parent."""

    def __init__(self, wire: Wire) -> None:
        self._wire = wire

    def update(self, stage: str, done: int, total: int) -> None:
        """Forward the step, unless the parent is gone."""
        with contextlib.suppress(OSError):
            self._wire.send(LoadStep(stage))


class _ForwardingConsumer:
    """A `ports.Consumer` that forwards everything to the parent, unless the parent is gone."""

    def __init__(self, request: Request, wire: Wire) -> None:
        self.request, self._wire = request, wire
        self._stats = RequestStats()

    def watch(self, stats: RequestStats) -> None:
        """Forward the start of the request."""
        self._stats = stats
        self._send(Began(self.request.request_id))

    def read(self, reading: Reading) -> None:
        """Forward how much of a long text was read."""
        self._send(reading)

    def push(self, emit: Emit) -> None:
        """Forward committed tokens."""
        self._send(Committed(emit.request_id, emit.token_ids, emit.sources, emit.logprobs, self._stats, emit.hit))

    def finish(self, reason: FinishReason, stats: RequestStats) -> None:
        """Forward the end of the request."""
        self._send(Ended(self.request.request_id, reason, stats))

    def fail(self, error: BaseException) -> None:
        """Forward the failure of the request; end this process if another one could go on with the answer."""
        if isinstance(error, DeviceLostError):
            fail(self._wire, error)
        self._send(NotServed(self.request.request_id, Failed.of(error)))

    def _send(self, message: Any) -> None:
        with contextlib.suppress(OSError):
            self._wire.send(message)


def _hide_progress_bars() -> None:
    """Leave the terminal to the parent."""
    from transformers.utils import logging

    logging.disable_progress_bar()
