"""`Answers`: an engine's answers as streams of messages, one stream for each request."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

from langchain_card.core.messages import Emit, Reading
from langchain_card.core.request import TABLES, FinishReason, Request, RequestStats
from langchain_card.engine.relay.messages import Began, Committed, Ended, NotServed, Submit
from langchain_card.engine.transports.frames import Failed
from langchain_card.ports import Backend

ALIVE_SECONDS = 1.0
"""Longest time between two messages of a stream."""

JOIN_SECONDS = 0.02
"""Shortest time between two messages with tokens: streams of many requests share one reader."""


@dataclass(frozen=True, slots=True)
class Alive:
    """A sign of life, while nothing else is to be reported of a request."""


Message: TypeAlias = Alive | Began | Reading | Committed | Ended | NotServed
"""A message of a stream; `Ended` or `NotServed` is the last."""


class Answers:
    """The answers of an engine as streams. Used on one event loop.

    Args:
        backend: the engine's.
        compile_grammar: compiles a request's grammar.
    """

    def __init__(self, backend: Backend, compile_grammar: Callable[[str], object]) -> None:
        self._backend, self._compile, self._ids = backend, compile_grammar, itertools.count()

    async def answer(self, submit: Submit) -> AsyncIterator[Message]:
        """Yield an answer, or the rest of one. Closing the stream discards the request, and frees its seat."""
        request = replace(submit.request, request_id=next(self._ids))
        stream = _Stream(request, asyncio.get_running_loop())
        try:
            if request.params.grammar:  # compiled here, not while the target waits
                await asyncio.to_thread(self._compile, request.params.grammar)
            self._backend.submit(stream, submit.output_ids)
        except Exception as error:  # of this request alone
            yield NotServed(0, Failed.of(error))
            return
        try:
            last = -JOIN_SECONDS
            while not stream.is_over:
                await asyncio.sleep(last + JOIN_SECONDS - time.monotonic())
                messages = await stream.take()
                for message in messages:
                    yield message
                last = time.monotonic()
        finally:
            if not stream.is_over:
                self._backend.stop(request.request_id)


class _Stream:
    """A `ports.Consumer` whose messages an event loop takes."""

    def __init__(self, request: Request, loop: asyncio.AbstractEventLoop) -> None:
        self.request, self.is_over = request, False
        self._loop, self._stats = loop, RequestStats()
        self._messages: asyncio.Queue[Message] = asyncio.Queue()

    async def take(self) -> Sequence[Message]:
        """Return what has come, tokens joined, once something has come; or a sign of life."""
        try:
            found = [await asyncio.wait_for(self._messages.get(), ALIVE_SECONDS)]
        except asyncio.TimeoutError:
            return [Alive()]
        while not self._messages.empty():
            message = self._messages.get_nowait()
            before = found[-1]
            if isinstance(message, Committed) and isinstance(before, Committed):
                found[-1] = replace(
                    message,
                    token_ids=before.token_ids + message.token_ids,
                    sources=before.sources + message.sources,
                    logprobs=before.logprobs + message.logprobs,
                )
            else:
                found.append(message)
        self.is_over = isinstance(found[-1], Ended | NotServed)
        return found

    def watch(self, stats: RequestStats) -> None:
        """Note the start of the request."""
        self._stats = stats
        self._put(Began(0))

    def read(self, reading: Reading) -> None:
        """Note how much of a long text was read."""
        self._put(reading)

    def push(self, emit: Emit) -> None:
        """Take committed tokens, with a copy of the statistics."""
        tables: dict[str, Any] = {name: {**getattr(self._stats, name)} for name in TABLES}
        stats = replace(self._stats, **tables)
        self._put(Committed(0, emit.token_ids, emit.sources, emit.logprobs, stats, emit.hit))

    def finish(self, reason: FinishReason, stats: RequestStats) -> None:
        """Note the end of the request."""
        self._put(Ended(0, reason, stats))

    def fail(self, error: BaseException) -> None:
        """Note the failure of the request."""
        self._put(NotServed(0, Failed.of(error)))

    def _put(self, message: Message) -> None:
        self._loop.call_soon_threadsafe(self._messages.put_nowait, message)
