"""`EngineReplica`: an engine in an actor of Ray Serve, and the messages between it and a relay."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator

from langchain_card.config import EngineConfig
from langchain_card.core.messages import TARGET, Reading
from langchain_card.engine.engine import Engine
from langchain_card.engine.relay.answers import Accepted, Alive, AnswerStreams, Lost, OtherModel
from langchain_card.engine.relay.description import Description
from langchain_card.engine.relay.messages import Began, Committed, Ended, NotServed, Submit
from langchain_card.engine.transports.frames import MAX_COMMAND_BYTES, MAX_REPORT_BYTES, Direction
from langchain_card.ports import Health

log = logging.getLogger("ray.serve")  # which Ray shows where the application was started

TO_REPLICA = Direction((Submit,), MAX_COMMAND_BYTES)
FROM_REPLICA = Direction(
    (Accepted, OtherModel, Alive, Began, Reading, Committed, Ended, NotServed, Lost), MAX_REPORT_BYTES
)
DESCRIBED = Direction((Description,), MAX_COMMAND_BYTES)


class EngineReplica:
    """An engine in an actor. It loads while the actor is made.

    Args:
        config: of the engine.
    """

    def __init__(self, config: EngineConfig) -> None:
        progress = _LoggedProgress()
        self._engine = Engine(config, progress=progress)
        self._engine.warm_up(progress)
        backend, ids = self._engine.backend, self._engine.request_ids
        self._streams = AnswerStreams(backend, self._engine.kind, ids, self._engine.grammars.start)

    async def answer(self, frame: bytes) -> AsyncIterator[bytes]:
        """Yield the frames of an answer, or of the rest of one."""
        async for message in self._streams.answer(TO_REPLICA.decode(frame)):
            yield FROM_REPLICA.body(message)

    async def describe(self) -> bytes:
        """Return the frame of the engine's description."""
        return DESCRIBED.body(self._engine.describe())

    async def check_health(self) -> None:
        """Raise if the target hangs or is gone for good, so that Ray replaces the replica."""
        target = self._engine.health().get(TARGET, Health())
        if target.state == "given up" or target.busy > target.budget:
            raise RuntimeError(f"the target is gone or hangs ({target})")

    def __del__(self) -> None:
        if engine := getattr(self, "_engine", None):
            engine.close()


class _LoggedProgress:
    """A `Progress` that logs each step once."""

    def __init__(self) -> None:
        self._stage = ""

    def update(self, stage: str, done: int, total: int) -> None:
        """Log a step that begins."""
        if stage != self._stage:
            self._stage = stage
            log.info("engine: %s", stage)
