"""The seam of the controller: decisions that depend on measurements, and the observations that they are made from.

Times are in seconds, chances between 0 and 1, scores are log chances.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple, Protocol, TypeAlias

from langchain_card.config import Schedule
from langchain_card.core.candidates import Frontier
from langchain_card.core.costs import Mean

LENGTH_CLASS = 2048
"""Texts below this length, below twice that, below four times that, ... have costs of their own."""

LoadKey: TypeAlias = tuple[Schedule, int, int]


class Load(NamedTuple):
    """The work that runs at once. Costs are learned separately for each load.

    Attributes:
        schedule: of all requests.
        num_seqs: requests that run, without those that are paused.
        positions: length of the longest text, its answer included.
        drafting: False for a pass beside which no draft works.
    """

    schedule: Schedule
    num_seqs: int = 1
    positions: int = 0
    drafting: bool = True

    @property
    def key(self) -> LoadKey:
        """Key of its costs. Loads with about as many requests, and texts about as long, share one."""
        return self.schedule, self.num_seqs.bit_length(), (self.positions // LENGTH_CLASS).bit_length()

    def distance(self, sizes: tuple[int, int]) -> tuple[int, int]:
        """Return how unlike this load and one with the second and third part of a key are: in requests first."""
        _, requests, length = self.key
        return abs(sizes[0] - requests), abs(sizes[1] - length)


@dataclass(slots=True)
class TextStats:
    """Statistics of one answer, for the decisions about it.

    Attributes:
        hits: share of its tokens that were the draft's first guess.
        pace: tokens a pass.
        free_rows, free_pace: rows and tokens a pass where all candidates came from drafters whose steps cost no time.
        drafted: whether a step that costs device time was taken for it since its last pass.
        tried: whether a draft reads it to find out what drafting brings.
    """

    hits: Mean
    pace: Mean
    free_rows: Mean = field(default_factory=lambda: Mean(1.0))
    free_pace: Mean = field(default_factory=lambda: Mean(1.0))
    drafted: bool = False
    tried: bool = False

    def copy(self) -> TextStats:
        """Return an independent copy."""
        means = {name: getattr(self, name).copy() for name in ("hits", "pace", "free_rows", "free_pace")}
        return replace(self, **means)


class DraftGrant(NamedTuple):
    """Draft steps that a drafter may take.

    Attributes:
        widths: [steps] nodes that each step expands at most.
        min_chance: nodes that the target reaches with a smaller chance are not expanded.
        max_read: tokens of the text that each step may read before it drafts.
    """

    widths: tuple[int, ...] = ()
    min_chance: float = 0.0
    max_read: int = 0


class Policy(Protocol):
    """Decides what the coordinator cannot know without measurements, and learns from every pass and draft step."""

    def new_text(self) -> TextStats:
        """Return what is expected of an answer that is about to begin."""

    def auto(self, texts: Sequence[TextStats], current: Schedule | None, positions: int = 0) -> Schedule:
        """Choose the schedule that "auto" stands for. Called at least once before each round.

        Args:
            texts: those of the requests that run.
            current: the schedule in force; None when all of the requests are about to begin.
            positions: length of the longest text.
        """

    def grant(self, load: Load, *, hit: bool) -> DraftGrant:
        """Return the draft steps to grant: under `parallel` those of a whole correction, under `sequential` one.

        Args:
            load: the load that runs.
            hit: whether the last committed token was in the cache.
        """

    def read_budget(self, load: Load, text: TextStats, unread: int, written: int, left: int) -> int:
        """Return how many tokens of a text a draft step may read; 0 if the draft would not earn the time back.

        Args:
            load: the load that runs.
            text: of the request.
            unread: tokens that the draft has to read before it drafts, as far as it has reported them.
            written: tokens of the answer so far.
            left: tokens that the answer may still have.
        """

    def max_readers(self, load: Load) -> int:
        """Return for how many requests a draft may read in one step."""
        ...

    def may_wait(self, load: Load, lead: int) -> bool:
        """Return whether a round may wait for a draft under `parallel` whose candidates are `lead` deep.

        False spares the search for what the draft would expand; `draft_pays` decides the rest.
        """

    def draft_pays(self, load: Load, texts: Sequence[TextStats], frontiers: Sequence[Frontier]) -> list[bool]:
        """Return for each request whether its round should take one more draft step before it verifies.

        Args:
            load: the load that runs.
            texts: of the requests that could take a step, which they would share.
            frontiers: [requests] the nodes that the draft would expand next.
        """
        ...

    def windows(self, load: Load, texts: Sequence[TextStats], chances: Sequence[Sequence[float]]) -> list[int]:
        """Return how many candidates of each request to verify. `chances` are those of its candidates, best first."""

    def patience(self, load: Load) -> float:
        """Return how long a round may wait for its draft."""

    def observe_pass(
        self,
        load: Load,
        texts: Sequence[TextStats],
        rows: int,
        tokens: int,
        elapsed: float,
        since_last: float | None,
    ) -> None:
        """Learn from a target pass.

        Args:
            load: the load that ran.
            texts: those of the requests in this pass; others may wait.
            rows: rows of all requests.
            tokens: tokens that were committed, of all requests.
            elapsed: seconds of the pass.
            since_last: from the end of the pass before to the end of this one; None when other work came between.
        """

    def observe_draft_step(
        self, load: Load, text: TextStats, nodes: int, together: int, elapsed: float, layers: int
    ) -> None:
        """Learn from a draft step that expanded `nodes` nodes for one text, `layers` of them below each other.

        `elapsed` is the request's share of a step that expanded `together` nodes of all requests.
        """

    def observe_reading(self, load: Load, tokens: int, elapsed: float) -> None:
        """Learn from text that a draft has read."""

    def observe_answer(self, tokens: int) -> None:
        """Learn from the length of an answer that was written to its end."""

    def trust(self, source: str, stated_logp: float) -> tuple[float, float]:
        """Return the log chance to use in place of the one that a drafter states, and the one to use while unlisted.

        A candidate is unlisted when a model has expanded its parent and did not list it among the children.
        """

    def observe_candidate(self, source: str, stated_logp: float, *, taken: bool, unlisted: bool) -> None:
        """Learn whether a candidate was `taken`, when a token was committed after the candidate's parent."""

    def observe_token(self, text: TextStats, *, hit: bool, first: bool) -> None:
        """Learn from a token committed after an expanded node: whether it was cached, and whether it was the best."""
