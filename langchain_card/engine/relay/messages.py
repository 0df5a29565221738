"""Messages between a relay and the engines that write its answers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from langchain_card.core.messages import Reading, TokenLogprob
from langchain_card.core.request import FinishReason, Request, RequestStats
from langchain_card.engine.transports.frames import Failed
from langchain_card.runtime.kind import Kind


@dataclass(frozen=True, slots=True)
class Submit:
    """A request for an answer, or for the rest of one.

    Attributes:
        request: the request.
        output_ids: the answer so far.
        kind: of the engine that began it, if that is known; None for a new answer.
    """

    request: Request
    output_ids: tuple[int, ...] = ()
    kind: Kind | None = None


# From an engine. `request_id` is that of the request in `Submit`.


@dataclass(frozen=True, slots=True)
class Began:
    """Report that the target starts to work on a request."""

    request_id: int


@dataclass(frozen=True, slots=True)
class Committed:
    """Committed tokens (the fields of `core.messages.Emit`), and this engine's statistics of the request so far."""

    request_id: int
    token_ids: tuple[int, ...]
    sources: tuple[str, ...]
    logprobs: tuple[TokenLogprob, ...]
    stats: RequestStats
    hit: bool = False


@dataclass(frozen=True, slots=True)
class Ended:
    """Report that a request ended."""

    request_id: int
    reason: FinishReason
    stats: RequestStats


@dataclass(frozen=True, slots=True)
class NotServed:
    """Report that a request could not be served."""

    request_id: int
    error: Failed


# From the pool of engines.


@dataclass(frozen=True, slots=True)
class RequestFailed:
    """Report that no engine will serve a request."""

    error: BaseException


@dataclass(frozen=True, slots=True)
class EngineLost:
    """Report that an engine is gone, or is about to go, before the end of an answer.

    Attributes:
        error: what happened to it.
        died: whether it died, perhaps of the request; False if it left on purpose.
    """

    error: BaseException
    died: bool = True


Reply: TypeAlias = Began | Reading | Committed | Ended | RequestFailed | EngineLost
"""What a relay receives of an attempt at an answer. The last three end the attempt."""
