"""The page at `/`: a chat that shows how answers are decoded. It consists of static files without secrets."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from importlib.resources import files

from fastapi import APIRouter, Response

_KINDS = {"css": "text/css", "html": "text/html", "js": "text/javascript", "svg": "image/svg+xml"}
_FILES = {
    "/": "index.html",
    **{f"/page/{name}": name for name in ("page.css", "page.js", "answer.js", "lanes.js", "stream.js", "icon.svg")},
}
_HEADERS = {
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
}

PAGE_PATHS = tuple(_FILES)
"""Every path of the page; no other file is reachable."""


def page_routes() -> APIRouter:
    """Create the routes. Files are read once, here."""
    router = APIRouter(include_in_schema=False)
    for path, name in _FILES.items():
        kind = _KINDS[name.rpartition(".")[2]]
        router.add_api_route(path, _file_endpoint(files(__package__).joinpath(name).read_bytes(), kind))
    return router


def _file_endpoint(content: bytes, kind: str) -> Callable[[], Awaitable[Response]]:
    async def endpoint() -> Response:
        return Response(content, media_type=kind, headers=_HEADERS)

    return endpoint
