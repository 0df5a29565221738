"""The wire format between processes: messages of a closed list of kinds, in frames of bounded length.

A frame is its length (four bytes, big-endian), then the kind and the fields of one message in msgpack: host numbers and
strings only. This is the only module that imports msgspec.
"""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import msgspec

from langchain_card import errors
from langchain_card.core.messages import Begin, Correct, End, Grow, Proposal
from langchain_card.errors import CARDError, EngineError

MAX_COMMAND_BYTES = 64 << 20
"""Limit of a frame to a worker: a token takes up to 5 bytes, a context up to 10,000,000 of them (`max_model_len`)."""

MAX_REPORT_BYTES = 4 << 20
"""Limit of a frame from a worker: a node takes about 20 bytes, and an epoch has at most 65,536 nodes."""

MAX_TEXT_CHARS = 20_000
"""Limit for the text of a log record or an error, in characters."""

Argument: TypeAlias = str | int | float | bool | None

_LENGTH = struct.Struct(">I")


# Messages of processes only.


@dataclass(frozen=True, slots=True)
class Start:
    """First message to a worker's process: the worker to make.

    Attributes:
        factory: "module:function", called with `publish`, `report_out_of_memory` and `arguments`; returns the worker.
        arguments: by name.
    """

    factory: str
    arguments: dict[str, Argument]


@dataclass(frozen=True, slots=True)
class Ready:
    """Report that the worker was made."""


@dataclass(frozen=True, slots=True)
class Exhausted:
    """Report that there was no memory for a step of these requests."""

    request_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class WorkerHeartbeat:
    """A sign of life, sent once a second: seconds that the worker's current step has taken, and may take."""

    busy: float
    budget: float


@dataclass(frozen=True, slots=True)
class Logged:
    """A log record of the process, formatted."""

    name: str
    level: int
    text: str


@dataclass(frozen=True, slots=True)
class Failed:
    """The error that ends a process, or a request.

    Attributes:
        kind: name of the exception's class.
        field, value, limit, hint: those of a `CARDError`; `limit` is the message of any other exception.
    """

    kind: str
    limit: str
    field: str = ""
    value: Argument = None
    hint: str = ""

    @classmethod
    def of(cls, error: BaseException) -> Failed:
        """Make the message for an exception."""
        kind = type(error).__name__
        if not isinstance(error, CARDError):
            return cls(kind, str(error)[:MAX_TEXT_CHARS])
        value = error.value if isinstance(error.value, Argument) else str(error.value)[:MAX_TEXT_CHARS]
        return cls(kind, error.limit[:MAX_TEXT_CHARS], error.field, value, error.hint)

    def error(self, process: str) -> CARDError:
        """Return the exception if it was a `CARDError`, else an `EngineError` that names it and the process."""
        kind = getattr(errors, self.kind, None)
        if isinstance(kind, type) and issubclass(kind, CARDError):
            return kind(self.field, self.value, self.limit, self.hint)
        return EngineError(process, self.kind, self.limit or "it gave no reason", "the log has the whole trace")


class Direction:
    """The messages that may be sent in one direction.

    Args:
        kinds: classes of the messages; the class name identifies a message on the wire.
        max_bytes: limit of a frame, without its length field.
    """

    _envelope = msgspec.msgpack.Decoder(tuple[str, msgspec.Raw])
    _encoder = msgspec.msgpack.Encoder()

    def __init__(self, kinds: Sequence[type[Any]], max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self._decoders = {kind.__name__: msgspec.msgpack.Decoder(kind) for kind in kinds}

    def encode(self, message: Any) -> bytes:
        """Return the frame of a message; raises what `body` raises."""
        body = self.body(message)
        return _LENGTH.pack(len(body)) + body

    def body(self, message: Any) -> bytes:
        """Return the frame of a message without its length field, for connections that keep messages apart.

        Raises:
            EngineError: the message is too long, or its kind may not be sent in this direction.
            TypeError: it holds something else than numbers and strings.
        """
        kind = type(message).__name__
        self._decoder(kind)
        body = self._encoder.encode((kind, message))
        self.check_length(len(body))
        return body

    def decode(self, body: bytes) -> Any:
        """Return the message of a frame, given without its length field.

        Raises:
            EngineError: its kind may not be sent in this direction, or it is malformed.
        """
        try:
            kind, fields = self._envelope.decode(body)
            return self._decoder(kind).decode(fields)
        except (msgspec.MsgspecError, ValueError, RecursionError) as error:
            raise EngineError(
                "frame", body[:24], f"makes no sense ({error})", "do both ends run one version"
            ) from error

    def check_length(self, length: int) -> int:
        """Return `length`; raise `EngineError` if it exceeds the limit of a frame."""
        if length > self.max_bytes:
            raise EngineError(
                "frame", f"{length:,} bytes", f"at most {self.max_bytes:,} may be sent", "send less at once"
            )
        return length

    def _decoder(self, kind: str) -> msgspec.msgpack.Decoder[Any]:
        if (decoder := self._decoders.get(kind)) is None:
            raise EngineError("frame", kind, f"is none of {', '.join(self._decoders)}", "do both ends run one version")
        return decoder


DOWN = Direction((Start, Begin, Correct, Grow, End), MAX_COMMAND_BYTES)
"""Messages to a worker's process."""

UP = Direction((Ready, Proposal, Exhausted, WorkerHeartbeat, Logged, Failed), MAX_REPORT_BYTES)
"""Messages from a worker's process."""


class Wire:
    """An end of a connection. Any thread may send; one thread receives.

    Args:
        connection: a connected stream socket, which the wire then owns.
        sends, takes: messages that go out and that come in.
    """

    def __init__(self, connection: socket.socket, *, sends: Direction, takes: Direction) -> None:
        self._socket, self._sends, self._takes = connection, sends, takes
        self._incoming = connection.makefile("rb")
        self._send_lock = threading.Lock()

    def send(self, message: Any) -> None:
        """Send one message, or a frame that `Direction.encode` made; blocks while the other end does not read.

        Raises:
            OSError: the other end is gone.
            EngineError, TypeError: the message cannot be encoded.
        """
        frame = message if isinstance(message, bytes) else self._sends.encode(message)
        with self._send_lock:
            self._socket.sendall(frame)

    def receive(self) -> Any | None:
        """Return the next message; None when the other end is gone.

        Raises:
            EngineError: a frame is too long or malformed.
        """
        header = self._read(_LENGTH.size)
        if header is None:
            return None
        body = self._read(self._takes.check_length(*_LENGTH.unpack(header)))
        return None if body is None else self._takes.decode(body)

    def shutdown(self) -> None:
        """End the connection for both ends; calls that wait for it return. May be called twice."""
        with contextlib.suppress(OSError):  # the other end was first
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Free the socket; the wire may not be used any more."""
        self._incoming.close()
        self._socket.close()

    def _read(self, count: int) -> bytes | None:
        try:
            data = self._incoming.read(count)
        except OSError:
            return None
        return data if len(data) == count else None
