"""Strict parsing of request bodies: standard JSON only, and numbers that are not strings."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Annotated, Any

import numpy as np
from fastapi import HTTPException, Request, Response
from fastapi.routing import APIRoute
from pydantic import BeforeValidator, Field
from pydantic_core import from_json
from typing_extensions import override

_JSON = "application/json"
_BEFORE_VALUES = b",", b"[", b"{"
_IS_BEFORE_VALUE = np.isin(np.arange(256), [*b"".join(_BEFORE_VALUES)])
_MAX_VALUES = 1 << 18
"""Values in a body, nested ones included; a million takes seconds to parse."""
_LARGE = 1 << 18
"""Bytes of a body that takes milliseconds to parse; a smaller one cannot have too many values."""


def _whole(value: Any) -> Any:
    return int(value) if isinstance(value, float) and value.is_integer() else value


Whole = Annotated[int, Field(strict=True), BeforeValidator(_whole)]
"""An integer, which may be written as 3.0: some languages have floats only."""
Number = Annotated[float, Field(strict=True, allow_inf_nan=False)]


class StrictRequest(Request):
    """A request that accepts standard JSON only: no NaN, no lone surrogates, no unbounded nesting."""

    @override
    async def json(self) -> Any:
        body = await self.body()
        try:
            if len(body) < _LARGE:
                return from_json(body, allow_inf_nan=False)
            async with self.app.state.service.parsing:  # the event loop serves others between two bodies
                return await asyncio.to_thread(_parse_large, body)
        except ValueError as error:
            raise HTTPException(400, f"body: must be JSON in UTF-8; {error}.") from error  # FastAPI passes it on


def _parse_large(body: bytes) -> Any:
    most = sum(map(body.count, _BEFORE_VALUES))  # texts may hold some of these
    if most > _MAX_VALUES and (count := _num_values(body)) > _MAX_VALUES:
        limit = f"must hold {_MAX_VALUES:,} values at most; commas and brackets outside texts are {count:,}"
        raise HTTPException(413, f"body: {limit}. Hint: a prompt may be text in place of token ids.")
    return from_json(body, allow_inf_nan=False)


def _num_values(body: bytes) -> int:
    """Count the values in a JSON document without parsing it; empty lists and objects count twice."""
    chars = np.frombuffer(body.replace(rb"\\", b"").replace(rb"\"", b""), np.uint8)
    in_text = np.bitwise_xor.accumulate(chars == ord('"'))
    return int(np.count_nonzero(_IS_BEFORE_VALUE[chars] & ~in_text))


class StrictRoute(APIRoute):
    """A route of `StrictRequest`s. It refuses other content types than JSON: any web page may send those."""

    @override
    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handler = super().get_route_handler()

        async def handle(request: Request) -> Response:
            kind = request.headers.get("content-type", "")
            if kind.partition(";")[0].strip().lower() != _JSON:
                raise HTTPException(400, f"content-type: must be {_JSON}.")
            return await handler(StrictRequest(request.scope, request.receive))

        return handle
