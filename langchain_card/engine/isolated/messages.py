"""Messages between an engine in a process of its own and the process that started it."""

from __future__ import annotations

from dataclasses import dataclass

from langchain_card.config import EngineConfig
from langchain_card.core.messages import Reading
from langchain_card.engine.relay.messages import Began, Committed, Ended, NotServed, Submit
from langchain_card.engine.transports.frames import MAX_COMMAND_BYTES, MAX_REPORT_BYTES, Direction, Failed, Logged
from langchain_card.limits import Limits
from langchain_card.ports import Health
from langchain_card.runtime.kind import Kind

# To the engine, besides `Submit`.


@dataclass(frozen=True, slots=True)
class LoadEngine:
    """First message to the process: the engine to load. `config.replicas` is the number of its processes."""

    config: EngineConfig


@dataclass(frozen=True, slots=True)
class Stop:
    """A call of `ports.Backend.stop`."""

    request_id: int
    num_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class Announce:
    """A call of `ports.Backend.announce`."""

    count: int


# From the engine, besides `Began`, `Reading`, `Committed`, `Ended` and `NotServed`.


@dataclass(frozen=True, slots=True)
class LoadStep:
    """Report of a step while the engine loads; the text is that of `models.files.Progress`."""

    stage: str


@dataclass(frozen=True, slots=True)
class Loaded:
    """Report that the engine takes requests, within these limits; where its draft runs; its kind."""

    limits: Limits
    draft_device: str
    kind: Kind


@dataclass(frozen=True, slots=True)
class EngineHeartbeat:
    """A sign of life, sent once a second, also while the engine loads: the health of its workers, by name."""

    workers: dict[str, Health]


TO_ENGINE = Direction((LoadEngine, Submit, Stop, Announce), MAX_COMMAND_BYTES)
FROM_ENGINE = Direction(
    (LoadStep, Loaded, Began, Reading, Committed, Ended, NotServed, EngineHeartbeat, Logged, Failed), MAX_REPORT_BYTES
)
