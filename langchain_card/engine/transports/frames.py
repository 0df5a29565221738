"""What two processes say to each other: messages of a closed list of kinds, in frames of bounded length.

A frame is its length (four bytes, the highest first), then the kind and the fields of one message in msgpack. Host
ints, floats and strings only. This is the only module that needs msgspec.
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
"""Tokens take five bytes each at most, and no context is longer than 10,000,000 (`EngineConfig.max_model_len`)."""

MAX_REPORT_BYTES = 4 << 20
"""A node takes some twenty bytes, and no more than 65,536 are numbered in one epoch (`core.sources`)."""

MAX_TEXT_CHARS = 20_000
"""Of a log record or an error."""

Argument: TypeAlias = str | int | float | bool | None

_LENGTH = struct.Struct(">I")


# Messages that no other transport needs.


@dataclass(frozen=True, slots=True)
class Start:
    """To a new process: what it is.

    Attributes:
        factory: "module:function"; called with `publish`, `report_out_of_memory` and the arguments, it gives a worker.
        arguments: by name.
    """

    factory: str
    arguments: dict[str, Argument]


@dataclass(frozen=True, slots=True)
class Ready:
    """From the process: it has its worker."""


@dataclass(frozen=True, slots=True)
class Exhausted:
    """From the process: no memory for a step of these requests."""

    request_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Alive:
    """From the process, once a second: how long its step takes so far, and how long it may; seconds."""

    busy: float
    budget: float


@dataclass(frozen=True, slots=True)
class Logged:
    """From the process: a log record, formatted."""

    name: str
    level: int
    text: str


@dataclass(frozen=True, slots=True)
class Failed:
    """From the process: what it dies of.

    Attributes:
        kind: name of the exception's class.
        field, value, limit, hint: as `CARDError` has them; of any other exception, `limit` is its message.
    """

    kind: str
    limit: str
    field: str = ""
    value: Argument = None
    hint: str = ""

    @classmethod
    def of(cls, error: BaseException) -> Failed:
        """An exception, so that it can be raised again elsewhere."""
        kind = type(error).__name__
        if not isinstance(error, CARDError):
            return cls(kind, str(error)[:MAX_TEXT_CHARS])
        value = error.value if isinstance(error.value, Argument) else str(error.value)[:MAX_TEXT_CHARS]
        return cls(kind, error.limit[:MAX_TEXT_CHARS], error.field, value, error.hint)

    def error(self, process: str) -> CARDError:
        """The exception, if it is one of ours; else an `EngineError` that says what it was, and of which process."""
        found = getattr(errors, self.kind, None)
        if isinstance(found, type) and issubclass(found, CARDError):
            return found(self.field, self.value, self.limit, self.hint)
        return EngineError(process, self.kind, self.limit or "it gave no reason", "the log has the whole trace")


class Direction:
    """What may be sent one way.

    Args:
        kinds: of messages; each goes by the name of its class.
        max_bytes: of a frame, its length left out.
    """

    _envelope = msgspec.msgpack.Decoder(tuple[str, msgspec.Raw])
    _encoder = msgspec.msgpack.Encoder()

    def __init__(self, kinds: Sequence[type[Any]], max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self._decoders = {kind.__name__: msgspec.msgpack.Decoder(kind) for kind in kinds}

    def encode(self, message: Any) -> bytes:
        """One frame.

        Raises:
            EngineError: the message is too long, or of no kind that goes this way.
            TypeError: it holds something else than numbers and strings.
        """
        kind = type(message).__name__
        self._decoder(kind)
        body = self._encoder.encode((kind, message))
        return _LENGTH.pack(self.check_length(len(body))) + body

    def decode(self, body: bytes) -> Any:
        """The message in a frame, its length left out.

        Raises:
            EngineError: it is of no kind that goes this way, or malformed.
        """
        try:
            kind, fields = self._envelope.decode(body)
            return self._decoder(kind).decode(fields)
        except (msgspec.MsgspecError, ValueError, RecursionError) as error:
            raise EngineError(
                "frame", body[:24], f"makes no sense ({error})", "do both ends run one version"
            ) from error

    def check_length(self, length: int) -> int:
        """`length`, if a frame may have so many bytes; raises `EngineError` otherwise."""
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
"""To the worker's process."""

UP = Direction((Ready, Proposal, Exhausted, Alive, Logged, Failed), MAX_REPORT_BYTES)
"""From the worker's process."""


class Wire:
    """One end of a connection. Any thread may send; one thread receives.

    Args:
        connection: a connected stream socket, which it owns from now on.
        sends, takes: what goes out and what comes in.
    """

    def __init__(self, connection: socket.socket, *, sends: Direction, takes: Direction) -> None:
        self._socket, self._sends, self._takes = connection, sends, takes
        self._incoming = connection.makefile("rb")
        self._turn = threading.Lock()

    def send(self, message: Any) -> None:
        """Sends one message, or a frame that `Direction.encode` made; blocks while the other end does not read.

        Raises:
            OSError: the other end is gone.
            EngineError, TypeError: the message makes no frame.
        """
        frame = message if isinstance(message, bytes) else self._sends.encode(message)
        with self._turn:
            self._socket.sendall(frame)

    def receive(self) -> Any | None:
        """The next message; None when the other end is gone.

        Raises:
            EngineError: a frame is too long or makes no sense.
        """
        header = self._read(_LENGTH.size)
        if header is None:
            return None
        body = self._read(self._takes.check_length(*_LENGTH.unpack(header)))
        return None if body is None else self._takes.decode(body)

    def hang_up(self) -> None:
        """Ends the connection for both ends, and whatever waits for it; may be called twice."""
        with contextlib.suppress(OSError):  # the other end was first
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Frees it; nobody may use it any more."""
        self._incoming.close()
        self._socket.close()

    def _read(self, count: int) -> bytes | None:
        try:
            data = self._incoming.read(count)
        except OSError:
            return None
        return data if len(data) == count else None
