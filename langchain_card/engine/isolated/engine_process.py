"""`EngineProcess`: an engine in a process that may die, and that is then started again."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Protocol

from langchain_card.config import EngineConfig
from langchain_card.core.messages import TARGET
from langchain_card.core.workers import Workers
from langchain_card.engine.isolated import messages as m
from langchain_card.engine.isolated.sites import Site
from langchain_card.engine.liveness import ProcessWatch
from langchain_card.engine.transports.child_process import ChildProcess
from langchain_card.engine.transports.thread import MessageQueue
from langchain_card.errors import DeviceError, EngineError
from langchain_card.models.files import Progress
from langchain_card.ports import Clock, Health
from langchain_card.runtime.kind import Kind

log = logging.getLogger(__name__)

END_SECONDS = 5.0
"""Time for the engine to end: for the pass in hand, and for texts that it writes (`prefix_folder.CLOSE_SECONDS`)."""

ROOM_SECONDS = 30.0
"""Time after a process was lost in which "no room on the device" is tried again: drivers free its memory late."""


class Owner(Protocol):
    """The owner of an engine's process, which is told of its life on its own thread."""

    def post(self, act: Callable[[], None]) -> None:
        """Run a function on the owner's thread, soon; called from any thread."""

    def on_up(self, process: EngineProcess) -> None:
        """Note that the engine takes requests."""

    def on_message(self, process: EngineProcess, message: Any) -> None:
        """Take a message about a request."""

    def on_lost(self, process: EngineProcess, error: BaseException) -> None:
        """Note that the engine is gone with all its requests; `process.error` is set if it will not come back."""


class EngineProcess:
    """An engine's process: the present one of those that follow each other. Used by its owner's thread.

    Args:
        name: of the process, for errors and health.
        config: of the engine.
        site: the part of the machine that the process may use.
        owner: takes what happens.
        clock: source of time.
        progress: receives the steps in which the first process loads the engine.

    Attributes:
        name: of the process.
        config: of the engine, with what it filled in once it was up.
        kind: of the latest engine that has loaded; None before the first.
        is_begun: whether a process was started, however that ended.
        is_up: whether it takes requests.
        error: why it was given up; None while it was not.
    """

    def __init__(
        self, name: str, config: EngineConfig, site: Site, owner: Owner, clock: Clock, progress: Progress
    ) -> None:
        self.name, self.config = name, config
        self.kind: Kind | None = None
        self.is_up, self.error = False, None  # type: bool, BaseException | None
        self._site, self._owner, self._clock, self._progress = site, owner, clock, progress
        self._workers = Workers((name,), config.limits)
        self._watch, self._down_since = ProcessWatch(clock), clock()
        self._restart_at: float | None = None
        self._was_up = False
        self._process: ChildProcess | None = None  # the latest
        self.is_begun = False
        self._reported: dict[str, Health] = {}

    @property
    def pid(self) -> int | None:
        """Id of the process; None while there is none."""
        is_there = self._process is not None and self._restart_at is None and self.error is None
        return self._process.pid if self._process is not None and is_there else None

    @property
    def num_seats(self) -> int:
        """Number of requests that the engine answers at once; 0 before it was up, and once it was given up."""
        return self.config.limits.num_seqs if self._was_up and self.error is None else 0

    @property
    def is_loading(self) -> bool:
        """Whether a process loads the engine, which was never up."""
        return self._process is not None and not self._was_up and self.error is None

    def start(self) -> None:
        """Start the first process.

        Raises:
            EngineError: no process could be started.
        """
        self.is_begun = True
        self._watch, self._process = ProcessWatch(self._clock), self._start()

    def start_later(self) -> None:
        """Start the first process beside others that are up; give it up if it cannot be started."""
        try:
            self.start()
        except Exception as error:
            self._plan_restart(error)

    def send(self, message: Any) -> None:
        """Queue a message to the engine; raises what `Direction.encode` raises."""
        if self.is_up and self._process is not None:
            self._process.send(message)

    def health(self) -> dict[str, Health]:
        """Return the health of the process and of the workers in it, by name; may be called from any thread."""
        state = "up" if self.is_up else "given up" if self.error is not None else "loading"
        reported = self._reported if self.is_up else {}
        return {self.name: Health(state, self._watch.silence, self.config.limits.silence_seconds), **reported}

    def check(self) -> float | None:
        """Restart the process if that is due, and kill it if it is silent; return the seconds until the next check.

        None stands for no other check: it was not started, or it was given up.
        """
        if self._process is None or self.error is not None:
            return None
        limit = self.config.limits.silence_seconds
        if self._restart_at is not None:
            if self._clock() >= self._restart_at:
                self._restart()
        elif self._watch.is_lost(limit):
            log.error("the %s has sent nothing for %g seconds: killing it", self.name, limit)
            self._process.kill()
        if self._restart_at is not None:
            return max(0.0, self._restart_at - self._clock())
        return None if self.error is not None else self._watch.seconds_left(limit)

    def close(self) -> None:
        """End the process."""
        if self._process is not None:
            self._process.close()

    def _start(self) -> ChildProcess:
        def handle(act: Callable[[Any], None], argument: Any) -> None:
            self._owner.post(functools.partial(act, argument))

        on_message, on_death = (functools.partial(handle, act) for act in (self._receive, self._handle_death))
        return start_engine(self.name, m.LoadEngine(self.config), self._site, on_message, on_death)

    def _restart(self) -> None:
        self._watch = ProcessWatch(self._clock)
        try:
            self._process, self._restart_at = self._start(), None
        except Exception as error:
            self._plan_restart(error)

    def _receive(self, message: Any) -> None:
        self._watch.saw_message()
        match message:
            case m.LoadStep(stage):
                if not self._was_up:
                    self._progress.update(stage, 0, 0)
            case m.Loaded(limits, draft_device, kind):
                self.kind = kind
                self.config = replace(self.config, limits=limits, draft_device=draft_device)
                self.is_up = self._was_up = True
                if self._workers.started(self.name):
                    log.warning("the %s is up again after %.1f seconds", self.name, self._clock() - self._down_since)
                self._owner.on_up(self)
            case m.EngineHeartbeat(workers):
                self._check_workers(workers)
            case _:
                self._owner.on_message(self, message)

    def _check_workers(self, workers: dict[str, Health]) -> None:
        self._reported = workers
        target = workers.get(TARGET, Health())
        if self._watch.hangs(target) and self._process is not None:
            log.error("the target of the %s hangs or is gone (%s): killing the process", self.name, target)
            self._process.kill()

    def _handle_death(self, error: BaseException) -> None:
        if self._process is not None:
            self._process.close()
        self._down_since = self._clock() if self.is_up else self._down_since
        self.is_up, self._reported = False, {}
        self._plan_restart(error)

    def _plan_restart(self, error: BaseException) -> None:
        """Schedule the next process; give up if none was ever up, or if too many died."""
        if self._was_up and isinstance(error, DeviceError) and self._clock() < self._down_since + ROOM_SECONDS:
            self._restart_at = self._clock() + self.config.limits.restart_seconds
        elif self._was_up:
            self._restart_at, error = self._workers.died(self.name, self._clock()), self._request_error(error)
        if self._restart_at is None:
            self.error = error
        self._owner.on_lost(self, error)

    def _request_error(self, error: BaseException) -> EngineError:
        """Return the error for requests: a loading error is meant for the user who chose the models."""
        if type(error) is EngineError:
            return error
        limit = f"it could not go on ({error})"
        wrapped = EngineError(self.name, type(error).__name__, limit, "the log may say more")
        wrapped.__cause__ = error
        return wrapped


def start_engine(
    name: str,
    load: m.LoadEngine,
    site: Site,
    on_message: Callable[[Any], None],
    on_death: Callable[[BaseException], None],
) -> ChildProcess:
    """Start an engine's process, which serves until it is closed or dies.

    Args:
        name: of the process, for errors.
        load: the first message to it.
        site: the part of the machine that it may use.
        on_message: takes its messages, in order.
        on_death: called once, after the last message, unless the process was ended by `close`.

    Raises:
        EngineError: no process could be started.
    """
    return ChildProcess(
        "langchain_card.engine.isolated.main",
        name,
        thread_name="card-engine",
        sends=m.TO_ENGINE,
        takes=m.FROM_ENGINE,
        first=load,
        outbox=_FrameQueue(),
        on_message=on_message,
        on_death=on_death,
        end_seconds=END_SECONDS,
        cores=site.cores,
        environment=site.environment,
    )


class _FrameQueue(MessageQueue[Any]):
    """A queue that encodes messages when they are put: a bad message raises to its sender, and the process survives."""

    def put(self, message: Any) -> None:
        """Append the message's frame; raises what `Direction.encode` raises."""
        super().put(m.TO_ENGINE.encode(message))
