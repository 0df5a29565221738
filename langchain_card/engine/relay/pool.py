"""The engines behind a relay, as a Protocol: where they live and how they are reached is theirs to know."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from langchain_card.engine.relay.messages import Reply, Submit
from langchain_card.ports import Health
from langchain_card.runtime.kind import Kind

ENGINE_PROCESS, ENGINE_REPLICA = "engine process", "engine replica"
"""Names of engines in a pool's health, on this machine and elsewhere; of several, a number follows."""

PART = ": "
"""Separator between the name of one of several engines and the name of a worker in it."""


class Attempt(Protocol):
    """One engine's work on one request."""

    @property
    def kind(self) -> Kind | None:
        """The kind of the engine; None if it is not known."""

    def stop(self, num_tokens: int | None = None) -> None:
        """End the request after so many tokens, or discard it; an `Ended` or an `EngineLost` still follows."""

    def leave(self) -> None:
        """Give the seat back; the answer goes on elsewhere, or later. Nothing that follows counts."""


class EnginePool(Protocol):
    """Engines that answer requests. All methods but `health` and `num_seats` are called on the relay's thread."""

    @property
    def num_seats(self) -> int:
        """Number of requests that all engines together answer at once."""

    def start(self, post: Callable[[Callable[[], None]], None]) -> None:
        """Begin; `post` runs a function on the relay's thread, soon, from any thread."""

    def submit(self, request: Submit, reply: Callable[[Reply], None]) -> Attempt:
        """Choose an engine for a request, now or as soon as there is one.

        Replies are made on the relay's thread, none before this returns.
        """

    def check(self) -> float | None:
        """Do what is due, such as a restart; return the seconds until the next check, None for no other."""

    def announce(self, count: int) -> None:
        """Announce requests that are about to come."""

    def kind(self) -> Kind:
        """Return the kind of the engines; raise `EngineError` if it is not known. May be called from any thread."""

    def health(self) -> dict[str, Health]:
        """Return the health of engines and workers, by name; may be called from any thread."""

    def close(self) -> None:
        """End everything that this pool started."""
