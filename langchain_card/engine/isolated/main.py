"""What runs in the process of an isolated engine."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from langchain_card.core.messages import Emit
from langchain_card.core.request import FinishReason, Request, RequestStats
from langchain_card.engine.engine import Engine
from langchain_card.engine.isolated.messages import (
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
from langchain_card.engine.transports.child_process import beat, serve_parent
from langchain_card.engine.transports.frames import Failed, Wire
from langchain_card.ports import Backend


def main() -> None:
    """Never returns."""
    serve_parent(_serve, sends=FROM_ENGINE, takes=TO_ENGINE)


def _serve(wire: Wire) -> None:
    load = wire.receive()
    if not isinstance(load, Load):
        return  # the parent is gone
    engines: list[Engine] = []
    beat(wire, lambda: Alive(engines[0].backend.health() if engines else {}))
    _hide_progress_bars()
    engines.append(engine := Engine(replace(load.config, isolate=False)))
    wire.send(Alive(engine.backend.health()))
    wire.send(Loaded(engine.config.limits))
    while (message := wire.receive()) is not None:
        _take(message, engine, wire)


def _take(message: Any, engine: Engine, wire: Wire) -> None:
    backend: Backend = engine.backend
    match message:
        case Ask(request, output_ids):
            answer = _Answer(request, wire)
            try:
                if request.params.grammar:
                    engine.grammars.start(request.params.grammar)  # compiled here, not while the target waits
                backend.submit(answer, output_ids)
            except Exception as error:  # of this request alone
                answer.fail(error)
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
        self._wire.send(Wrote(emit.request_id, emit.token_ids, emit.sources, emit.logprobs, self._stats, emit.hit))

    def finish(self, reason: FinishReason, stats: RequestStats) -> None:
        """It ended."""
        self._wire.send(Ended(self.request.request_id, reason, stats))

    def fail(self, error: BaseException) -> None:
        """It could not be served."""
        self._wire.send(Refused(self.request.request_id, Failed.of(error)))


def _hide_progress_bars() -> None:
    """The terminal is the parent's."""
    from transformers.utils import logging

    logging.disable_progress_bar()
