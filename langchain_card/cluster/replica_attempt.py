"""`ReplicaAttempt`: the work of a replica on one request, as its stream of messages shows it."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from langchain_card.cluster.replica import TO_REPLICA
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
from langchain_card.errors import EngineError
from langchain_card.runtime.kind import Kind

if TYPE_CHECKING:
    from langchain_card.cluster.replica_pool import ReplicaPool


class ReplicaAttempt:
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
        self.num_tries, self.seen = self.num_tries + 1, time.monotonic()
        if self._reading is not None:
            self._reading.cancel()
        self._reading = self._pool.open_stream(self)

    def reads(self, number: int) -> bool:
        """Return whether a stream is the one that counts."""
        return not self._is_over and number == self.num_tries

    def lose(self, error: BaseException, number: int) -> None:
        """Note that a stream ended before the answer did."""
        if self.reads(number):
            self.end(self._pool.last_reply(error))

    def receive(self, message: Any, number: int) -> None:
        """Take a message of a stream."""
        if not self.reads(number):
            return
        self.seen = time.monotonic()
        match message:
            case Alive():
                pass
            case Accepted(kind):
                self._kind, self.is_accepted = kind, True
                self._pool.accept()
            case OtherModel():
                self._try_another()
            case Lost(error):  # by an engine whose actor lives
                self._pool.move(self)
                self._close()
                lost = EngineLost(error.error("replica"))
                self._pool.after_pause(lambda: self._reply(lost))
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
        self._pool.post(functools.partial(self.end, Ended(0, reason, self._stats)))

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
