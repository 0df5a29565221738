"""Progress of reading long texts, as LangChain's custom events.

`_generate` alone is told by LangChain which call it works for, and is not used by streams. So every kind of call notes
where its events go before its prompt is submitted.
"""

from __future__ import annotations

import math
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator
from contextlib import aclosing, contextmanager
from contextvars import ContextVar
from functools import partial
from typing import Any, cast

from langchain_core.callbacks import AsyncCallbackManager, CallbackManager
from langchain_core.language_models import BaseChatModel
from langchain_core.messages import AIMessageChunk
from langchain_core.outputs import ChatResult
from langchain_core.runnables import RunnableConfig
from langchain_core.runnables.config import ensure_config
from langchain_core.utils.uuid import uuid7
from typing_extensions import override

from langchain_card.chat.progress import ConsoleProgress, tokens
from langchain_card.core.messages import Reading
from langchain_card.engine.generation import Generation

EVENT = "card_reading"
"""Name of the events. Their data are counts of tokens: `{"read": 1024, "total": 3278}`."""

BAR_AFTER = 2.0
"""Seconds of reading after which a bar is drawn, on a terminal or in a notebook."""

_send: ContextVar[Callable[[dict[str, int]], Any] | None] = ContextVar("card_send", default=None)
"""Sends an event of the call in progress; a call on an event loop awaits the result."""


class ReportsReadings(BaseChatModel):
    """A chat model whose calls send an event to their callbacks after each chunk of a long text."""

    @override
    def stream(self, input: Any, config: RunnableConfig | None = None, **options: Any) -> Iterator[AIMessageChunk]:
        config = _with_run_id(config)
        with _noted(CallbackManager.configure(*self._callbacks_of(config)), config["run_id"]):
            yield from super().stream(input, config, **options)

    @override
    async def astream(
        self, input: Any, config: RunnableConfig | None = None, **options: Any
    ) -> AsyncIterator[AIMessageChunk]:
        config = _with_run_id(config)
        chunks = cast("AsyncGenerator[AIMessageChunk, None]", super().astream(input, config, **options))
        with _noted(AsyncCallbackManager.configure(*self._callbacks_of(config)), config["run_id"]):
            async with aclosing(chunks):
                async for chunk in chunks:
                    yield chunk

    @override
    def _generate_with_cache(
        self, messages: Any, stop: Any = None, run_manager: Any = None, **options: Any
    ) -> ChatResult:
        if run_manager is None:
            return super()._generate_with_cache(messages, stop, **options)
        with _noted(CallbackManager(run_manager.handlers), run_manager.run_id):
            return super()._generate_with_cache(messages, stop, run_manager, **options)

    @override
    async def _agenerate_with_cache(
        self, messages: Any, stop: Any = None, run_manager: Any = None, **options: Any
    ) -> ChatResult:
        if run_manager is None:
            return await super()._agenerate_with_cache(messages, stop, **options)
        with _noted(AsyncCallbackManager(run_manager.handlers), run_manager.run_id):
            return await super()._agenerate_with_cache(messages, stop, run_manager, **options)

    def _callbacks_of(self, config: RunnableConfig) -> tuple[Any, ...]:
        """Return the arguments from which LangChain makes the callback manager of a stream."""
        tags, metadata = (config.get("tags"), self.tags), (config.get("metadata"), self.metadata)
        return (config.get("callbacks"), self.callbacks, self.verbose, *tags, *metadata)


def report_readings(generation: Generation, *, shown: bool) -> None:
    """Send events for the call in progress until the answer begins or ends, and draw a bar if `shown`."""
    send = _taken()
    with ConsoleProgress(lines=False, delay=BAR_AFTER if shown else math.inf) as bar:
        for reading in generation.readings():
            bar.update("read the prompt", reading.read, reading.total, tokens)
            if send is not None:
                send(_data(reading))


async def areport_readings(generation: Generation, *, shown: bool) -> None:
    """Report as `report_readings` does, without blocking the event loop."""
    send = _taken()
    with ConsoleProgress(lines=False, delay=BAR_AFTER if shown else math.inf) as bar:
        async for reading in generation.areadings():
            bar.update("read the prompt", reading.read, reading.total, tokens)
            if send is not None:
                await send(_data(reading))


def _with_run_id(config: RunnableConfig | None) -> RunnableConfig:
    config = ensure_config(config)
    return {**config, "run_id": config.get("run_id") or uuid7()}


@contextmanager
def _noted(manager: CallbackManager | AsyncCallbackManager, run_id: Any) -> Iterator[None]:
    """Note where the events of a call go, until it is taken or the call ends."""
    send = partial(manager.on_custom_event, EVENT, run_id=run_id)
    _send.set(send)
    try:
        yield
    finally:
        if _send.get() is send:
            _send.set(None)


def _taken() -> Callable[[dict[str, int]], Any] | None:
    """Return what was noted, once: a later call must not report as this one."""
    send = _send.get()
    _send.set(None)
    return send


def _data(reading: Reading) -> dict[str, int]:
    return {"read": reading.read, "total": reading.total}
