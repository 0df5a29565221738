"""An answer while a client waits for it: given up when the client leaves, when it does not begin, or takes too long."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
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

_MOST_UNSENT = 64
"""Items that may wait for a slow client here; behind them the engine's own bound holds (`Limits.max_unread`)."""


class ClientLeft(Exception):
    """Nobody waits for the answer any longer."""


class Following(Generic[T]):
    """The items of an answer, as an asynchronous iterator; None after each `keep_alive_seconds` without one.

    The answer runs as a task of its own from the beginning. Whoever makes one calls `close` at the end.

    Args:
        items: the answer; closing the generator frees what it holds.
        receive: of the request, whose body was read.
        settings: how long to wait for what.
        ending: done when the server waits for no answer any longer.
        begun: whether the engine works for the answer.
        deadline_seconds: of this answer.

    Raises:
        ClientLeft: while iterating; the client has closed the connection.
        EngineClosedError: the server ends.
        EngineWaitError: `max_wait_seconds` passed and it had not begun.
        GenerationAbortedError: the answer was cancelled, and not by `close`.
        GenerationTimeoutError: `deadline_seconds` passed.
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
        self._since = self._now()
        self._items: asyncio.Queue[tuple[T] | Exception | None] = asyncio.Queue(_MOST_UNSENT)
        self._closed = False
        self._answer = asyncio.create_task(self._fill(items))
        self._left = asyncio.create_task(_leaving(receive))
        self._next: asyncio.Task[tuple[T] | Exception | None] | None = None

    async def _fill(self, items: AsyncGenerator[T, None]) -> None:
        try:
            async with aclosing(items):
                async for item in items:
                    await self._items.put((item,))
        except Exception as error:
            if not self._closed:
                await self._items.put(error)
        else:
            await self._items.put(None)

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> T | None:
        silent_until = self._now() + self._settings.keep_alive_seconds
        while True:
            self._next = self._next or asyncio.create_task(self._items.get())
            patience = self._patience(silent_until)
            events: set[asyncio.Future[Any]] = {self._next, self._left, self._ending, self._answer}
            await asyncio.wait(events, timeout=patience, return_when=asyncio.FIRST_COMPLETED)
            if self._left.done():
                raise ClientLeft
            if self._ending.done():
                raise self._late()
            if self._next.done():
                return self._took(self._next.result())
            if self._answer.done() and self._items.empty():
                raise GenerationAbortedError("answer", "cancelled", "another part of the program ended it", "ask again")
            if self._now() >= silent_until:
                return None

    def _took(self, item: tuple[T] | Exception | None) -> T:
        self._next = None
        if item is None:
            raise StopAsyncIteration
        if isinstance(item, Exception):
            raise item
        return item[0]

    def _patience(self, silent_until: float) -> float:
        """Seconds until something is to be done; raises when the answer has had all its time."""
        waited, settings = self._now() - self._since, self._settings
        left = self._seconds - waited
        if left <= 0:
            raise self._late()
        if not self._begun():
            left = min(left, settings.max_wait_seconds - waited)
            if left <= 0:
                limit = "others had their turn for so many seconds, and the answer had not begun"
                raise EngineWaitError("max_wait_seconds", settings.max_wait_seconds, limit, "try again later")
        return max(0.0, min(left, silent_until - self._now()))

    async def late(self) -> EngineError:
        """Waits for the last moment of the answer: returns what is raised then."""
        await asyncio.wait({self._ending}, timeout=max(0.0, self._since + self._seconds - self._now()))
        return self._late()

    def _late(self) -> EngineError:
        if self._ending.done():
            return EngineClosedError("server", "ending", "it waits for no answer any longer", "ask again")
        limit, hint = "the answer was not complete after so many seconds", "lower max_tokens"
        return GenerationTimeoutError("deadline", self._seconds, limit, hint)

    def close(self) -> None:
        """Gives the answer up, if it is still being written. Nothing is waited for. May be called twice."""
        self._closed = True
        for task in (self._answer, self._left, self._next):
            if task is not None:
                task.cancel()


async def _leaving(receive: Receive) -> None:
    """Ends when the client closes the connection."""
    while (await receive())["type"] != "http.disconnect":
        pass
