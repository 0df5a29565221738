"""`Settings`: keys and hosts of the application, and the limits of each request."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from pathlib import Path

from langchain_card.errors import InvalidInputError, check_range

MAX_MESSAGES = 4096


@dataclass(frozen=True, slots=True)
class Settings:
    """Access and limits of an application. Limits of decoding are in `Limits`, a field of the chat model.

    Attributes:
        api_keys: keys, each valid for every route as `Authorization: Bearer KEY`; without any, no key is needed.
        model_names: names under which requests may name the model; responses repeat the name. None for the last part
            of the model's own name and, unless it is a path, the whole name.
        hosts: values that the header `Host` may have, without a port; None for any. They protect a server without keys
            from web pages whose domain names resolve to it (DNS rebinding).
        max_body_bytes: bytes of a request's body.
        max_body_seconds: seconds until the whole body must have arrived.
        max_requests: requests handled at once; further ones get status 429.
        max_messages: messages of a conversation, at most 4,096.
        max_wait_seconds: seconds after which a request is given up if its answer has not begun.
        deadline_seconds: seconds after which every answer ends; the header `x-request-timeout` may set fewer.
        keep_alive_seconds: seconds of silence in a stream after which a comment is sent to keep it open.
    """

    api_keys: tuple[str, ...] = field(default=(), repr=False)
    model_names: tuple[str, ...] | None = None
    hosts: tuple[str, ...] | None = None
    max_body_bytes: int = 1 << 20
    max_body_seconds: float = 30.0
    max_requests: int = 1024
    max_messages: int = 1024
    max_wait_seconds: float = 120.0
    deadline_seconds: float = 600.0
    keep_alive_seconds: float = 15.0

    def __post_init__(self) -> None:
        for number, key in enumerate(self.api_keys):
            if not isinstance(key, str) or not key.isascii() or not key.isprintable() or not key or " " in key:
                limit = "must be printable ASCII characters without blanks"
                raise InvalidInputError(f"api_keys[{number}]", "(hidden)", limit, "langchain-card makes none up")
        if self.model_names is not None and (not self.model_names or not all(self.model_names)):
            raise InvalidInputError("model_names", self.model_names, "must hold a name", "None takes the model's own")
        check_range("max_body_bytes", self.max_body_bytes, 1024, 1 << 30)
        check_range("max_requests", self.max_requests, 1, 1 << 20)
        check_range("max_messages", self.max_messages, 1, MAX_MESSAGES)
        for setting in fields(self):
            if setting.name.endswith("_seconds"):
                check_range(setting.name, getattr(self, setting.name), 0.01, 86_400.0)


def read_keys(path: Path, name: str = "--api-key-file") -> tuple[str, ...]:
    """Return the keys of a file, one per line.

    Args:
        path: the file.
        name: of the field in errors.

    Raises:
        InvalidInputError: the file cannot be read, holds an invalid key, or holds none.
    """
    try:
        keys = tuple(line.strip() for line in path.read_text(encoding="utf-8").splitlines() if line.strip())
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidInputError(name, str(path), f"cannot be read ({type(error).__name__})") from error
    for number, key in enumerate(keys, 1):
        if not key.isascii() or not key.isprintable() or " " in key:
            limit = f"key {number} must be printable ASCII characters without blanks"
            raise InvalidInputError(name, str(path), limit, "a line holds a key and nothing else")
    if not keys:
        hint = "python -c 'import secrets; print(secrets.token_urlsafe())' makes one"
        raise InvalidInputError(name, str(path), "holds no key", hint)
    return keys
