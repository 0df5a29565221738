"""Everything that enters and leaves the core. Host numbers only: no tensor ever crosses between workers.

Drafters send `Proposal`s and the target sends `Verdict`s; they reach `Coordinator.handle` inside events. What the
coordinator wants done comes back as effects.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    from langchain_card.core.request import FinishReason, Request, RequestStats

ROOT = -1
"""Parent of a window's first row."""


@dataclass(frozen=True, slots=True)
class Proposal:
    """New candidates of one drafter.

    A drafter numbers its nodes from 0 within an epoch, and raises its epoch when the committed tokens leave its tree.
    Every proposal says which node stands for the last token applied, so that a lost one costs its own nodes only.

    Attributes:
        source: name of the drafter.
        request_id: whose candidates.
        epoch: of the numbering.
        root: number of the node that stands for the last token applied.
        applied_len: output tokens applied.
        first: number of the first node here.
        parents: [n] number of each node's parent, smaller than its own.
        token_ids: [n].
        scores: [n] log of the estimated chance that the target picks the token after its parent.
        expanded: numbers of the nodes whose children are now all published.
        elapsed: seconds of the step, prompt reading left out.
        steps: credits that this answers.
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
    elapsed: float = 0.0
    steps: int = 1


@dataclass(frozen=True, slots=True)
class Window:
    """What the target verifies in one pass.

    Attributes:
        request_id: of the sequence.
        step_id: unique per verification; a verdict must carry it.
        start_position: committed positions before the first row.
        token_ids: [rows]; the first is the last committed token, the others are candidates.
        parents: [rows]; row index of the parent, `ROOT` for the first.
        kept_rows: rows of the previous window that were committed, in order.
    """

    request_id: int
    step_id: int
    start_position: int
    token_ids: tuple[int, ...]
    parents: tuple[int, ...]
    kept_rows: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """The target's log-probabilities where it chose a token: log-softmax of its raw logits.

    Attributes:
        logprob: of the chosen token.
        top: (token id, log-probability) of the likeliest tokens, best first.
    """

    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class Verdict:
    """The target's own token after each row of a window.

    Attributes:
        request_id, step_id: of the window.
        target_ids: [rows].
        elapsed: seconds of the pass, prompt reading left out.
        logprobs: [rows] of the target's tokens; empty when the request wants none.
    """

    request_id: int
    step_id: int
    target_ids: tuple[int, ...]
    elapsed: float = 0.0
    logprobs: tuple[TokenLogprob, ...] = ()


# Events: what happened.


@dataclass(frozen=True, slots=True)
class Submitted:
    """A request arrived."""

    request: Request
    now: float


@dataclass(frozen=True, slots=True)
class Proposed:
    """A drafter published candidates."""

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
    """The consumer wants no more than the first `num_tokens` tokens: a stop string, or it left.

    Attributes:
        num_tokens: tokens of the answer that count; None for all committed so far.
    """

    request_id: int
    reason: FinishReason
    now: float
    num_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class SourceDied:
    """A drafter is gone; its requests go on without it."""

    source: str
    now: float


Event: TypeAlias = Submitted | Proposed | TargetReady | Verified | Stopped | SourceDied


# Effects: what is to be done, in order.


@dataclass(frozen=True, slots=True)
class Begin:
    """To the target and all drafters: a request starts, under this schedule."""

    request: Request
    schedule: str


@dataclass(frozen=True, slots=True)
class Correct:
    """To a drafter: the output tokens from `start` on. Cumulative, so a lost or repeated one does no harm."""

    source: str
    request_id: int
    start: int
    token_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Grow:
    """To a drafter: exactly `steps` more steps may be taken since the last correction."""

    source: str
    request_id: int
    steps: int


@dataclass(frozen=True, slots=True)
class End:
    """To the target and all drafters: the request holds nothing from now on."""

    request_id: int


@dataclass(frozen=True, slots=True)
class Verify:
    """To the target: check these windows in one pass."""

    windows: tuple[Window, ...]


@dataclass(frozen=True, slots=True)
class Wait:
    """Nothing to verify before `until`, unless an event comes first."""

    until: float


@dataclass(frozen=True, slots=True)
class Emit:
    """To the consumer: committed tokens.

    Attributes:
        sources: [n] the drafter that had proposed each token, or "" for the target's own.
        logprobs: [n] of the tokens; empty when the request wants none.
    """

    request_id: int
    token_ids: tuple[int, ...]
    sources: tuple[str, ...] = field(default=())
    logprobs: tuple[TokenLogprob, ...] = ()


@dataclass(frozen=True, slots=True)
class Finish:
    """To the consumer: the request ended."""

    request_id: int
    reason: FinishReason
    stats: RequestStats


Effect: TypeAlias = Begin | Correct | Grow | End | Verify | Wait | Emit | Finish
