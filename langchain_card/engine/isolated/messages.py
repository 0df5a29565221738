"""What an engine in a process of its own and its supervisor say to each other."""

from __future__ import annotations

from dataclasses import dataclass

from langchain_card.config import EngineConfig, Limits
from langchain_card.core.messages import TokenLogprob
from langchain_card.core.request import FinishReason, Request, RequestStats
from langchain_card.engine.transports.frames import MAX_COMMAND_BYTES, MAX_REPORT_BYTES, Direction, Failed, Logged
from langchain_card.ports import Health

# To the engine.


@dataclass(frozen=True, slots=True)
class Load:
    """What it is."""

    config: EngineConfig


@dataclass(frozen=True, slots=True)
class Ask:
    """A request, with what is known of its answer from earlier lives."""

    request: Request
    output_ids: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Stop:
    """As `ports.Backend.stop` has it."""

    request_id: int
    num_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class Pause:
    """As `ports.Backend.pause` has it."""

    request_id: int
    paused: bool


@dataclass(frozen=True, slots=True)
class Announce:
    """As `ports.Backend.announce` has it."""

    count: int


@dataclass(frozen=True, slots=True)
class Drain:
    """As `ports.Backend.drain` has it."""


# From the engine.


@dataclass(frozen=True, slots=True)
class Loaded:
    """It takes requests, within these limits."""

    limits: Limits


@dataclass(frozen=True, slots=True)
class Began:
    """The target begins with a request."""

    request_id: int


@dataclass(frozen=True, slots=True)
class Wrote:
    """Committed tokens, as `core.messages.Emit` has them, and the request's statistics so far."""

    request_id: int
    token_ids: tuple[int, ...]
    sources: tuple[str, ...]
    logprobs: tuple[TokenLogprob, ...]
    stats: RequestStats
    hit: bool = False


@dataclass(frozen=True, slots=True)
class Ended:
    """A request ended."""

    request_id: int
    reason: FinishReason
    stats: RequestStats


@dataclass(frozen=True, slots=True)
class Refused:
    """A request could not be served."""

    request_id: int
    error: Failed


@dataclass(frozen=True, slots=True)
class Alive:
    """Said once a second while it loads, works or waits: of its workers, by name."""

    workers: dict[str, Health]


TO_ENGINE = Direction((Load, Ask, Stop, Pause, Announce, Drain), MAX_COMMAND_BYTES)
FROM_ENGINE = Direction((Loaded, Began, Wrote, Ended, Refused, Alive, Logged, Failed), MAX_REPORT_BYTES)
