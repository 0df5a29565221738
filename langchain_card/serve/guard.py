"""ASGI middleware that checks keys, hosts and body sizes, and adds security headers to every response."""

from __future__ import annotations

import asyncio
import hmac
import logging
from collections.abc import Collection

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from langchain_card.serve.error_bodies import CLOSED, INTERNAL, Problem, Refused
from langchain_card.serve.service import Service
from langchain_card.serve.waiting import ClientLeft

_HEADERS = {
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-store",
    "content-security-policy": "default-src 'none'; frame-ancestors 'none'",
    "cross-origin-resource-policy": "same-origin",
}
"""Default headers of every response."""
log = logging.getLogger(__name__)


class Guard:
    """Middleware that passes a request on with its whole body read, or refuses it.

    `request.state.tenant` identifies the key to the application: a hash of the key, the same in every process. The hash
    hides a long random key, but not a short one: observers of the engine see it, and can test guesses against it.

    There are no CORS headers: web pages of other origins cannot read a response, and their POST requests are refused.

    Args:
        app: the application behind this middleware.
        service: holds the settings and the draining state.
        open_paths: paths that need no key and are served even while the server drains; their bodies are not read.
    """

    def __init__(self, app: ASGIApp, service: Service, open_paths: Collection[str] = ()) -> None:
        self._app, self._service, self._open_paths = app, service, frozenset(open_paths)
        self._num_requests = 0
        self._keys = [key.encode() for key in service.settings.api_keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one request; websockets are closed."""
        if scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008})
        elif scope["type"] == "http":
            await self._answer(scope, receive, send)
        else:
            await self._app(scope, receive, send)

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        started = False

        async def send_with_headers(message: Message) -> None:
            nonlocal started
            if message["type"] == "http.response.start":
                started = True
                headers = MutableHeaders(scope=message)
                for name, value in _HEADERS.items():
                    headers.setdefault(name, value)
            await send(message)

        counted = 0
        try:
            self._check(scope)
            counted = int(scope["path"] not in self._open_paths)
            self._num_requests += counted
            bodies = [await self._body(scope, receive) if counted else b""]
            await self._app(scope, _replayed(bodies, receive), send_with_headers)
        except Refused as refused:
            await refused.problem.response()(scope, receive, send_with_headers)
        except ClientLeft:
            return
        except Exception:
            log.exception("a request failed")
            if started:
                raise
            await INTERNAL.response()(scope, receive, send_with_headers)
        finally:
            self._num_requests -= counted

    def _check(self, scope: Scope) -> None:
        headers, settings = Headers(scope=scope), self._service.settings
        host = headers.get("host", "").rpartition("@")[2]
        name = host.partition("]")[0] + "]" if host.startswith("[") else host.partition(":")[0]
        if settings.hosts is not None and name.lower() not in settings.hosts:
            raise Refused(Problem(403, "Host names no host that is served here.", code="unknown_host"))
        if scope["method"] == "POST" and headers.get("sec-fetch-site") == "cross-site":
            raise Refused(Problem(403, "Web pages of other sites may ask nothing here.", code="cross_site"))
        if scope["path"] in self._open_paths:
            return
        if self._keys:
            if not self._is_valid(authorization := headers.get("authorization", "")):
                message = "Authorization must be `Bearer KEY`, with a key of this server."
                raise Refused(Problem(401, message, code="invalid_api_key"))
            scope.setdefault("state", {})["tenant"] = self._tenant(authorization)
        if self._service.draining:
            raise Refused(CLOSED)
        if self._num_requests >= settings.max_requests:
            limit = f"max_requests = {settings.max_requests:,}: as many are answered already"
            message = _limited(limit, "try again later", "max_requests")
            raise Refused(Problem(429, message, "rate_limit_error", "rate_limit_exceeded"))

    def _is_valid(self, authorization: str) -> bool:
        """Return True if the key is one of the server's. All are compared, so that the time reveals nothing."""
        scheme, _, given = authorization.partition(" ")
        matches = [hmac.compare_digest(given.strip().encode("latin-1"), key) for key in self._keys]
        return scheme.lower() == "bearer" and any(matches)

    def _tenant(self, authorization: str) -> str:
        given = authorization.partition(" ")[2].strip().encode("latin-1")
        return hmac.new(b"langchain-card tenant", given, "sha256").hexdigest()

    async def _body(self, scope: Scope, receive: Receive) -> bytes:
        max_bytes, seconds = self._service.settings.max_body_bytes, self._service.settings.max_body_seconds
        length = Headers(scope=scope).get("content-length", "0")
        if length.isdecimal() and int(length) > max_bytes:
            raise _too_large(max_bytes)
        try:
            return await asyncio.wait_for(_read(receive, max_bytes), seconds)
        except asyncio.TimeoutError:
            message = _limited(f"body: must arrive within {seconds:g} seconds", "send it faster", "max_body_seconds")
            raise Refused(Problem(408, message, "timeout_error", "timeout")) from None


async def _read(receive: Receive, max_bytes: int) -> bytes:
    body, more = bytearray(), True
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientLeft
        body += message.get("body", b"")
        more = message.get("more_body", False)
        if len(body) > max_bytes:
            raise _too_large(max_bytes)
    return bytes(body)


def _too_large(max_bytes: int) -> Refused:
    message = _limited(f"body: must have {max_bytes:,} bytes at most", "shorten it", "max_body_bytes")
    return Refused(Problem(413, message, code="request_too_large"))


def _limited(limit: str, hint: str, setting: str) -> str:
    return f"{limit}. Hint: {hint}, or raise `Settings({setting}=...)` on the server."


def _replayed(bodies: list[bytes], receive: Receive) -> Receive:
    """Return a `receive` that takes the only body out of its list for its first message; others follow."""

    async def receive_again() -> Message:
        return {"type": "http.request", "body": bodies.pop(), "more_body": False} if bodies else await receive()

    return receive_again
