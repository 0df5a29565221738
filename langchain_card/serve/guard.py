"""The door: who may come in, how much they may bring, and what each answer tells browsers. Pure ASGI."""

from __future__ import annotations

import asyncio
import hmac
import logging
import secrets
from collections.abc import Collection

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from langchain_card.serve.error_bodies import CLOSED, INTERNAL, Problem, Refused
from langchain_card.serve.service import Service

_HEADERS = {
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-store",
    "content-security-policy": "default-src 'none'; frame-ancestors 'none'",
    "cross-origin-resource-policy": "same-origin",
}
"""Of each answer that does not say otherwise itself."""
log = logging.getLogger(__name__)


class Guard:
    """Lets a request in, its whole body read, or answers it.

    What a key is called behind the door, `request.state.tenant`, is made of it and of a secret of this process.

    There are no headers of CORS: web pages of other origins cannot read an answer. What they post is refused.

    Args:
        app: behind the door.
        service: its settings, and whether it takes requests.
        open_paths: which need no key and are answered while the server is draining; no body of theirs is read.
    """

    def __init__(self, app: ASGIApp, service: Service, open_paths: Collection[str] = ()) -> None:
        self._app, self._service, self._open = app, service, frozenset(open_paths)
        self._num_inside = 0
        self._keys = [key.encode() for key in service.settings.api_keys]
        self._secret = secrets.token_bytes(16)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers one request; there are no websockets."""
        if scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008})
        elif scope["type"] == "http":
            await self._answer(scope, receive, send)
        else:
            await self._app(scope, receive, send)

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        started = False

        async def sending(message: Message) -> None:
            nonlocal started
            if message["type"] == "http.response.start":
                started = True
                headers = MutableHeaders(scope=message)
                for name, value in _HEADERS.items():
                    headers.setdefault(name, value)
            await send(message)

        inside = 0
        try:
            self._check(scope)
            inside = int(scope["path"] not in self._open)
            self._num_inside += inside
            body = await self._body(scope, receive) if inside else b""
            await self._app(scope, _replayed(body, receive), sending)
        except Refused as refused:
            await refused.problem.response()(scope, receive, sending)
        except _Gone:
            return
        except Exception:
            log.exception("a request failed")
            if started:
                raise
            await INTERNAL.response()(scope, receive, sending)
        finally:
            self._num_inside -= inside

    def _check(self, scope: Scope) -> None:
        headers, settings = Headers(scope=scope), self._service.settings
        host = headers.get("host", "").rpartition("@")[2]
        name = host.partition("]")[0] + "]" if host.startswith("[") else host.partition(":")[0]
        if settings.hosts is not None and name.lower() not in settings.hosts:
            raise Refused(Problem(403, "Host names no host that is served here.", code="unknown_host"))
        if scope["method"] == "POST" and headers.get("sec-fetch-site") == "cross-site":
            raise Refused(Problem(403, "Web pages of other sites may ask nothing here.", code="cross_site"))
        if scope["path"] in self._open:
            return
        if self._keys:
            if not self._knows(authorization := headers.get("authorization", "")):
                message = "Authorization must be `Bearer KEY`, with a key of this server."
                raise Refused(Problem(401, message, code="invalid_api_key"))
            scope.setdefault("state", {})["tenant"] = self._tenant(authorization)
        if self._service.draining:
            raise Refused(CLOSED)
        if self._num_inside >= settings.max_requests:
            message = f"max_requests = {settings.max_requests:,}: as many are answered already. Hint: try again later."
            raise Refused(Problem(429, message, "rate_limit_error", "rate_limit_exceeded"))

    def _knows(self, authorization: str) -> bool:
        """Whether a key is one of the server's; all are compared, so that the time tells nothing."""
        scheme, _, given = authorization.partition(" ")
        right = [hmac.compare_digest(given.strip().encode("latin-1"), key) for key in self._keys]
        return scheme.lower() == "bearer" and any(right)

    def _tenant(self, authorization: str) -> str:
        given = authorization.partition(" ")[2].strip().encode("latin-1")
        return hmac.new(self._secret, given, "sha256").hexdigest()

    async def _body(self, scope: Scope, receive: Receive) -> bytes:
        most, seconds = self._service.settings.max_body_bytes, self._service.settings.max_body_seconds
        length = Headers(scope=scope).get("content-length", "0")
        if length.isdecimal() and int(length) > most:
            raise Refused(_too_large(most))
        try:
            return await asyncio.wait_for(_read(receive, most), seconds)
        except asyncio.TimeoutError:
            message = f"The body had not come after {seconds:g} seconds."
            raise Refused(Problem(408, message, "timeout_error", "timeout")) from None


class _Gone(Exception):
    """The client left before its request was whole."""


async def _read(receive: Receive, most: int) -> bytes:
    body, more = bytearray(), True
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise _Gone
        body += message.get("body", b"")
        more = message.get("more_body", False)
        if len(body) > most:
            raise Refused(_too_large(most))
    return bytes(body)


def _too_large(most: int) -> Problem:
    return Problem(413, f"body: must have {most:,} bytes at most.", code="request_too_large")


def _replayed(body: bytes, receive: Receive) -> Receive:
    """Receives the body in one piece, then what comes after it."""
    taken = False

    async def receive_again() -> Message:
        nonlocal taken
        if taken:
            return await receive()
        taken = True
        return {"type": "http.request", "body": body, "more_body": False}

    return receive_again
