"""Files of requests in OpenAI's batch format: the input, checked, and the output, which a later run continues."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from pydantic_core import from_json, to_json
from typing_extensions import Self

from langchain_card.errors import InvalidInputError

URLS = ("/v1/chat/completions", "/v1/completions")
"""Paths that a request may name."""
MAX_LINE_BYTES = 1 << 24
PASSING = (408, 409, 425, 429)
"""Statuses below 500 that the same request may not get again."""
REFUSED_KEY = (401, 403)
"""Statuses that every request of a file would get."""
_OF_SERVERS = (*REFUSED_KEY, 404, 405)
"""Statuses that another server, or the same one with other models, may not give."""
_ID = "batch_req_"
_BEGINNING = f'{{"id":"{_ID}'.encode()


class RequestLine(NamedTuple):
    """A line of the input: its number, and what is sent."""

    number: int
    custom_id: str
    url: str
    body: dict[str, Any]


class BatchInput:
    """The requests of a file. No body stays in memory: the file is read once to be checked, and again to be sent.

    Args:
        path: the file.

    Attributes:
        line_of: number of the line of each `custom_id`, once `check` has ended.
        models: number of the first line that names each model, once `check` has ended.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.line_of: dict[str, int] = {}
        self.models: dict[str, int] = {}

    def check(self) -> Iterator[InvalidInputError]:
        """Yield an error for each bad line, or for a file without lines.

        Raises:
            InvalidInputError: the file cannot be read, or a line is too long.
        """
        number = 0
        for number, line in self._lines():
            try:
                request = self._request(number, line)
            except InvalidInputError as error:
                yield error
                continue
            first = self.line_of.setdefault(request.custom_id, number)
            if first != number:
                limit, hint = f"is that of line {first}, too", "it names the answer: give each line another one"
                yield self.error(number, "custom_id", request.custom_id, limit, hint)
            if isinstance(model := request.body.get("model"), str):
                self.models.setdefault(model, number)
        if not number:
            yield InvalidInputError("IN", str(self.path), "holds no request", "a line of JSON is a request")

    def requests(self) -> Iterator[RequestLine]:
        """Yield the requests in the order of the file."""
        for number, line in self._lines():
            yield self._request(number, line)

    def error(self, number: int, field: str, value: object, limit: str, hint: str = "") -> InvalidInputError:
        """Return the error of a line's field; "" for the whole line."""
        place = f"{self.path}, line {number}"
        return InvalidInputError(f"{place}: {field}" if field else place, value, limit, hint)

    def _lines(self) -> Iterator[tuple[int, bytes]]:
        """Yield the lines that are not blank, with their numbers from 1."""
        try:
            with self.path.open("rb") as file:
                number = 0
                while line := file.readline(MAX_LINE_BYTES + 1):
                    number += 1
                    if len(line) > MAX_LINE_BYTES:
                        limit = f"must have {MAX_LINE_BYTES:,} bytes at most"
                        raise self.error(number, "", _shown(line), limit, "a line is one request")
                    if line.strip():
                        yield number, line
        except OSError as error:
            raise InvalidInputError("IN", str(self.path), f"cannot be read ({error.strerror})") from error

    def _request(self, number: int, line: bytes) -> RequestLine:
        try:
            value = from_json(line.rstrip(), allow_inf_nan=False)
        except ValueError as error:
            raise self.error(number, "", _shown(line), f"must be JSON in UTF-8; {error}") from error
        if not isinstance(value, dict):
            raise self.error(number, "", _shown(line), "must be a JSON object", "with custom_id, method, url and body")
        custom_id, url, body = value.get("custom_id"), value.get("url"), value.get("body")
        if not isinstance(custom_id, str) or not custom_id:
            raise self.error(number, "custom_id", custom_id, "must be a string", "it names the answer")
        if value.get("method") != "POST":
            raise self.error(number, "method", value.get("method"), "must be POST")
        if url not in URLS:
            raise self.error(number, "url", url, f"must be one of {', '.join(URLS)}", "others are not answered here")
        if not isinstance(body, dict):
            raise self.error(number, "body", body, "must be a JSON object", f"it is what {url} receives")
        if body.get("stream") not in (None, False):
            raise self.error(number, "body.stream", body["stream"], "answers come whole", "leave it out")
        return RequestLine(number, custom_id, url, body)


class BatchOutput:
    """The answers of a file, those of earlier runs and of this one. One process at a time may hold it.

    Entering reads the file, and drops what is not final: a line that was cut off when a process died, and results that
    failed for a passing reason. Nothing is written unless every line belongs to the input.

    Args:
        path: the file, made if it does not exist.
        requests: the input, checked.

    Attributes:
        answered: each `custom_id` that has its answer.
        refused: number of answers with a status of 4xx, which would come again.

    Raises:
        InvalidInputError: another process holds the file, it is not the output of this input, or cannot be written.
    """

    def __init__(self, path: Path, requests: BatchInput) -> None:
        self._given, self._path, self._input = path, path.resolve(), requests
        self.answered: set[str] = set()
        self.refused = 0
        self._file: BinaryIO | None = None

    def __enter__(self) -> Self:
        if self._path == self._input.path.resolve():
            raise self._error("is the input, too", "name another file for the answers")
        if not self._path.parent.is_dir():
            raise self._error("its folder does not exist", f"mkdir -p {self._path.parent}")
        try:
            self._file = self._locked()
            if dropped := self._read(self._file):
                self._drop(dropped)
        except OSError as error:
            self.__exit__()
            raise self._error(f"cannot be written ({error.strerror})") from error
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        if self._file is not None:
            self._file.close()
        self._file = None

    def add_answer(self, custom_id: str, status: int, request_id: str, body: Mapping[str, Any]) -> None:
        """Append an answer, or a refusal that would come again."""
        response = {"status_code": status, "request_id": request_id, "body": body}
        self._append({"custom_id": custom_id, "response": response, "error": None})
        self._count(custom_id, status)

    def add_failure(self, custom_id: str, code: str, message: str) -> None:
        """Append the error of a request that got no answer; the next run tries it again."""
        self._append({"custom_id": custom_id, "response": None, "error": {"code": code, "message": message}})

    def _append(self, record: Mapping[str, Any]) -> None:
        assert self._file is not None
        try:
            self._file.write(to_json({"id": _ID + secrets.token_hex(12), **record}) + b"\n")
            self._file.flush()
        except OSError as error:
            raise self._error(f"cannot be written ({error.strerror})", "the same command goes on") from error

    def _count(self, custom_id: str, status: int) -> None:
        self.answered.add(custom_id)
        self.refused += status != 200

    def _locked(self) -> BinaryIO:
        """Open and lock the file; try again if another process has replaced it in between."""
        while True:
            file = self._path.open("a+b")
            _lock(file, self._error("another process writes it", "wait for its end, or name another file"))
            if self._path.exists() and os.path.samestat(os.fstat(file.fileno()), self._path.stat()):
                return file
            file.close()

    def _read(self, file: BinaryIO) -> set[int]:
        """Note which requests are answered. Return the numbers of the lines to drop."""
        file.seek(0)
        dropped = set()
        for number, line in enumerate(file, 1):
            torn = not line.endswith(b"\n")
            if torn and (line.startswith(_BEGINNING) or _BEGINNING.startswith(line)):
                dropped.add(number)
                continue
            custom_id, status = self._result(number, line)
            if torn or custom_id in self.answered or not is_final(status):
                dropped.add(number)
            else:
                self._count(custom_id, status)
        return dropped

    def _result(self, number: int, line: bytes) -> tuple[str, int]:
        """Return the `custom_id` and the status of a line, 0 where there is no response."""
        try:
            record = from_json(line)
            custom_id, response = str(record["custom_id"]), record["response"]
            status = 0 if response is None else int(response["status_code"])
        except (ValueError, TypeError, KeyError) as error:
            limit = f"line {number} is not a line of a batch's answers: {_shown(line)}"
            raise self._error(limit, "name another file") from error
        if custom_id not in self._input.line_of:
            limit = f"line {number} answers custom_id {custom_id!r}, which {self._input.path} does not have"
            raise self._error(limit, "it belongs to another input: name another file")
        return custom_id, status

    def _drop(self, dropped: set[int]) -> None:
        """Replace the file by one without some lines, in one step."""
        assert self._file is not None
        part = self._path.with_name(f".{self._path.name}.part")
        part.unlink(missing_ok=True)  # of a process that was killed
        before, self._file = self._file, part.open("a+b")
        with before:
            _lock(self._file, self._error("another process writes it"))
            before.seek(0)
            self._file.writelines(line for number, line in enumerate(before, 1) if number not in dropped)
            self._file.flush()
            os.fsync(self._file.fileno())
            part.replace(self._path)

    def _error(self, limit: str, hint: str = "") -> InvalidInputError:
        return InvalidInputError("OUT", str(self._given), limit, hint)


def is_final(status: int) -> bool:
    """Return whether the same request would get this status again."""
    return status == 200 or (400 <= status < 500 and status not in (*PASSING, *_OF_SERVERS))


def _lock(file: BinaryIO, error: InvalidInputError) -> None:
    """Take the lock of a file, or close it and raise. The kernel releases the lock when its process dies."""
    import fcntl

    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.close()
        raise error from None


def _shown(line: bytes) -> str:
    return line[:80].decode(errors="replace").strip()
