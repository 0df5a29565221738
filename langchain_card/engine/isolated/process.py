"""One life of an engine in a process of its own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from langchain_card.config import EngineConfig
from langchain_card.engine.isolated.messages import FROM_ENGINE, TO_ENGINE, Load
from langchain_card.engine.transports.child_process import ChildProcess
from langchain_card.engine.transports.thread import MessageQueue
from langchain_card.errors import EngineError

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
        "langchain_card.engine.isolated.main",
        NAME,
        thread_name="card-engine",
        sends=TO_ENGINE,
        takes=FROM_ENGINE,
        first=Load(config),
        outbox=_Frames(),
        on_message=on_message,
        on_death=on_death,
    )


def service_error(error: BaseException) -> EngineError:
    """What requests are told that were in order: not what loading says to who chose the models."""
    if type(error) is EngineError:
        return error
    wrapped = EngineError(NAME, type(error).__name__, f"it could not go on ({error})", "the log may say more")
    wrapped.__cause__ = error
    return wrapped


class _Frames(MessageQueue[Any]):
    """Encodes messages when they are put: who sends one that makes no frame is told, and the process is spared."""

    def put(self, message: Any) -> None:
        """Appends the message's frame; raises what `Direction.encode` raises."""
        super().put(TO_ENGINE.encode(message))
