"""Messages between an engine in a process of its own and its supervisor."""

from __future__ import annotations

from dataclasses import dataclass

from langchain_card.config import EngineConfig, Limits
from langchain_card.core.messages import Reading, TokenLogprob
from langchain_card.core.request import FinishReason, Request, RequestStats
from langchain_card.engine.transports.frames import MAX_COMMAND_BYTES, MAX_REPORT_BYTES, Direction, Failed, Logged
from langchain_card.ports import Health
from langchain_card.runtime.kind import Kind

# To the engine.


@dataclass(frozen=True, slots=True)
class LoadEngine:
    """First message to the process: the engine to load, and whether it says its kind when it has loaded."""

    config: EngineConfig
    measure_kind: bool = False


@dataclass(frozen=True, slots=True)
class Submit:
    """A call of `ports.Backend.submit`; `output_ids` were generated before earlier processes died."""

    request: Request
    output_ids: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Stop:
    """A call of `ports.Backend.stop`."""

    request_id: int
    num_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class Pause:
    """A call of `ports.Backend.pause`."""

    request_id: int
    paused: bool


@dataclass(frozen=True, slots=True)
class Announce:
    """A call of `ports.Backend.announce`."""

    count: int


@dataclass(frozen=True, slots=True)
class Drain:
    """A call of `ports.Backend.drain`."""


# From the engine.


@dataclass(frozen=True, slots=True)
class LoadStep:
    """Report of a step while the engine loads; the text is that of `models.files.Progress`."""

    stage: str


@dataclass(frozen=True, slots=True)
class Loaded:
    """Report that the engine takes requests, within these limits; where its draft runs; its kind if that is wanted."""

    limits: Limits
    draft_device: str
    kind: Kind | None = None


@dataclass(frozen=True, slots=True)
class Began:
    """Report that the target starts to work on a request."""

    request_id: int


@dataclass(frozen=True, slots=True)
class Committed:
    """Committed tokens (the fields of `core.messages.Emit`), and the request's statistics so far."""

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
class RequestFailed:
    """Report that a request could not be served."""

    request_id: int
    error: Failed


@dataclass(frozen=True, slots=True)
class EngineHeartbeat:
    """A sign of life, sent once a second, also while the engine loads: the health of its workers, by name."""

    workers: dict[str, Health]


TO_ENGINE = Direction((LoadEngine, Submit, Stop, Pause, Announce, Drain), MAX_COMMAND_BYTES)
FROM_ENGINE = Direction(
    (LoadStep, Loaded, Began, Reading, Committed, Ended, RequestFailed, EngineHeartbeat, Logged, Failed),
    MAX_REPORT_BYTES,
)
