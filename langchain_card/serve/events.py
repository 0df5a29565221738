"""Server-sent events: how an answer is streamed."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any

from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send
from typing_extensions import override

from langchain_card.serve.error_bodies import Problem

KEEP_ALIVE = b": still there\n\n"
HEADERS = {"cache-control": "no-store", "x-accel-buffering": "no"}


def event(data: Mapping[str, Any]) -> bytes:
    """Encode one event that holds a JSON object."""
    return b"data: " + json.dumps(data, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode() + b"\n\n"


@dataclass(frozen=True, slots=True)
class EventFormat:
    """The encoding of a stream's events.

    Attributes:
        piece: encodes a piece of the answer.
        end: the last event of a complete answer.
        error: encodes the last event of an answer that fails.
    """

    piece: Callable[[Any], bytes]
    end: bytes
    error: Callable[[Problem], bytes]


OPENAI = EventFormat(event, b"data: [DONE]\n\n", lambda problem: event(problem.body))


class EventStream(StreamingResponse):
    """A response that sends events as they arrive and calls `close` at the end, even if nothing was sent.

    Args:
        events: encoded events.
        given_up: returns when the stream must end, even if the client has not read what was sent.
        close: releases the source of the events.
    """

    media_type = "text/event-stream"

    def __init__(
        self, events: AsyncGenerator[bytes, None], given_up: Callable[[], Awaitable[None]], close: Callable[[], None]
    ) -> None:
        super().__init__(events, headers=HEADERS)
        self._given_up, self._close = given_up, close

    @override
    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        sending = asyncio.ensure_future(super().__call__(scope, receive, send))
        given_up = asyncio.ensure_future(self._given_up())
        try:
            await asyncio.wait({sending, given_up}, return_when=asyncio.FIRST_COMPLETED)
            if sending.done():
                sending.result()
        finally:
            sending.cancel()
            given_up.cancel()
            self._close()
