"""One life of an engine in a process of its own: started, spoken to, and gone, however that comes."""

from __future__ import annotations

import logging
import os
import queue
import threading
from collections.abc import Callable
from typing import Any

from langchain_card.config import EngineConfig
from langchain_card.errors import EngineError
from langchain_card.transports.engine_frames import FROM_ENGINE, TO_ENGINE, Load
from langchain_card.transports.frames import Failed, Logged, Wire
from langchain_card.transports.processes import last_words, reap, spawn

NAME = "engine process"


class EngineProcess:
    """Starts the process. Two threads speak with it, so that nobody waits for one that hangs.

    Args:
        config: of the engine.
        on_message: takes what it says, in order.
        on_death: called once, after the last message, when it is gone for whatever reason.

    Raises:
        EngineError: no process could be started.
    """

    def __init__(
        self,
        config: EngineConfig,
        on_message: Callable[[EngineProcess, Any], None],
        on_death: Callable[[EngineProcess, BaseException], None],
    ) -> None:
        self._on_message, self._on_death = on_message, on_death
        self._outbox: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._error: BaseException | None = None
        self._process, connection = spawn("langchain_card.engine.child", NAME)
        self._wire = Wire(connection, sends=TO_ENGINE, takes=FROM_ENGINE)
        self.send(Load(config, logging.getLogger("langchain_card").getEffectiveLevel(), os.getpid()))
        self._threads = [
            threading.Thread(target=target, name=f"card-engine-{target.__name__.strip('_')}", daemon=True)
            for target in (self._write, self._read)
        ]
        for thread in self._threads:
            thread.start()

    @property
    def pid(self) -> int:
        """Of the process."""
        return self._process.pid

    def send(self, message: Any) -> None:
        """Queues a message. Never waits."""
        self._outbox.put(message)

    def kill(self) -> None:
        """Ends it at once; it is reported dead as soon as all that it said was taken."""
        self._process.kill()

    def close(self) -> None:
        """Ends it, with force after two seconds. May be called twice."""
        self._outbox.put(None)
        self._wire.hang_up()
        for thread in self._threads:
            thread.join()
        self._wire.close()

    def _write(self) -> None:
        try:
            while (message := self._outbox.get()) is not None:
                self._wire.send(message)
        except OSError:
            pass  # it is gone, as the other thread notices
        except Exception as error:
            self._error = error
            self._wire.hang_up()

    def _read(self) -> None:
        try:
            while (message := self._wire.receive()) is not None:
                match message:
                    case Logged(name, level, text):
                        logging.getLogger(name).log(level, "%s", text)
                    case Failed():
                        raise message.error(NAME)
                    case _:
                        self._on_message(self, message)
        except Exception as error:
            self._error = self._error or error
        self._wire.hang_up()  # upon which it ends
        code = reap(self._process)
        self._on_death(self, self._error or EngineError(NAME, self.pid, *last_words(code)))
