"""Everything that enters and leaves the core: plain Python values, for no tensor ever crosses between workers.

Drafters send `Proposal`s and the target sends `Verdict`s; they reach `Coordinator.handle` inside events. The
coordinator answers with effects.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from langchain_card.config import Schedule
from langchain_card.core.request import FinishReason, Request, RequestStats
from langchain_card.errors import EngineError

ROOT = -1
"""Parent of a window's first row."""

NO_TOKEN = -1
"""The target's token after a row whose highest logit is NaN or infinite."""

TARGET = "target"
"""Name of the target among the workers."""


@dataclass(frozen=True, slots=True)
class Proposal:
    """New candidates of one drafter.

    A drafter numbers its nodes from 0 within an epoch, and raises its epoch when the committed tokens leave its tree.
    Every proposal names the node of the last token applied, so that a lost proposal costs no more than its own nodes.

    Attributes:
        source, request_id: name of the drafter; the request that the candidates are for.
        epoch: epoch of the numbering.
        root: number of the node of the last token applied.
        applied_len: output tokens applied.
        first: number of the first node in this proposal.
        parents, token_ids: [n] number of each node's parent, smaller than its own; its token.
        scores: [n] log of the estimated chance that the target picks the token after its parent. A node of minus
            infinity has its number, but neither it nor anything after it enters the cache.
        expanded: numbers of the nodes whose children are now all published; a number may come again.
        forwarded, together: nodes that the step expanded, for this request and for all; 0 without device time.
        layers: how many of these nodes hang below each other, at most.
        elapsed, reading: seconds of the step (this request's share of it), and of reading the text before it.
        read, unread: tokens of the text that the step has read, and that are left; until none are, nothing is proposed.
        incarnation: number of the `Begin` in force; the worker fills it in.
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
    read: int = 0
    unread: int = 0
    incarnation: int = 0


@dataclass(frozen=True, slots=True)
class Window:
    """The rows of one request that the target verifies in one pass.

    Attributes:
        request_id, step_id: the request; a number that is unique per verification, and that the verdict repeats.
        start_position: committed positions before the first row.
        token_ids: [rows]; the first is the last committed token, the others are candidates.
        parents: [rows]; row index of the parent, `ROOT` for the first.
        kept_rows: rows of the previous window that were committed, in order.
        schedule: the request's schedule in force.
        drafting: whether a drafter whose steps cost device time works meanwhile.
        sources: [candidates] the drafter that proposed each one first.
    """

    request_id: int
    step_id: int
    start_position: int
    token_ids: tuple[int, ...]
    parents: tuple[int, ...]
    kept_rows: tuple[int, ...] = ()
    schedule: Schedule = "plain"
    drafting: bool = False
    sources: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """Log-probability of the chosen token, and of the likeliest tokens, best first: log-softmax of the raw logits."""

    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class Verdict:
    """The target's own token after each row of a window.

    Attributes:
        request_id, step_id: those of the window.
        target_ids: [rows]; `NO_TOKEN` where the highest logit is NaN or infinite.
        elapsed: seconds of the pass; this request's share when it verified several.
        logprobs: [rows] of the target's tokens; empty when the request wants none.
        read: prompt tokens, of any requests, that the same pass read.
        cached: tokens of this request's prompt that were known from an earlier one; reported once.
        together: requests that the pass verified.
        measured: [rows] what the acceptance rule measures, 0 at rows without a question; empty if it measures nothing.
        closed: whether an end of the grammar, written in time for `max_tokens`, replaced a choice of the model.
        label_logprobs: log-probability of each of the request's labels as the whole answer: log-softmax of the raw
            logits, summed over its tokens and the end of the answer.
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
    label_logprobs: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class Reading:
    """How much of a request's text the target has read, after a pass that left some of it.

    Attributes:
        request_id: the request.
        read: tokens read so far, and `total`: those to be read; tokens of earlier texts in memory are in
            neither, those that are loaded from a folder in both.
    """

    request_id: int
    read: int
    total: int


# Events.


@dataclass(frozen=True, slots=True)
class Submitted:
    """A request arrived, perhaps with the beginning of its answer, written by an engine that has died since."""

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
    """The target is free: it queries the cache."""

    now: float


@dataclass(frozen=True, slots=True)
class Verified:
    """The target finished a window."""

    verdict: Verdict
    now: float


@dataclass(frozen=True, slots=True)
class Stopped:
    """The consumer wants only the first `num_tokens` tokens (None: those so far): a stop string, or it has left."""

    request_id: int
    reason: FinishReason
    now: float
    num_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class Paused:
    """The consumer reads too slowly, so that no window is opened; or, with `paused=False`, it reads again."""

    request_id: int
    paused: bool
    now: float


@dataclass(frozen=True, slots=True)
class WorkerStarted:
    """A worker is up, with nothing in its memory: at first, or after a death."""

    worker: str
    now: float


@dataclass(frozen=True, slots=True)
class WorkerDied:
    """A worker died with all that it held. Messages that it had sent may still arrive."""

    worker: str
    now: float
    reason: str = "it gave none"


@dataclass(frozen=True, slots=True)
class OutOfMemory:
    """A worker had no memory for a step over these requests (the target: over all that it verifies); it is still up."""

    worker: str
    request_ids: tuple[int, ...]
    now: float


@dataclass(frozen=True, slots=True)
class Draining:
    """Submitted requests are finished; no more are accepted."""

    now: float


@dataclass(frozen=True, slots=True)
class Interrupted:
    """The target's thread did something else between two passes."""

    now: float


Event: TypeAlias = (
    Submitted | Proposed | TargetReady | Verified | Stopped | Paused
    | WorkerStarted | WorkerDied | OutOfMemory | Draining | Interrupted
)  # fmt: skip


# Effects, to be carried out in order.


@dataclass(frozen=True, slots=True)
class Begin:
    """To a worker: a request starts, or goes on after it was put back or after the worker died.

    Attributes:
        schedule: the request's schedule in force.
        output_ids: tokens of the answer so far.
        incarnation: raised at every start; proposals carry it, so that those of an earlier start are known to be stale.
    """

    worker: str
    request: Request
    schedule: str
    output_ids: tuple[int, ...] = ()
    incarnation: int = 0

    @property
    def request_id(self) -> int:
        """The request's id, under the name that the other commands use."""
        return self.request.request_id


@dataclass(frozen=True, slots=True)
class Correct:
    """To a drafter: the output tokens from `start` on. Cumulative: a lost or repeated correction does no harm."""

    worker: str
    request_id: int
    start: int
    token_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Grow:
    """To a drafter: it may take these steps, in addition to those granted since the last correction.

    Attributes:
        widths: [steps] nodes that each step may expand.
        min_chance: nodes that the target reaches with a smaller chance are not expanded.
        max_read: tokens of the text that each step may read before it drafts.
    """

    worker: str
    request_id: int
    widths: tuple[int, ...]
    min_chance: float = 0.0
    max_read: int = 0


@dataclass(frozen=True, slots=True)
class End:
    """To a worker: free everything that the request holds."""

    worker: str
    request_id: int


@dataclass(frozen=True, slots=True)
class Restart:
    """To the driver: start this worker again, not before `at`; answered by `WorkerStarted`."""

    worker: str
    at: float


@dataclass(frozen=True, slots=True)
class Verify:
    """To the target: one pass over these windows and over those that it has not answered yet.

    Answered by a `Verified` for each window whose prompt has been read, or by `OutOfMemory` or `WorkerDied` for all.
    """

    windows: tuple[Window, ...]


@dataclass(frozen=True, slots=True)
class Wait:
    """To the target: there is nothing to verify before `until`, unless an event comes first; infinity waits for one."""

    until: float


@dataclass(frozen=True, slots=True)
class Emit:
    """To the consumer: committed tokens; for each, the drafter that proposed it, or "", and its log-probabilities.

    `hit` is True when the last token, which is the target's own choice, was in the cache already.
    """

    request_id: int
    token_ids: tuple[int, ...]
    sources: tuple[str, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()
    hit: bool = False


@dataclass(frozen=True, slots=True)
class Finish:
    """To the consumer: the request ended; `error` explains `FinishReason.ERROR`."""

    request_id: int
    reason: FinishReason
    stats: RequestStats
    error: EngineError | None = None


Effect: TypeAlias = Begin | Correct | Grow | End | Restart | Verify | Wait | Emit | Finish
