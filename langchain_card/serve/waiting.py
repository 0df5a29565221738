"""`PendingAnswer`: an answer that is given up if the client disconnects, it does not begin, or it takes too long."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Callable
from typing import Any, Generic, TypeVar

from starlette.types import Receive
from typing_extensions import Self

from langchain_card.errors import (
    EngineClosedError,
    EngineError,
    EngineWaitError,
    GenerationAbortedError,
    GenerationTimeoutError,
)
from langchain_card.serve.settings import Settings

T = TypeVar("T")

_MAX_UNSENT = 64
"""Items buffered here for a slow client; behind them the engine has its own limit (`Limits.max_unread`)."""


class ClientLeft(Exception):
    """The client closed the connection before its answer was complete."""


class PendingAnswer(Generic[T]):
    """An asynchronous iterator over the items of an answer while its client waits.

    The answer runs in a task of its own from the start. The caller must call `close` at the end.

    Args:
        items: the answer; closing the generator frees what it holds.
        receive: the request's ASGI `receive`; the body has been read.
        settings: limits of waiting.
        ending: done when the server ends all answers.
        begun: returns True once the engine works on the answer.
        deadline_seconds: seconds that this answer may take.
    """

    def __init__(
        self,
        items: AsyncGenerator[T, None],
        receive: Receive,
        settings: Settings,
        ending: asyncio.Future[None],
        begun: Callable[[], bool],
        deadline_seconds: float,
    ) -> None:
        self._settings, self._ending, self._begun, self._seconds = settings, ending, begun, deadline_seconds
        self._now = asyncio.get_running_loop().time
        self._start = self._now()
        self._items: asyncio.Queue[tuple[T] | Exception | None] = asyncio.Queue(_MAX_UNSENT)
        self._closed = False
        self._task = asyncio.create_task(self._fill(items))
        self._disconnected = asyncio.create_task(_disconnect(receive))
        self._next: asyncio.Task[tuple[T] | Exception | None] | None = None

    async def _fill(self, items: AsyncGenerator[T, None]) -> None:
        try:
            async with contextlib.aclosing(items):
                async for item in items:
                    await self._items.put((item,))
        except Exception as error:
            if not self._closed:
                await self._items.put(error)
        else:
            await self._items.put(None)

    def add(self, item: T) -> None:
        """Add an item beside those of the answer; it is lost if the client is slow."""
        with contextlib.suppress(asyncio.QueueFull):
            self._items.put_nowait((item,))

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> T | None:
        """Return the next item, or None after `keep_alive_seconds` without one.

        Raises:
            ClientLeft: the client closed the connection.
            EngineClosedError: the server is ending.
            EngineWaitError: `max_wait_seconds` passed and the answer had not begun.
            GenerationAbortedError: the answer was cancelled other than by `close`.
            GenerationTimeoutError: `deadline_seconds` passed.
        """
        silent_until = self._now() + self._settings.keep_alive_seconds
        while True:
            self._next = self._next or asyncio.create_task(self._items.get())
            timeout = self._timeout(silent_until)
            events: set[asyncio.Future[Any]] = {self._next, self._disconnected, self._ending, self._task}
            await asyncio.wait(events, timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
            if self._disconnected.done():
                raise ClientLeft
            if self._ending.done():
                raise self._late()
            if self._next.done():
                return self._take(self._next.result())
            if self._task.done() and self._items.empty():
                raise GenerationAbortedError("answer", "cancelled", "another part of the program ended it", "ask again")
            if self._now() >= silent_until:
                return None

    def _take(self, item: tuple[T] | Exception | None) -> T:
        self._next = None
        if item is None:
            raise StopAsyncIteration
        if isinstance(item, Exception):
            raise item
        return item[0]

    def _timeout(self, silent_until: float) -> float:
        """Return the seconds to wait for the next event; raise if the answer's time is up."""
        waited, settings = self._now() - self._start, self._settings
        remaining = self._seconds - waited
        if remaining <= 0:
            raise self._late()
        if not self._begun():
            remaining = min(remaining, settings.max_wait_seconds - waited)
            if remaining <= 0:
                limit = "others had their turn for so many seconds, and the answer had not begun"
                raise EngineWaitError("max_wait_seconds", settings.max_wait_seconds, limit, "try again later")
        return max(0.0, min(remaining, silent_until - self._now()))

    async def late(self) -> EngineError:
        """Wait until the answer's time is up or the server ends; return the error for it."""
        await asyncio.wait({self._ending}, timeout=max(0.0, self._start + self._seconds - self._now()))
        return self._late()

    def _late(self) -> EngineError:
        if self._ending.done():
            return EngineClosedError("server", "ending", "it waits for no answer any longer", "ask again")
        limit, hint = "the answer was not complete after so many seconds", "lower max_tokens"
        return GenerationTimeoutError("deadline", self._seconds, limit, hint)

    def close(self) -> None:
        """Cancel the answer if it still runs. Does not wait; a second call does nothing."""
        self._closed = True
        for task in (self._task, self._disconnected, self._next):
            if task is not None:
                task.cancel()


async def _disconnect(receive: Receive) -> None:
    """Return when the client closes the connection."""
    while (await receive())["type"] != "http.disconnect":
        pass
