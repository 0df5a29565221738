"""Strict parsing of request bodies: standard JSON only, and numbers that are not strings."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Annotated, Any

from fastapi import HTTPException, Request, Response
from fastapi.routing import APIRoute
from pydantic import BeforeValidator, Field
from pydantic_core import from_json
from typing_extensions import override

_JSON = "application/json"


def _whole(value: Any) -> Any:
    return int(value) if isinstance(value, float) and value.is_integer() else value


Whole = Annotated[int, Field(strict=True), BeforeValidator(_whole)]
"""An integer, which may be written as 3.0: some languages have floats only."""
Number = Annotated[float, Field(strict=True, allow_inf_nan=False)]


class StrictRequest(Request):
    """A request that accepts standard JSON only: no NaN, no lone surrogates, no unbounded nesting."""

    @override
    async def json(self) -> Any:
        try:
            return from_json(await self.body(), allow_inf_nan=False)
        except ValueError as error:
            raise HTTPException(400, f"body: must be JSON in UTF-8; {error}.") from error  # FastAPI passes it on


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
