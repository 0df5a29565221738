"""`Settings`: who may use the application, and the bounds of each request."""

from __future__ import annotations

from dataclasses import dataclass, field, fields

from langchain_card.errors import InvalidInputError, check_range

MOST_MESSAGES = 4096


@dataclass(frozen=True, slots=True)
class Settings:
    """What an application allows; what decoding allows is in `Limits`, a field of the chat model.

    Attributes:
        api_keys: each opens every route, as `Authorization: Bearer KEY`; where there are none, everybody may come in.
        model_names: by which requests may name the model, and answers name it then; None for the last part of its
            own name, and for its hub id; never for a path.
        hosts: that requests may name in `Host`, without a port; None for any. It keeps web pages, whose names are made
            to lead here, away from a server without keys.
        max_body_bytes: of a request's body.
        max_body_seconds: until all of it must have come.
        max_requests: that are in the house at once; more are turned away at the door.
        max_messages: of a conversation, at most 4,096.
        max_wait_seconds: after which a request that has not begun is given up.
        deadline_seconds: after which any answer ends; a request may say less, in the header `x-request-timeout`.
        keep_alive_seconds: of silence in a stream, after which it says that it is still there.
    """

    api_keys: tuple[str, ...] = field(default=(), repr=False)
    model_names: tuple[str, ...] | None = None
    hosts: tuple[str, ...] | None = None
    max_body_bytes: int = 1 << 22
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
        check_range("max_messages", self.max_messages, 1, MOST_MESSAGES)
        for each in fields(self):
            if each.name.endswith("_seconds"):
                check_range(each.name, getattr(self, each.name), 0.01, 86_400.0)
