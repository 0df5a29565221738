"""`ReplicaPool`: the engines of a Ray Serve application, as a relay sees them."""

from __future__ import annotations

import asyncio
import functools
import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from dataclasses import replace
from typing import Any, TypeVar

import ray
from ray import serve
from ray.exceptions import RayError, RayTaskError

from langchain_card.cluster.replica import DESCRIBED, FROM_REPLICA, TO_REPLICA
from langchain_card.core.request import FinishReason, RequestStats
from langchain_card.engine.relay.answers import Accepted, Alive, Lost, OtherModel
from langchain_card.engine.relay.messages import (
    Committed,
    Ended,
    EngineLost,
    NotServed,
    Reply,
    RequestFailed,
    Submit,
)
from langchain_card.engine.relay.pool import ENGINE_REPLICA, Description
from langchain_card.errors import EngineError
from langchain_card.ports import Health
from langchain_card.runtime.kind import Kind

log = logging.getLogger(__name__)
T = TypeVar("T")

DEPLOYMENT = "EngineReplica"
"""Name of the deployment of engines in an application."""

SILENCE_SECONDS = 10.0
"""Longest time without a sign of life until an answer goes on elsewhere, unless `limits.silence_seconds` is shorter."""

ACCEPT_SECONDS = 0.5
"""Longest time until a replica accepts a request whose session was moved, which may come to the one that hangs again;
it doubles with each try after the fourth."""

CHECK_SECONDS = 0.25
"""Time between two looks for streams that are silent."""

RETRY_SECONDS = 0.1
"""Pause after a replica that did not accept a request."""

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

    _post: Callable[[Callable[[], None]], None]

    def __init__(self, application: str) -> None:
        if not ray.is_initialized():
            limit = "cannot be reached: this process has not joined a Ray cluster"
            raise EngineError("cluster", application, limit, 'call ray.init(address="auto") first')
        self._application = application
        self._handle = serve.get_deployment_handle(DEPLOYMENT, application)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="card-replicas", daemon=True)
        self._attempts: set[_Attempt] = set()
        self._moved: OrderedDict[str, int] = OrderedDict()
        self._next_check = 0.0
        self._states: dict[str, int] = {}
        self._description: Description | None = None

    def start(self, post: Callable[[Callable[[], None]], None]) -> None:
        """Start the thread that reads the streams."""
        self._post = post
        self._thread.start()

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

    def submit(self, request: Submit, reply: Callable[[Reply], None]) -> _Attempt:
        """Open a stream for a request."""
        attempt = _Attempt(self, request, reply)
        self._attempts.add(attempt)
        attempt.open()
        return attempt

    def check(self) -> float | None:
        """Leave the streams that have been silent for too long; move requests again that no replica has accepted."""
        now = time.monotonic()
        if now >= self._next_check:
            self._next_check = now + CHECK_SECONDS
            for attempt in [*self._attempts]:
                if attempt.is_accepted and now - attempt.seen > self._silence:
                    log.error("a replica of %s has sent nothing for %g seconds", self._application, self._silence)
                    self._move(attempt)
                    error = EngineError("replica", "silent", f"it has sent nothing for {self._silence:g} seconds")
                    attempt.end(EngineLost(error))
                elif not attempt.is_accepted and now - attempt.seen > self._patience(attempt):
                    self._move(attempt)
                    attempt.open()
        return self._next_check - now

    def _patience(self, attempt: _Attempt) -> float:
        """Return how long a replica may take to accept a request; it may also wait because all replicas are full."""
        was_moved = attempt.session in self._moved
        return min(self._silence, ACCEPT_SECONDS * 2.0 ** max(0, attempt.num_tries - 4) if was_moved else self._silence)

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
        """Return the health of the replicas, by number; those that answer come first."""
        states = [name for name, known in _STATES.items() for state in known for _ in range(self._states.get(state, 0))]
        return {f"{ENGINE_REPLICA} {number}": Health(state) for number, state in enumerate(states or ["down"], 1)}

    def close(self) -> None:
        """End all streams, and the thread."""
        if self._thread.ident is not None:
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
                    raise EngineError("cluster", self._application, limit, "serve status lists the applications")
            description: Description = DESCRIBED.decode(reply.result())
        except RayError as error:
            limit = f"does not answer ({type(error).__name__}: {str(error)[:200]})"
            raise EngineError("cluster", self._application, limit, "serve status says more") from error
        finally:
            reply.cancel()
        return description

    async def _poll(self) -> None:
        while True:
            try:
                status = await asyncio.to_thread(serve.status)
                found = status.applications[self._application].deployments[DEPLOYMENT].replica_states
                self._states = {getattr(state, "value", state): count for state, count in found.items()}
            except Exception as error:
                self._states = {}
                log.warning("the replicas of %s are not known at present (%s)", self._application, error)
            await asyncio.sleep(POLL_SECONDS)

    async def read(self, attempt: _Attempt, session: str, number: int) -> None:
        """Read the frames of an attempt's stream `number`, and post its messages."""
        stream: Any = self._handle.options(stream=True, session_id=session).answer.remote(attempt.frame)
        error: BaseException = EngineError("replica", "stream", "it ended before the answer did")
        try:
            async for frame in stream:
                self._post(functools.partial(attempt.receive, FROM_REPLICA.decode(frame), number))
        except asyncio.CancelledError:
            raise
        except Exception as caught:
            error = caught
        finally:
            stream.cancel()
        if not attempt.is_accepted:
            await asyncio.sleep(RETRY_SECONDS)
        self._post(functools.partial(attempt.lose, error, number))

    # On the relay's thread.

    def open_stream(self, attempt: _Attempt) -> Future[None]:
        """Open a stream to the replica of the request's session."""
        session = f"{attempt.session}\n{self._moved.get(attempt.session, 0)}"
        return self._run(self.read(attempt, session, attempt.num_tries))

    def try_another(self, attempt: _Attempt) -> bool:
        """Let the router choose another replica for a session; return False if enough were tried."""
        self._move(attempt)
        return attempt.num_tries <= 2 * sum(self._states.values()) + 2

    def discard(self, attempt: _Attempt) -> None:
        """Forget an attempt that has ended."""
        self._attempts.discard(attempt)

    def _move(self, attempt: _Attempt) -> None:
        self._moved[attempt.session] = self._moved.pop(attempt.session, 0) + 1
        if len(self._moved) > MAX_MOVED:
            self._moved.popitem(last=False)


class _Attempt:
    """A request at a replica. Used on the relay's thread, but for `frame`.

    Attributes:
        frame: of the request.
        session: name of the request's session; its own without one.
        seen: time of the last message, or when the stream was opened.
        is_accepted: whether an engine answers it.
        num_tries: streams that were opened; only the last is read.
    """

    def __init__(self, pool: ReplicaPool, request: Submit, reply: Callable[[Reply], None]) -> None:
        params = request.request.params
        kind = request.kind or pool.kind()  # a new request, too, is in the tokens of the model that was described
        self.frame = TO_REPLICA.body(replace(request, kind=kind))
        self.session = f"{params.tenant}\n{params.session or request.request.request_id}"
        self.seen, self.is_accepted, self.num_tries = time.monotonic(), False, 0
        self._pool, self._reply, self._stats = pool, reply, RequestStats()
        self._kind: Kind | None = None
        self._is_over = False
        self._reading: Future[None] | None = None

    @property
    def kind(self) -> Kind | None:
        """The kind of the engine, once it has accepted the request."""
        return self._kind

    def open(self) -> None:
        """Open a stream, in place of the one before."""
        if self._reading is not None:
            self._reading.cancel()
        self.num_tries, self.seen = self.num_tries + 1, time.monotonic()
        self._reading = self._pool.open_stream(self)

    def lose(self, error: BaseException, number: int) -> None:
        """Note that a stream ended before the answer did."""
        if number == self.num_tries:
            self.end(_last(error))

    def receive(self, message: Any, number: int) -> None:
        """Take a message of a stream."""
        if self._is_over or number != self.num_tries:
            return
        self.seen = time.monotonic()
        match message:
            case Alive():
                pass
            case Accepted(kind):
                self._kind, self.is_accepted = kind, True
            case OtherModel():
                self._try_another()
            case Lost(error):
                self.end(EngineLost(error.error("replica")))
            case NotServed(_, error):
                self.end(RequestFailed(error.error("replica")))
            case Ended():
                self.end(message)
            case _:
                if isinstance(message, Committed):
                    self._stats = message.stats
                self._reply(message)

    def end(self, last: Reply) -> None:
        """Make the last reply, unless that was made."""
        if not self._is_over:
            self._close()
            self._reply(last)

    def stop(self, num_tokens: int | None = None) -> None:
        """Close the stream, which frees the seat."""
        reason = FinishReason.ABORT if num_tokens is None else FinishReason.STOP
        self._pool._post(functools.partial(self.end, Ended(0, reason, self._stats)))

    def leave(self) -> None:
        """Close the stream."""
        self._close()

    def _close(self) -> None:
        self._is_over = True
        self._pool.discard(self)
        if self._reading is not None:
            self._reading.cancel()

    def _try_another(self) -> None:
        if self._pool.try_another(self):
            self.open()
        else:
            limit = "is another one now than the one that this process has joined"
            hint = "load the model again, or restart the server, and send the request again"
            self.end(RequestFailed(EngineError("model", "of the cluster", limit, hint)))


def failure(application: str) -> str:
    """Return why the engines of an application will not answer; an empty string if they may."""
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


def _last(error: BaseException) -> Reply:
    """Return the last reply for a stream that ended in an exception."""
    text = f"({type(error).__name__}: {str(error)[:200]})"
    if isinstance(error, EngineError) or (isinstance(error, RayError) and not isinstance(error, RayTaskError)):
        return EngineLost(EngineError("replica", "gone", f"it is gone {text}"))
    return RequestFailed(EngineError("replica", "answer", f"it could not answer {text}", "serve status says more"))
