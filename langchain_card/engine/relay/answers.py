"""`AnswerStreams`: the answers of an engine as streams of messages, for a relay that reaches it over a network."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

from langchain_card.core.messages import TARGET, Emit, Reading
from langchain_card.core.request import TABLES, FinishReason, Request, RequestStats
from langchain_card.engine.relay.messages import Began, Committed, Ended, NotServed, Submit
from langchain_card.engine.transports.frames import Failed
from langchain_card.errors import DeviceLostError, EngineClosedError
from langchain_card.ports import Backend, Health
from langchain_card.runtime.kind import Kind

ALIVE_SECONDS = 1.0
"""Longest time between two messages of a stream."""

JOIN_SECONDS = 0.02
"""Shortest time between two messages with tokens: streams of many requests share one reader."""


@dataclass(frozen=True, slots=True)
class Accepted:
    """First message of a stream: the engine answers the request, and its kind."""

    kind: Kind


@dataclass(frozen=True, slots=True)
class OtherModel:
    """Only message of a stream: the answer was begun by an engine whose kind this one does not continue."""


@dataclass(frozen=True, slots=True)
class Alive:
    """A sign of life, while nothing else is to be reported of a request."""


@dataclass(frozen=True, slots=True)
class Lost:
    """Report that this engine writes no more; another one may go on."""

    error: Failed


Message: TypeAlias = Accepted | OtherModel | Alive | Began | Reading | Committed | Ended | NotServed | Lost
"""A message of a stream. `OtherModel`, `Ended`, `NotServed` or `Lost` is the last."""

_LAST = (Ended, NotServed, Lost)


class AnswerStreams:
    """The answers of an engine as streams. Used on one event loop.

    Args:
        backend: the engine's.
        kind: the engine's.
        request_ids: the engine's, for new requests.
        compile_grammar: compiles a request's grammar; raises where that is not possible.
    """

    def __init__(
        self, backend: Backend, kind: Kind, request_ids: Iterator[int], compile_grammar: Callable[[str], object]
    ) -> None:
        self._backend, self._kind, self._ids, self._compile = backend, kind, request_ids, compile_grammar

    async def answer(self, submit: Submit) -> AsyncIterator[Message]:
        """Yield an answer, or the rest of one. Closing the stream discards the request and frees its seat."""
        if submit.kind is not None and not self._kind.continues(submit.kind):
            yield OtherModel()
            return
        yield Accepted(self._kind)
        request = replace(submit.request, request_id=next(self._ids))
        stream = _Stream(request, asyncio.get_running_loop())
        try:
            if request.params.grammar:  # compiled here, not while the target waits
                async for alive in _while_running(self._compile, request.params.grammar):
                    yield alive
            self._backend.submit(stream, submit.output_ids)
        except Exception as error:  # of this request alone
            yield _failure(error)
            return
        try:
            async for message in self._messages(stream):
                yield message
        finally:
            if not stream.is_over:
                self._backend.stop(request.request_id)

    async def _messages(self, stream: _Stream) -> AsyncIterator[Message]:
        last = -JOIN_SECONDS
        while not stream.is_over:
            await asyncio.sleep(last + JOIN_SECONDS - time.monotonic())
            messages = await stream.take()
            if any(isinstance(message, Committed) for message in messages):
                last = time.monotonic()
            if not messages:
                target = self._backend.health().get(TARGET, Health())
                messages = [Alive() if target.ok else Lost(Failed("EngineError", f"its target hangs ({target})"))]
            elif isinstance(messages[-1], NotServed) and self._backend.health()[TARGET].state == "given up":
                messages = [*messages[:-1], Lost(messages[-1].error)]  # of all its requests, not of this one
            for message in messages:
                yield message
            if isinstance(messages[-1], Lost):
                return


async def _while_running(function: Callable[[str], object], argument: str) -> AsyncIterator[Alive]:
    """Run a function on another thread; yield signs of life meanwhile, and raise what it raises."""
    running = asyncio.ensure_future(asyncio.to_thread(function, argument))
    while not (await asyncio.wait([running], timeout=ALIVE_SECONDS))[0]:
        yield Alive()
    running.result()


def _failure(error: BaseException) -> NotServed | Lost:
    """Return the last message of a request that an engine could not serve; another engine can, where it is gone."""
    failed = Failed.of(error)
    return Lost(failed) if isinstance(error, DeviceLostError | EngineClosedError) else NotServed(0, failed)


class _Stream:
    """A `ports.Consumer` whose messages an event loop takes.

    Attributes:
        request: the request.
        is_over: whether the last message was taken.
    """

    def __init__(self, request: Request, loop: asyncio.AbstractEventLoop) -> None:
        self.request, self.is_over = request, False
        self._loop, self._stats = loop, RequestStats()
        self._queue: asyncio.Queue[Message] = asyncio.Queue()

    async def take(self) -> Sequence[Message]:
        """Return what has come, tokens joined, as soon as something has come; nothing after `ALIVE_SECONDS`."""
        try:
            found = [await asyncio.wait_for(self._queue.get(), ALIVE_SECONDS)]
        except asyncio.TimeoutError:
            return []
        while not self._queue.empty():
            message, before = self._queue.get_nowait(), found[-1]
            if isinstance(message, Committed) and isinstance(before, Committed):
                found[-1] = replace(
                    message,
                    token_ids=before.token_ids + message.token_ids,
                    sources=before.sources + message.sources,
                    logprobs=before.logprobs + message.logprobs,
                )
            else:
                found.append(message)
        self.is_over = isinstance(found[-1], _LAST)
        return found

    def watch(self, stats: RequestStats) -> None:
        """Note the start of the request."""
        self._stats = stats
        self._put(Began(0))

    def read(self, reading: Reading) -> None:
        """Note how much of a long text was read."""
        self._put(reading)

    def push(self, emit: Emit) -> None:
        """Take committed tokens, with a copy of the statistics, which go on to change."""
        tables: dict[str, Any] = {name: {**getattr(self._stats, name)} for name in TABLES}
        stats = replace(self._stats, **tables)
        self._put(Committed(0, emit.token_ids, emit.sources, emit.logprobs, stats, emit.hit))

    def finish(self, reason: FinishReason, stats: RequestStats) -> None:
        """Note the end of the request."""
        self._put(Ended(0, reason, stats))

    def fail(self, error: BaseException) -> None:
        """Note the failure of the request."""
        self._put(_failure(error))

    def _put(self, message: Message) -> None:
        with contextlib.suppress(RuntimeError):  # the event loop has ended, and its streams with it
            self._loop.call_soon_threadsafe(self._queue.put_nowait, message)
