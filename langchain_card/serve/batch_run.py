"""`BatchRun`: sends the requests of a file to a server, or to an application in this process, several at a time."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import httpx
from pydantic_core import from_json, to_json

from langchain_card.errors import InvalidInputError
from langchain_card.serve.batch_file import PASSING, REFUSED_KEY, BatchOutput, RequestLine, is_final

if TYPE_CHECKING:
    from fastapi import FastAPI

PAUSES = (1.0, 2.0, 4.0, 8.0, 16.0)
"""Seconds before a request that failed is sent again; after the last try it has failed."""
PATIENCE = 300.0
"""Seconds that a request obeys `Retry-After`, before it counts as failed."""
MAX_UNREACHABLE = 16
"""Requests that fail in a row, because the server is not there, before it is given up."""
_LONGEST_PAUSE, _SHORTEST_PAUSE = 60.0, 0.1
_TIMEOUT = httpx.Timeout(60.0, connect=10.0, read=3600.0, pool=None)
"""Seconds, of a server that an answer is awaited from."""


@asynccontextmanager
async def client_of_app(app: FastAPI) -> AsyncIterator[httpx.AsyncClient]:
    """Start an application in this process, yield its client, and end the application."""
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)  # it has no timeouts
    client = httpx.AsyncClient(transport=transport, base_url="http://localhost")
    async with app.router.lifespan_context(app), client:
        yield client


def client_of_server(url: str, key: str | None) -> httpx.AsyncClient:
    """Return a client of a server.

    Args:
        url: the server's address, with or without `/v1` at its end.
        key: a key of the server, if it needs one.

    Raises:
        InvalidInputError: there can be no server at this address.
    """
    headers = {"authorization": f"Bearer {key}"} if key else {}
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    try:
        address = httpx.URL(url.rstrip("/").removesuffix("/v1"))
    except httpx.InvalidURL as error:
        raise InvalidInputError("--server", url, f"is no address ({error})") from error
    if address.scheme not in ("http", "https") or not address.host:
        raise InvalidInputError("--server", url, "must be http:// or https:// and a host")
    return httpx.AsyncClient(base_url=address, headers=headers, timeout=_TIMEOUT, limits=limits)


@dataclass(frozen=True, slots=True)
class _Failure:
    """A request that got no answer.

    Attributes:
        code: an identifier for programs.
        message: text for people.
        again: whether the request may be sent again.
        pause: seconds after which the server wants to be tried again.
        unreachable: whether the server is not there, or answers nobody.
    """

    code: str
    message: str
    again: bool
    pause: float | None = None
    unreachable: bool = False


class BatchRun:
    """Sends requests, and appends each result to the output; a server that is gone gets no more of them.

    Args:
        client: sends the requests.
        output: receives the results.
        concurrency: requests at a time.
        report: called at the beginning and after each result.

    Attributes:
        num_answers: answers of this run.
        num_failures: requests of this run that got no answer.
        num_tokens: tokens of these answers.
        last_failure: what the last failure said.
        stopped: whether the server was given up.
    """

    def __init__(
        self, client: httpx.AsyncClient, output: BatchOutput, concurrency: int, report: Callable[[BatchRun], None]
    ) -> None:
        self._client, self._output, self._concurrency, self._report = client, output, concurrency, report
        self._begun = time.monotonic()
        self._unreachable_in_a_row = 0
        self.num_answers = self.num_failures = self.num_tokens = 0
        self.last_failure = ""
        self.stopped = False

    @property
    def tokens_per_second(self) -> float:
        """Tokens of answers per second, since the run began."""
        return self.num_tokens / max(time.monotonic() - self._begun, 1e-6)

    async def run(self, requests: Iterator[RequestLine]) -> None:
        """Send the requests that have no answer yet.

        Raises:
            InvalidInputError: the server accepts no request with this key, or the output cannot be written.
        """
        self._begun = time.monotonic()
        self._report(self)
        pending = (request for request in requests if request.custom_id not in self._output.answered)
        workers = [asyncio.create_task(self._work(pending)) for _ in range(self._concurrency)]
        try:
            await asyncio.gather(*workers)
        finally:
            for worker in workers:
                worker.cancel()
            await asyncio.gather(*workers, return_exceptions=True)

    async def _work(self, pending: Iterator[RequestLine]) -> None:
        for request in pending:
            await self._answer(request)
            self._report(self)
            if self.stopped:
                return

    async def _answer(self, request: RequestLine) -> None:
        pauses, until = iter(PAUSES), time.monotonic() + PATIENCE
        while (failure := await self._send(request)) is not None:
            if not failure.again:
                break
            pause = failure.pause
            if pause is None or time.monotonic() + pause > until:
                pause = next(pauses, None)
            if pause is None:
                break
            await asyncio.sleep(pause)
        if failure is None:
            self._unreachable_in_a_row = 0
            return
        self._unreachable_in_a_row = self._unreachable_in_a_row + 1 if failure.unreachable else 0
        self.stopped = self.stopped or self._unreachable_in_a_row >= MAX_UNREACHABLE
        self.num_failures += 1
        self.last_failure = failure.message
        self._output.add_failure(request.custom_id, failure.code, failure.message)

    async def _send(self, request: RequestLine) -> _Failure | None:
        """Send a request once, and write its answer, if there is one."""
        headers = {"content-type": "application/json"}
        try:
            response = await self._client.post(request.url, content=to_json(request.body), headers=headers)
        except httpx.RequestError as error:
            message = f"{self._client.base_url}: {type(error).__name__}: {error}".rstrip(": ")
            return _Failure("connection_error", message, again=True, unreachable=True)
        status, body = response.status_code, _object(response.content)
        if status in REFUSED_KEY:
            limit = f"refuses requests with status {status}: {_error(body)[1].rstrip('.')}"
            hint = "--api-key-file FILE gives a key of the server"
            raise InvalidInputError("--server", str(self._client.base_url), limit, hint)
        if body is None or not is_final(status):
            return _failure(response, body)
        request_id = response.headers.get("x-request-id") or str(body.get("id") or "")
        self._output.add_answer(request.custom_id, status, request_id, body)
        self.num_answers += 1
        self.num_tokens += _num_tokens(body)
        return None


def _failure(response: httpx.Response, body: Mapping[str, Any] | None) -> _Failure:
    status, headers = response.status_code, response.headers
    code, message = _error(body)
    again = (status >= 500 or status in PASSING) and headers.get("x-should-retry") != "false"
    pause = _pause(headers.get("retry-after", "")) if status in (429, 503) else None
    return _Failure(code or f"http_{status}", f"status {status}: {message}", again, pause, unreachable=status == 503)


def _pause(retry_after: str) -> float | None:
    """Return the seconds of the header `Retry-After`, within bounds; None without a number."""
    if not retry_after.strip().isdecimal():
        return None
    return min(max(float(retry_after), _SHORTEST_PAUSE), _LONGEST_PAUSE)


def _error(body: Mapping[str, Any] | None) -> tuple[str, str]:
    """Return the code and the message of an error in OpenAI's shape."""
    error = (body or {}).get("error")
    if not isinstance(error, dict):
        return "", "the answer is not in OpenAI's form"
    return str(error.get("code") or ""), str(error.get("message") or "")


def _object(content: bytes) -> dict[str, Any] | None:
    """Return a JSON object; None if it is something else."""
    try:
        value = from_json(content, allow_inf_nan=False)
    except ValueError:
        return None
    return value if isinstance(value, dict) else None


def _num_tokens(body: Mapping[str, Any]) -> int:
    usage = body.get("usage")
    count = usage.get("completion_tokens") if isinstance(usage, dict) else 0
    return count if isinstance(count, int) else 0
