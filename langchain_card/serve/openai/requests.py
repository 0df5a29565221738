"""How the routes read their bodies, and what their documents say of answers."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any

from fastapi import HTTPException, Request, Response
from fastapi.routing import APIRoute
from pydantic_core import from_json
from typing_extensions import override

from langchain_card.serve.problems import ErrorBody

ERRORS: dict[int | str, dict[str, Any]] = {
    400: {"model": ErrorBody, "description": "The request cannot be answered as it is."},
    401: {"model": ErrorBody, "description": "No key of this server."},
    403: {"model": ErrorBody, "description": "`Host` names another server."},
    404: {"model": ErrorBody, "description": "No such model is served."},
    408: {"model": ErrorBody, "description": "The body came too slowly."},
    413: {"model": ErrorBody, "description": "The body is too large."},
    422: {"model": ErrorBody, "description": "Never sent: what does not fit is a 400."},
    429: {"model": ErrorBody, "description": "Too many requests wait; `Retry-After` tells when to come again."},
    500: {"model": ErrorBody, "description": "The server failed."},
    503: {"model": ErrorBody, "description": "The server is closing, or cannot answer in time."},
    504: {"model": ErrorBody, "description": "The answer took longer than it was allowed to."},
}
STREAMED: dict[int | str, dict[str, Any]] = {
    **ERRORS,
    200: {"description": "The answer; with `stream`, its pieces.", "content": {"text/event-stream": {}}},
}


class StrictRequest(Request):
    """A request whose JSON is just that: no NaN, no halves of characters, no nesting without end."""

    @override
    async def json(self) -> Any:
        try:
            return from_json(await self.body(), allow_inf_nan=False)
        except ValueError as error:
            raise HTTPException(400, f"body: must be JSON in UTF-8; {error}.") from error  # FastAPI lets it pass


class StrictRoute(APIRoute):
    """A route that takes `StrictRequest`s."""

    @override
    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handler = super().get_route_handler()

        async def handle(request: Request) -> Response:
            return await handler(StrictRequest(request.scope, request.receive))

        return handle
