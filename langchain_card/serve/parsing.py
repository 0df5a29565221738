"""How the routes read their bodies: JSON that is just that, numbers that are numbers."""

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
"""Also written as 3.0: some languages know no other numbers."""
Number = Annotated[float, Field(strict=True, allow_inf_nan=False)]


class StrictRequest(Request):
    """A request whose JSON is just that: no NaN, no halves of characters, no nesting without end."""

    @override
    async def json(self) -> Any:
        try:
            return from_json(await self.body(), allow_inf_nan=False)
        except ValueError as error:
            raise HTTPException(400, f"body: must be JSON in UTF-8; {error}.") from error  # FastAPI lets it pass


class StrictRoute(APIRoute):
    """A route that takes `StrictRequest`s; bodies of another type, which any web page may send, are refused."""

    @override
    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handler = super().get_route_handler()

        async def handle(request: Request) -> Response:
            kind = request.headers.get("content-type", "")
            if kind.partition(";")[0].strip().lower() != _JSON:
                raise HTTPException(400, f"content-type: must be {_JSON}.")
            return await handler(StrictRequest(request.scope, request.receive))

        return handle
