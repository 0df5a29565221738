"""Errors as HTTP responses in OpenAI's shape: `{"error": {"message", "type", "param", "code"}}`."""

from __future__ import annotations

import reprlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel
from starlette.responses import JSONResponse

from langchain_card import errors
from langchain_card.errors import CARDError

RETRY_AFTER_SECONDS = 1
_NO_RETRY = {"x-should-retry": "false"}  # a header that OpenAI's clients obey; a retry would take as long


class ErrorDetails(BaseModel):
    """An error: its message, its kind, the field of the request at fault, and a code for programs."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(BaseModel):
    """The body of every error response."""

    error: ErrorDetails


@dataclass(frozen=True, slots=True)
class Problem:
    """An error as a client sees it.

    Attributes:
        status: the HTTP status.
        message: text for people; it shows no internals of the server.
        kind: OpenAI's `type`.
        code: an identifier for programs.
        param: the field of the request at fault.
    """

    status: int
    message: str
    kind: str = "invalid_request_error"
    code: str | None = None
    param: str | None = None

    @property
    def body(self) -> dict[str, Any]:
        """Return the response's JSON."""
        return {"error": {"message": self.message, "type": self.kind, "param": self.param, "code": self.code}}

    def response(self) -> JSONResponse:
        """Return the response, with headers that tell a client whether to retry."""
        headers = {"retry-after": str(RETRY_AFTER_SECONDS)} if self.status in (429, 503) else {}
        headers |= _NO_RETRY if self.status == 504 else {}
        headers |= {"www-authenticate": "Bearer"} if self.status == 401 else {}
        return JSONResponse(self.body, self.status, headers)


class Refused(Exception):
    """Refuses a request: the response is the problem."""

    def __init__(self, problem: Problem) -> None:
        super().__init__(problem.message)
        self.problem = problem


INTERNAL = Problem(500, "The server failed; the reason is in its log.", "server_error", "internal_error")
CLOSED = Problem(503, "The server is shutting down.", "server_error", "shutting_down")
_FAILED = Problem(503, "The engine could not answer; others go on. Try again.", "server_error", "engine_error")
_SHOWN: tuple[tuple[type[CARDError], int, str, str | None], ...] = (
    (errors.ContextOverflowError, 400, "invalid_request_error", "context_length_exceeded"),
    (errors.UnsupportedContentError, 400, "invalid_request_error", "unsupported_content"),
    (errors.InvalidInputError, 400, "invalid_request_error", None),
    (errors.EngineBusyError, 429, "rate_limit_error", "rate_limit_exceeded"),
    (errors.EngineWaitError, 503, "server_error", "not_begun_in_time"),
    (errors.GenerationTimeoutError, 504, "timeout_error", "timeout"),
)
"""Errors whose message the client reads: class, status, `type`, `code`."""
_HIDDEN: tuple[tuple[type[CARDError], Problem], ...] = (
    (errors.EngineClosedError, CLOSED),
    (errors.EngineError, _FAILED),
)
"""Errors whose message would show internals, with the problem that the client reads instead."""
_TOO_LONG = "The prompt is too long: "
"""Prefix by which langchain-openai recognises a context overflow."""
_PROMPTS = ("prompt", "prompt_ids", "content", "messages")


def problem_of(error: BaseException, prompt: str, names: Mapping[str, str] | None = None) -> Problem:
    """Translate an error for a client; an unknown error becomes `INTERNAL`.

    Args:
        error: any exception.
        prompt: the field of the request that holds the prompt.
        names: replacements in the message, such as public names for the paths of models.
    """
    for kind, status, type_, code in _SHOWN:
        if isinstance(error, kind):
            message = _TOO_LONG + str(error) if kind is errors.ContextOverflowError else str(error)
            for name, shown in (names or {}).items():
                message = message.replace(name, shown)
            field = error.field.partition(" ")[0]
            return Problem(status, message, type_, code, prompt if field in _PROMPTS else field)
    return next((problem for kind, problem in _HIDDEN if isinstance(error, kind)), INTERNAL)


def validation_problem(error: RequestValidationError, prompt: str) -> Problem:
    """Return the most deeply located error of a request's body; `prompt` is as for `problem_of`."""
    details = error.errors()
    causes = [detail.get("ctx", {}).get("error") for detail in details]
    if card_errors := [cause for cause in causes if isinstance(cause, CARDError)]:
        return problem_of(card_errors[0], prompt)
    first = max(details, key=lambda detail: len(_path(detail, error.body)))
    path = _path(first, error.body)
    param = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in path).removeprefix(".") or None
    if first["type"] == "missing":
        return Problem(400, f"{param or 'body'}: is required.", param=param)
    return Problem(400, f"{param or 'body'} = {reprlib.repr(first['input'])}: {first['msg']}.", param=param)


def _path(error: Mapping[str, Any], body: Any) -> list[Any]:
    """Return the path of an error in the body, without the names that pydantic inserts for members of unions."""
    path: list[Any] = []
    for part in error["loc"][1:]:
        in_list = isinstance(body, list) and isinstance(part, int) and part < len(body)
        if in_list or (isinstance(body, Mapping) and part in body):
            body = body[part]
            path.append(part)
    return [*path, error["loc"][-1]] if error["type"] == "missing" and len(error["loc"]) > 1 else path
