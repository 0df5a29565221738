"""One life of an engine in a process of its own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from langchain_card.config import EngineConfig
from langchain_card.transports.engine_frames import FROM_ENGINE, TO_ENGINE, Load
from langchain_card.transports.processes import ChildProcess
from langchain_card.transports.thread import MessageQueue

NAME = "engine process"


def start_engine(
    config: EngineConfig, on_message: Callable[[Any], None], on_death: Callable[[BaseException], None]
) -> ChildProcess:
    """Starts the process; it loads and serves until it is closed or dies.

    Args:
        config: of the engine.
        on_message: takes what it says, in order.
        on_death: called once, after the last message, when it is gone for another reason than `close`.

    Raises:
        EngineError: no process could be started.
    """
    return ChildProcess(
        "langchain_card.engine.child",
        NAME,
        thread_name="card-engine",
        sends=TO_ENGINE,
        takes=FROM_ENGINE,
        first=Load(config),
        outbox=_Frames(),
        on_message=on_message,
        on_death=on_death,
    )


class _Frames(MessageQueue[Any]):
    """Encodes messages when they are put: who sends one that makes no frame is told, and the process is spared."""

    def put(self, message: Any) -> None:
        """Appends the message's frame; raises what `Direction.encode` raises."""
        super().put(TO_ENGINE.encode(message))
