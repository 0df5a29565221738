"""Everything the core knows of a request while it waits or runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from langchain_card.config import Schedule
from langchain_card.core.candidates import CandidateTree
from langchain_card.core.drafter_state import SourceState
from langchain_card.core.messages import Proposal, Window
from langchain_card.core.request import Request, RequestStats


@dataclass(slots=True, eq=False)
class RequestState:
    """A request that waits or runs. Written by the coordinator only.

    Attributes:
        request: what was asked.
        tree: committed tokens and candidates.
        sources: one state per drafter that works for it, by name.
        schedule: the schedule in force; the asked one until the request is admitted.
        stats: counts and times.
        output_ids: committed tokens of the answer.
        window: the verification in flight, or None.
        heard: proposals that came while the window is in flight.
        kept_rows: rows of the last window that were committed; the next window carries them to the target.
        wait_until: until when a round may wait for its draft, or None.
        wait_since: since when it waits, or None.
        paused: its consumer reads too slowly.
        failures: target steps in a row that failed with it.
        incarnation: how often it was begun.
    """

    request: Request
    tree: CandidateTree
    schedule: Schedule
    stats: RequestStats
    sources: dict[str, SourceState] = field(default_factory=dict)
    output_ids: list[int] = field(default_factory=list)
    window: Window | None = None
    heard: list[Proposal] = field(default_factory=list)
    kept_rows: tuple[int, ...] = ()
    wait_until: float | None = None
    wait_since: float | None = None
    paused: bool = False
    failures: int = 0
    incarnation: int = 0

    @classmethod
    def waiting(cls, request: Request, now: float, output_ids: Sequence[int] = ()) -> RequestState:
        """A request as it arrives, with what is known of its answer."""
        schedule = request.params.schedule
        stats = RequestStats(schedule=schedule, submitted=now, started=now, first_token=now)
        state = cls(request, CandidateTree(request.prompt_ids[-1]), schedule, stats, output_ids=[*output_ids])
        for token in output_ids:
            state.tree.advance(token)
        return state

    @property
    def tokens_left(self) -> int:
        """How many more the answer may have."""
        return self.request.params.max_tokens - len(self.output_ids)

    def wait(self, now: float, until: float | None) -> None:
        """Lets the round wait for its draft from now on, or no longer."""
        if until is None and self.wait_since is not None:
            self.stats.waited += now - self.wait_since
        self.wait_since = None if until is None else self.wait_since if self.wait_since is not None else now
        self.wait_until = until

    def copy(self) -> RequestState:
        """An independent copy."""
        return replace(
            self,
            tree=self.tree.copy(),
            stats=replace(
                self.stats,
                verified_by_source=self.stats.verified_by_source.copy(),
                accepted_by_source=self.stats.accepted_by_source.copy(),
            ),
            sources={name: source.copy() for name, source in self.sources.items()},
            output_ids=self.output_ids.copy(),
            heard=self.heard.copy(),
        )
