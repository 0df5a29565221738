"""All seams in one place: what a plug-in implements, and what the engine asks of it."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias

from langchain_card.core.messages import Begin, Correct, End, Grow, Proposal, Verdict, Window
from langchain_card.core.request import Request


@dataclass(frozen=True, slots=True)
class Budget:
    """Leave to take one step for a request.

    Attributes:
        request_id: whose tree to grow.
        width: nodes to expand at most.
        min_chance: chance of being reached below which a node is not expanded.
    """

    request_id: int
    width: int = 1
    min_chance: float = 0.0


class Drafter(Protocol):
    """Proposes candidates. Called by one thread at a time; several requests may be open.

    Attributes:
        name: the `source` of its proposals; unique in an engine.
        paced: True when a step costs device time, so that steps are granted one by one where devices are shared.
    """

    name: str
    paced: bool

    def begin(self, request: Request, output_ids: Sequence[int]) -> None:
        """A request starts, or goes on with the answer so far; nothing need be computed yet."""

    def correct(self, request_id: int, start: int, token_ids: Sequence[int]) -> None:
        """The answer's tokens from `start` on are `token_ids`; may repeat what was said before."""

    def step(self, budgets: Sequence[Budget]) -> list[Proposal]:
        """One step for each request named: one proposal each, without nodes where nothing can be added."""

    def end(self, request_id: int) -> None:
        """The request holds nothing here from now on; unknown ids are ignored."""

    def close(self) -> None:
        """Frees everything."""


class Target(Protocol):
    """Verifies windows and owns the sequences' KV. Called by one thread."""

    def begin(self, begin: Begin) -> None:
        """Opens a sequence; nothing need be computed yet."""

    def verify(self, windows: Sequence[Window]) -> list[Verdict]:
        """The target's own token after every row of every window.

        Raises:
            MemoryError, torch.OutOfMemoryError: not enough memory; the same sequences may be verified again.
        """

    def end(self, request_id: int) -> None:
        """Frees a sequence; unknown ids are ignored."""


DraftCommand: TypeAlias = Begin | Correct | Grow | End


class Worker(Protocol):
    """A drafter's side of a transport."""

    def handle(self, command: DraftCommand) -> None:
        """Applies one command."""

    def work(self, request_ids: Collection[int]) -> None:
        """Takes all steps that these requests have leave for, those of one step together, and no other's."""

    def step(self, but: Collection[int] = ()) -> bool:
        """One step for every request that has leave, but these; False when none has."""

    def close(self) -> None:
        """Frees the drafter."""


class Transport(Protocol):
    """Carries commands to a drafter's worker and proposals back, in order.

    A `Correct`, `Grow` or proposal may be lost or come twice; `Begin` and `End` must arrive.
    """

    @property
    def ready(self) -> bool:
        """Whether the worker is there; one that takes its time is reported to the driver when it is."""

    def wait_ready(self) -> None:
        """Returns when the worker is there.

        Raises:
            CARDError: why it never will be.
        """

    def send(self, command: DraftCommand) -> None:
        """Hands a command over."""

    def work(self) -> None:
        """Takes the steps that are granted where nothing is to overlap, on the caller's thread."""

    def close(self) -> None:
        """Stops the worker and waits for it."""


class Clock(Protocol):
    """Where time comes from."""

    def __call__(self) -> float:
        """Seconds; only differences matter."""
