"""`ReplicaPool`: the engines of a Ray Serve application, as a relay sees them."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import math
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from typing import Any, TypeVar

import ray
from ray import serve
from ray.exceptions import RayError, RayTaskError
from ray.serve.exceptions import RayServeException

from langchain_card.cluster.replica import DESCRIBED, FROM_REPLICA
from langchain_card.cluster.replica_attempt import ReplicaAttempt
from langchain_card.engine.relay.description import Description
from langchain_card.engine.relay.messages import (
    EngineLost,
    Reply,
    RequestFailed,
    Submit,
)
from langchain_card.engine.relay.pool import ENGINE_REPLICA
from langchain_card.errors import EngineError
from langchain_card.ports import Health
from langchain_card.runtime.kind import Kind

log = logging.getLogger(__name__)
T = TypeVar("T")

LOGS_HINT = "its replicas' logs are in /tmp/ray/session_latest/logs/serve of their nodes"

DEPLOYMENT = "EngineReplica"
"""Name of the deployment of engines in an application."""

SILENCE_SECONDS = 10.0
"""Longest time without a sign of life until an answer goes on elsewhere, unless `limits.silence_seconds` is shorter."""

ACCEPT_SECONDS = 0.5
"""Longest time until a replica accepts a request, while one may hang; it doubles with each try after the fourth."""

SUSPECT_SECONDS = 60.0
"""Time after a sign of a hung replica in which Ray may not have replaced it."""

STALL_SECONDS = 1.0
"""A check that is late by more has found this process at a standstill, not the replicas."""

CHECK_SECONDS = 0.25
"""Time between two looks for streams that are silent."""

RETRY_SECONDS = 0.1
"""Pause after a replica that did not accept a request."""

STATUS_SECONDS = 10.0
"""Longest time until Ray says how many replicas there are."""

POLL_SECONDS = 2.0
"""Time between two looks at the number of replicas."""

_STATES = {"up": ("RUNNING", "PENDING_MIGRATION"), "loading": ("STARTING", "UPDATING"), "down": ("RECOVERING",)}
"""States of Ray's replicas, by state of our health; a replica that stops has none."""

MAX_MOVED = 10_000
"""Sessions whose move to another replica is remembered."""


class ReplicaPool:
    """An `EnginePool` of the replicas of an application. Ray chooses one for each request, and replaces those that die.

    A session keeps to one replica by Ray's consistent hashing. Where that hangs, or has another model, its name is
    changed for the router, so that it gets another replica.

    Args:
        application: name of the Serve application.
    """

    def __init__(self, application: str) -> None:
        if not ray.is_initialized():
            limit = "cannot be reached: this process has not joined a Ray cluster"
            raise EngineError("cluster", application, limit, 'call ray.init(address="auto") first')
        self._application = application
        try:
            self._handle = serve.get_deployment_handle(DEPLOYMENT, application)
        except (RayServeException, KeyError) as error:
            limit = "is no application of this cluster"
            raise EngineError("cluster", application, limit, "langchain-card serve --ray starts one") from error
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="card-replicas", daemon=True)
        self._attempts: set[ReplicaAttempt] = set()
        self._moved: OrderedDict[str, int] = OrderedDict()
        self._next_check, self._suspect_until = math.inf, 0.0
        self._states: dict[str, int] = {}
        self._has_other_model = False
        self._description: Description | None = None
        self.post: Callable[[Callable[[], None]], None] = lambda _: None
        self._closing = False
        self._thread.start()

    def start(self, post: Callable[[Callable[[], None]], None]) -> None:
        """Begin to post messages of streams."""
        self.post, self._next_check = post, time.monotonic()

    def describe(self) -> Description:
        """Wait until a replica is up, and return what it says of its engine.

        Raises:
            EngineError: there is no such application, or its engines could not be loaded.
        """
        self._description = self._run(self._describe()).result()
        self._run(self._poll())
        return self._description

    @property
    def num_seats(self) -> int:
        """Number of requests that all engines together answer at once."""
        seats = self._description.config.limits.num_seqs if self._description is not None else 1
        return seats * max(1, self._states.get("RUNNING", 1))

    def submit(self, request: Submit, reply: Callable[[Reply], None]) -> ReplicaAttempt:
        """Open a stream for a request."""
        attempt = ReplicaAttempt(self, request, reply)
        self._attempts.add(attempt)
        attempt.open()
        return attempt

    def check(self) -> float | None:
        """Leave the streams that have been silent for too long; move requests again that no replica has accepted."""
        now = time.monotonic()
        if now >= self._next_check:
            was_stalled, self._next_check = now - self._next_check > STALL_SECONDS, now + CHECK_SECONDS
            for attempt in [*self._attempts]:
                if was_stalled:
                    attempt.seen = now
                elif now - attempt.seen > self._patience(attempt, now):
                    self._leave(attempt, now)
        return self._next_check - now

    def _patience(self, attempt: ReplicaAttempt, now: float) -> float:
        """Return how long a stream may be silent. One that is not accepted may wait because all replicas are full."""
        if attempt.is_accepted or now > self._suspect_until:
            return self._silence
        return float(min(self._silence, ACCEPT_SECONDS * 2 ** min(10, max(0, attempt.num_tries - 4))))

    def _leave(self, attempt: ReplicaAttempt, now: float) -> None:
        """Let a request go on in another replica than the one that is silent."""
        self.move(attempt)
        if attempt.is_accepted:
            self._suspect_until = now + SUSPECT_SECONDS
            log.error("a replica of %s has sent nothing for %g seconds", self._application, self._silence)
            error = EngineError("replica", "silent", f"it has sent nothing for {self._silence:g} seconds")
            attempt.end(EngineLost(error))
        else:
            attempt.open()

    @property
    def _silence(self) -> float:
        limit = SILENCE_SECONDS if self._description is None else self._description.config.limits.silence_seconds
        return min(limit, SILENCE_SECONDS)

    def announce(self, count: int) -> None:
        """Do nothing: requests spread over the replicas."""

    def kind(self) -> Kind:
        """Return the kind of the engine that described itself."""
        if self._description is None:
            raise EngineError("kind", None, "is not known before an engine has described itself")
        return self._description.kind

    def health(self) -> dict[str, Health]:
        """Return the health of the replicas, by number; those that answer come first.

        All are given up while they have another model than the one that was described.
        """
        states = [name for name, known in _STATES.items() for state in known for _ in range(self._states.get(state, 0))]
        if self._has_other_model:
            states = ["given up"] * len(states)
        return {f"{ENGINE_REPLICA} {number}": Health(state) for number, state in enumerate(states or ["down"], 1)}

    def close(self) -> None:
        """End all streams, and the thread."""
        if not self._closing:
            self._closing = True
            self._run(_cancel_all()).result()
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.close()

    def _run(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    # On the event loop.

    async def _describe(self) -> Description:
        reply = asyncio.ensure_future(_awaited(self._handle.describe.remote()))
        try:
            while not (await asyncio.wait([reply], timeout=POLL_SECONDS))[0]:
                if limit := await asyncio.to_thread(failure, self._application):
                    raise EngineError("cluster", self._application, limit, LOGS_HINT)
            description: Description = DESCRIBED.decode(reply.result())
        except (RayError, RayServeException) as error:
            raise _no_answer(self._application, error) from error
        finally:
            reply.cancel()
        return description

    async def _poll(self) -> None:
        is_known = True
        while ray.is_initialized():  # else a question about Serve would start a cluster
            try:
                status = await asyncio.wait_for(asyncio.to_thread(serve.status), STATUS_SECONDS)
                found = status.applications[self._application].deployments[DEPLOYMENT].replica_states
                self._states, is_known = {getattr(state, "value", state): count for state, count in found.items()}, True
            except Exception as error:
                if is_known:
                    log.warning("the replicas of %s are not known at present (%r)", self._application, error)
                is_known = False
            await asyncio.sleep(POLL_SECONDS)
        self._states = {}

    async def read(self, attempt: ReplicaAttempt, session: str, number: int) -> None:
        """Read the frames of an attempt's stream `number`, and post its messages."""
        stream: Any = None
        error: BaseException = _StreamEnded("it ended before the answer did")
        try:
            stream = self._handle.options(stream=True, session_id=session).answer.remote(attempt.frame)
            async for frame in stream:
                self.post(functools.partial(attempt.receive, FROM_REPLICA.decode(frame), number))
        except asyncio.CancelledError as caught:  # here, or by Ray
            if self._closing or not attempt.reads(number):
                raise
            error = caught
        except Exception as caught:
            error = caught
        finally:
            if stream is not None:
                with contextlib.suppress(Exception):  # those of a stream that could not be opened
                    stream.cancel()
        await asyncio.sleep(0 if attempt.is_accepted else RETRY_SECONDS)
        self.post(functools.partial(attempt.lose, error, number))

    # On the relay's thread.

    def open_stream(self, attempt: ReplicaAttempt) -> Future[None]:
        """Open a stream to the replica of the request's session."""
        session = f"{attempt.session}\n{self._moved.get(attempt.session, 0)}"
        return self._run(self.read(attempt, session, attempt.num_tries))

    def try_another(self, attempt: ReplicaAttempt) -> bool:
        """Let the router choose another replica for a session; return False if enough were tried."""
        self.move(attempt)
        self._has_other_model = attempt.num_tries > 2 * sum(self._states.values()) + 2
        return not self._has_other_model

    def accept(self) -> None:
        """Note that a replica has the model that was described."""
        self._has_other_model = False

    def discard(self, attempt: ReplicaAttempt) -> None:
        """Forget an attempt that has ended."""
        self._attempts.discard(attempt)

    def last_reply(self, error: BaseException) -> Reply:
        """Return the last reply for a stream that ended in an exception."""
        text = f"({type(error).__name__}: {str(error)[:200]})"
        is_gone = isinstance(error, RayError) and not isinstance(error, RayTaskError)
        if is_gone or isinstance(error, _StreamEnded | asyncio.CancelledError):
            is_leaving = self._states.get("STOPPING", 0) > 0
            return EngineLost(EngineError("replica", "gone", f"it is gone {text}"), died=not is_leaving)
        return RequestFailed(EngineError("replica", "answer", f"it could not answer {text}", LOGS_HINT))

    def after_pause(self, act: Callable[[], None]) -> None:
        """Do something on the relay's thread a little later."""
        self._loop.call_soon_threadsafe(self._loop.call_later, RETRY_SECONDS, functools.partial(self.post, act))

    def move(self, attempt: ReplicaAttempt) -> None:
        """Change the name of a session for the router, which may choose another replica then."""
        self._moved[attempt.session] = self._moved.pop(attempt.session, 0) + 1
        if len(self._moved) > MAX_MOVED:
            self._moved.popitem(last=False)


class _StreamEnded(Exception):
    """A stream that ended without a last message."""


def _no_answer(application: str, error: Exception) -> EngineError:
    limit = f"does not answer ({type(error).__name__}: {str(error)[:200]})"
    return EngineError("cluster", application, limit, LOGS_HINT)


def failure(application: str) -> str:
    """Return why the engines of an application will not answer; an empty string if they may."""
    if not ray.is_initialized():
        return "cannot be reached: this process has left the cluster"
    found = serve.status().applications.get(application)
    if found is None or found.status == "DELETING":
        return "is no application of this cluster"
    if found.status != "DEPLOY_FAILED":
        return ""
    messages = [found.message, *(deployment.message for deployment in found.deployments.values())]
    return "failed: " + " ".join(message.splitlines()[-1] for message in messages if message)  # else a traceback


async def _awaited(response: Any) -> bytes:
    frame: bytes = await response
    return frame


async def _cancel_all() -> None:
    tasks = asyncio.all_tasks() - {asyncio.current_task()}
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
