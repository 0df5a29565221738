"""Server-sent events of one answer."""

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
    """One event that holds a JSON object."""
    return b"data: " + json.dumps(data, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode() + b"\n\n"


@dataclass(frozen=True, slots=True)
class Wire:
    """How the events of a stream say what.

    Attributes:
        piece: the event of a piece of the answer.
        end: the last event of an answer that is whole.
        error: the last event of one that fails.
    """

    piece: Callable[[Any], bytes]
    end: bytes
    error: Callable[[Problem], bytes]


OPENAI = Wire(event, b"data: [DONE]\n\n", lambda problem: event(problem.body))


class EventStream(StreamingResponse):
    """Events as they come; `close` is called at the end, also where nothing was sent.

    Args:
        events: bytes of whole events.
        given_up: returns when no more is sent, not even to a client that does not read what it was sent before.
        close: frees what the events come of.
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
