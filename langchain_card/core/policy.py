"""What the coordinator asks before it decides, and what it tells of what happened: the seam of `Controller`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from langchain_card.config import Schedule
from langchain_card.core.frontier import Frontier


class Load(NamedTuple):
    """What runs: costs are learnt apart for each."""

    schedule: Schedule
    num_seqs: int = 1


class Leave(NamedTuple):
    """Draft steps that may be taken.

    Attributes:
        widths: [steps] nodes that each expands at most.
        min_chance: of being reached, below which a node is not expanded.
    """

    widths: tuple[int, ...] = ()
    min_chance: float = 0.0


class Policy(Protocol):
    """What the coordinator asks before it decides, and what it tells of what happened. Times in seconds."""

    def auto(self, num_seqs: int, current: Schedule | None) -> Schedule:
        """The schedule that "auto" stands for, asked once before each round; it may count what it is asked.

        Args:
            num_seqs: requests that run.
            current: what it stands for so far; None where all of them are about to begin.
        """

    def leave(self, load: Load, *, hit: bool) -> Leave:
        """Under `parallel` the draft steps that come with a correction; under `sequential` one, granted when it pays.

        Args:
            load: what runs.
            hit: whether the last committed token was in the cache.
        """

    def draft_pays(self, load: Load, frontier: Frontier, lead: int) -> bool:
        """Whether a round should have one more draft step before it verifies.

        Args:
            load: what runs.
            frontier: where the draft would look.
            lead: depth of its candidates.
        """

    def windows(self, load: Load, chances: Sequence[Sequence[float]]) -> list[int]:
        """How many candidates of each request to verify, of those with these chances, likeliest first."""

    def patience(self, load: Load) -> float:
        """How long a round may wait for its draft."""

    def saw_pass(
        self, load: Load, requests: int, rows: int, tokens: int, elapsed: float, since_last: float | None
    ) -> None:
        """The target verified `rows` rows in all and `tokens` tokens came of them.

        Args:
            load: what ran.
            requests: in this pass; others may wait.
            rows: of all requests.
            tokens: of all requests.
            elapsed: seconds of the pass.
            since_last: from the end of the pass before to the end of this one; None when something else came between.
        """

    def saw_draft_step(self, load: Load, nodes: int, together: int, elapsed: float, layers: int) -> None:
        """A draft expanded `nodes` nodes of one request, in `elapsed` seconds: its share of a step over `together`.

        So many `layers` of them hang below each other.
        """

    def judge(self, source: str, stated: float) -> tuple[float, float]:
        """The log chance to reckon with, where a drafter states this one; and that where it is doubted.

        Doubted is what a drafter with a model has not listed where it has looked.
        """

    def saw_candidate(self, source: str, stated: float, *, taken: bool, doubted: bool) -> None:
        """A token was committed after this candidate's parent: the candidate, or not."""

    def saw_token(self, *, hit: bool, first: bool) -> None:
        """A token was committed where a drafter had looked; `hit` if it was in the cache, `first` the likeliest."""
