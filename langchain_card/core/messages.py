"""Everything that enters and leaves the core. Host numbers only: no tensor ever crosses between workers.

Drafters send `Proposal`s and the target sends `Verdict`s; they reach `Coordinator.handle` inside events. What the
coordinator wants done comes back as effects.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from langchain_card.config import Schedule
from langchain_card.core.request import FinishReason, Request, RequestStats

ROOT = -1
"""Parent of a window's first row."""

TARGET = "target"
"""Name of the target among the workers."""


@dataclass(frozen=True, slots=True)
class Proposal:
    """New candidates of one drafter.

    A drafter numbers its nodes from 0 within an epoch, and raises its epoch when the committed tokens leave its tree.
    Every proposal says which node stands for the last token applied, so that a lost one costs its own nodes only.

    Attributes:
        source, request_id: name of the drafter; whose candidates.
        epoch: of the numbering.
        root: number of the node that stands for the last token applied.
        applied_len: output tokens applied.
        first: number of the first node here.
        parents, token_ids: [n] number of each node's parent, smaller than its own; its token.
        scores: [n] log of the estimated chance that the target picks the token after its parent.
        expanded: numbers of the nodes whose children are now all published, some perhaps once more.
        forwarded, together: nodes that the step expanded, here and for all its requests; 0 without device time.
        layers: of them that hang below each other, at most.
        elapsed, reading: seconds of the step, of a common one this request's share; of reading the text before it.
        steps: credits that this answers.
        incarnation: of the `Begin` that this answers; the worker fills it in.
    """

    source: str
    request_id: int
    epoch: int
    root: int
    applied_len: int
    first: int
    parents: tuple[int, ...]
    token_ids: tuple[int, ...]
    scores: tuple[float, ...]
    expanded: tuple[int, ...] = ()
    forwarded: int = 0
    together: int = 0
    layers: int = 1
    elapsed: float = 0.0
    reading: float = 0.0
    steps: int = 1
    incarnation: int = 0


@dataclass(frozen=True, slots=True)
class Window:
    """What the target verifies in one pass.

    Attributes:
        request_id, step_id: of the sequence; unique per verification, and a verdict must carry it.
        start_position: committed positions before the first row.
        token_ids: [rows]; the first is the last committed token, the others are candidates.
        parents: [rows]; row index of the parent, `ROOT` for the first.
        kept_rows: rows of the previous window that were committed, in order.
        schedule: of the request, in force.
        sources: [candidates] the drafter that proposed each one first.
    """

    request_id: int
    step_id: int
    start_position: int
    token_ids: tuple[int, ...]
    parents: tuple[int, ...]
    kept_rows: tuple[int, ...] = ()
    schedule: Schedule = "plain"
    sources: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """Of the token that the target chose, and of the likeliest ones, best first: log-softmax of its raw logits."""

    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class Verdict:
    """The target's own token after each row of a window.

    Attributes:
        request_id, step_id: of the window.
        target_ids: [rows].
        elapsed: seconds of the pass; of one for several requests, this one's share.
        logprobs: [rows] of the target's tokens; empty when the request wants none.
        read: prompt tokens, of any requests, that the same pass read.
        cached: tokens of this one's text that need not be read, known from an earlier one; said once.
        together: requests that the pass verified.
        measured: [rows] by the acceptance rule, 0 where it had nothing to ask; empty where it measures nothing.
        closed: whether a token on the way of the walk was not the model's choice, but that of an end written in time.
    """

    request_id: int
    step_id: int
    target_ids: tuple[int, ...]
    elapsed: float = 0.0
    logprobs: tuple[TokenLogprob, ...] = ()
    read: int = 0
    cached: int = 0
    together: int = 1
    closed: bool = False
    measured: tuple[float, ...] = ()


# Events: what happened.


@dataclass(frozen=True, slots=True)
class Submitted:
    """A request arrived, perhaps with the beginning of its answer: another engine had written that when it died."""

    request: Request
    now: float
    output_ids: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Proposed:
    """A drafter published candidates, at `now`, perhaps while the target was busy."""

    proposal: Proposal
    now: float


@dataclass(frozen=True, slots=True)
class TargetReady:
    """The target is free and queries the cache."""

    now: float


@dataclass(frozen=True, slots=True)
class Verified:
    """The target finished a window."""

    verdict: Verdict
    now: float


@dataclass(frozen=True, slots=True)
class Stopped:
    """The consumer wants no more than the first `num_tokens` tokens (None: those so far): a stop string, or it left."""

    request_id: int
    reason: FinishReason
    now: float
    num_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class Paused:
    """The consumer reads too slowly, so that no window is opened; or it reads again."""

    request_id: int
    paused: bool
    now: float


@dataclass(frozen=True, slots=True)
class WorkerStarted:
    """A worker is there, with nothing in its memory: at first, or after a death."""

    worker: str
    now: float


@dataclass(frozen=True, slots=True)
class WorkerDied:
    """A worker is gone with all that it held. What it had sent may still arrive."""

    worker: str
    now: float
    reason: str = "it gave none"


@dataclass(frozen=True, slots=True)
class OutOfMemory:
    """A worker could not take a step for these requests (the target: for all that it verifies); it lives."""

    worker: str
    request_ids: tuple[int, ...]
    now: float


@dataclass(frozen=True, slots=True)
class Draining:
    """What was submitted is finished; nothing more is taken."""

    now: float


Event: TypeAlias = (
    Submitted | Proposed | TargetReady | Verified | Stopped | Paused
    | WorkerStarted | WorkerDied | OutOfMemory | Draining
)  # fmt: skip


# Effects: what is to be done, in order.


@dataclass(frozen=True, slots=True)
class Begin:
    """To a worker: a request starts, or goes on after it was put back or the worker had died.

    Attributes:
        schedule: in force for the request.
        output_ids: tokens of the answer so far.
        incarnation: raised at every start; proposals carry it, so that those of an earlier one are known as stale.
    """

    worker: str
    request: Request
    schedule: str
    output_ids: tuple[int, ...] = ()
    incarnation: int = 0

    @property
    def request_id(self) -> int:
        """As the other commands have it."""
        return self.request.request_id


@dataclass(frozen=True, slots=True)
class Correct:
    """To a drafter: the output tokens from `start` on. Cumulative, so a lost or repeated one does no harm."""

    worker: str
    request_id: int
    start: int
    token_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Grow:
    """To a drafter: these steps and no more may be taken since the last correction.

    Attributes:
        widths: [steps] nodes that each step may expand.
        min_chance: nodes that the target reaches with a smaller chance are not expanded.
    """

    worker: str
    request_id: int
    widths: tuple[int, ...]
    min_chance: float = 0.0


@dataclass(frozen=True, slots=True)
class End:
    """To a worker: the request holds nothing from now on."""

    worker: str
    request_id: int


@dataclass(frozen=True, slots=True)
class Restart:
    """To the supervisor: start this worker again, not before `at`; answered by `WorkerStarted`."""

    worker: str
    at: float


@dataclass(frozen=True, slots=True)
class Verify:
    """To the target: one pass over these windows and those that it has not answered yet.

    Answered by `Verified`, for windows whose text has been read; by `OutOfMemory` or `WorkerDied` for all of them.
    """

    windows: tuple[Window, ...]


@dataclass(frozen=True, slots=True)
class Wait:
    """Nothing to verify before `until` (infinity: before another event), unless an event comes first."""

    until: float


@dataclass(frozen=True, slots=True)
class Emit:
    """To the consumer: committed tokens; for each the drafter that proposed it, or "", and what `logprobs` asked.

    `hit` says whether the last one, which the target alone has chosen, is in the cache already.
    """

    request_id: int
    token_ids: tuple[int, ...]
    sources: tuple[str, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()
    hit: bool = False


@dataclass(frozen=True, slots=True)
class Finish:
    """To the consumer: the request ended; `error` says why when the reason is `FinishReason.ERROR`."""

    request_id: int
    reason: FinishReason
    stats: RequestStats
    error: str = ""


Effect: TypeAlias = Begin | Correct | Grow | End | Restart | Verify | Wait | Emit | Finish
