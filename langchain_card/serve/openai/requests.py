"""What the documents of the routes say of answers."""

from __future__ import annotations

from typing import Any

from langchain_card.serve.error_bodies import ErrorBody

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
