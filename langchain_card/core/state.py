"""The state of one request while it waits or runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from langchain_card.config import Schedule
from langchain_card.core.candidates import CandidateTree
from langchain_card.core.drafter_state import DrafterState
from langchain_card.core.messages import Proposal, Window
from langchain_card.core.policy import TextStats
from langchain_card.core.request import TABLES, Request, RequestStats


@dataclass(slots=True, eq=False)
class RequestState:
    """A request that waits or runs. Only the coordinator writes to it.

    Attributes:
        request: the request as it was submitted.
        tree: committed tokens and candidates.
        schedule: the schedule in force; until the request is admitted, the requested one.
        stats: counts and times.
        text: what the policy knows of the answer.
        drafters: the state of each drafter that works for the request, by name.
        output_ids: committed tokens of the answer.
        window: the verification in flight, or None.
        pending: proposals that arrived while the window is in flight.
        kept_rows: rows of the last window that were committed; the next window reports them to the target.
        wait_until: time until which a round may wait for its draft, or None.
        wait_since: time since which it waits, or None.
        paused: whether its consumer reads too slowly.
        failures: target steps in a row that failed with it.
        incarnation: how often it was begun.
    """

    request: Request
    tree: CandidateTree
    schedule: Schedule
    stats: RequestStats
    text: TextStats
    drafters: dict[str, DrafterState] = field(default_factory=dict)
    output_ids: list[int] = field(default_factory=list)
    window: Window | None = None
    pending: list[Proposal] = field(default_factory=list)
    kept_rows: tuple[int, ...] = ()
    wait_until: float | None = None
    wait_since: float | None = None
    paused: bool = False
    failures: int = 0
    incarnation: int = 0

    @classmethod
    def waiting(cls, request: Request, text: TextStats, now: float, output_ids: Sequence[int] = ()) -> RequestState:
        """Make the state of a request that has just arrived, perhaps with the beginning of its answer."""
        schedule = request.params.schedule
        stats = RequestStats(schedule=schedule, submitted=now, started=now, first_token=now)
        tree = CandidateTree(request.prompt_ids[-1])
        state = cls(request, tree, schedule, stats, text, output_ids=[*output_ids])
        for token in output_ids:
            state.tree.advance(token)
        for label in request.labels:
            node = tree.root
            for token in label:
                node = tree.insert(node, token, 0.0, "")
        return state

    @property
    def has_begun(self) -> bool:
        """Whether an engine has worked on it: this one, or the one that wrote the beginning of its answer."""
        return self.incarnation > 0 or bool(self.output_ids)

    @property
    def length(self) -> int:
        """Tokens of the prompt and of the answer so far."""
        return len(self.request.prompt_ids) + len(self.output_ids)

    @property
    def tokens_left(self) -> int:
        """Tokens that the answer may still have."""
        return self.request.params.max_tokens - len(self.output_ids)

    def wait(self, now: float, until: float | None) -> None:
        """Let the round wait for its draft until a time; None ends the wait."""
        if until is None and self.wait_since is not None:
            self.stats.waited += now - self.wait_since
        self.wait_since = None if until is None else self.wait_since if self.wait_since is not None else now
        self.wait_until = until

    def copy(self) -> RequestState:
        """Return an independent copy."""
        counts: Any = {name: getattr(self.stats, name).copy() for name in TABLES}
        return replace(
            self,
            tree=self.tree.copy(),
            stats=replace(self.stats, **counts),
            text=self.text.copy(),
            drafters={name: drafter.copy() for name, drafter in self.drafters.items()},
            output_ids=self.output_ids.copy(),
            pending=self.pending.copy(),
        )
