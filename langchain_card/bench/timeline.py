"""What draft and target did while an answer was written: put together from the messages of the protocol."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from langchain_card.config import Schedule
from langchain_card.core import messages as m
from langchain_card.core.request import FinishReason, RequestStats


@dataclass(frozen=True, slots=True)
class Round:
    """A pass of the target over a window of the answer.

    Attributes:
        begin, end: in seconds of the engine's clock; of a pass that requests share, as long as this one's share.
        rows: of the window.
        read: tokens of a prompt that the pass read.
        token_ids: what was committed; the last one is the target's own.
        sources: of each the drafter that had proposed it, or "".
        hit: whether the last one is in the cache already, so that the draft goes on where it is; None at the end.
        schedule: in force.
    """

    begin: float
    end: float
    rows: int
    read: int
    token_ids: tuple[int, ...]
    sources: tuple[str, ...]
    hit: bool | None
    schedule: Schedule


@dataclass(frozen=True, slots=True)
class Draft:
    """A step of a drafter that took time.

    Attributes:
        source: the drafter.
        begin, end: in seconds of the engine's clock; of a step that requests share, as long as this one's share.
        expanded: nodes that it forwarded, for this answer.
        published: candidates that came of it.
        applied_len: tokens of the answer that it knew of.
    """

    source: str
    begin: float
    end: float
    expanded: int
    published: int
    applied_len: int


@dataclass(slots=True)
class Timeline:
    """One answer.

    Attributes:
        request_id: of its request.
        submitted, first_token, ended: in seconds of the engine's clock.
        rounds, drafts: in order of their ends.
        reason: why it ended.
        stats: as the engine counted.
    """

    request_id: int
    submitted: float = 0.0
    first_token: float = math.nan
    ended: float = math.nan
    rounds: list[Round] = field(default_factory=list)
    drafts: list[Draft] = field(default_factory=list)
    reason: FinishReason | None = None
    stats: RequestStats = field(default_factory=RequestStats)

    @property
    def sources(self) -> list[str]:
        """Drafters whose steps took time."""
        return sorted({draft.source for draft in self.drafts})

    def busy(self, lane: str) -> float:
        """Share of the time between first and last token that the target, or a drafter, was at work."""
        steps: Sequence[Round | Draft] = self.rounds
        if lane != m.TARGET:
            steps = [draft for draft in self.drafts if draft.source == lane]
        spent = sum(max(0.0, min(step.end, self.ended) - max(step.begin, self.first_token)) for step in steps)
        return spent / (self.ended - self.first_token) if self.ended > self.first_token else 0.0


class Tracer:
    """An `Observer` that draws up the timelines of all requests.

    Attributes:
        timelines: by request id, those that have ended among them.
    """

    def __init__(self) -> None:
        self.timelines: dict[int, Timeline] = {}
        self._windows: dict[int, m.Window] = {}

    def __call__(self, event: m.Event, effects: Sequence[m.Effect]) -> None:
        """Takes in what happened."""
        match event:
            case m.Submitted(request, now):
                self.timelines[request.request_id] = Timeline(request.request_id, submitted=now)
            case m.Proposed(proposal, now) if proposal.forwarded:
                self._draft(proposal, now)
            case m.Verified(verdict, now):
                self._round(verdict, now, effects)
        for effect in effects:
            match effect:
                case m.Verify(windows):
                    self._windows.update((window.request_id, window) for window in windows)
                case m.Finish(request_id, reason, stats) if request_id in self.timelines:
                    timeline = self.timelines[request_id]
                    timeline.reason, timeline.stats, timeline.ended = reason, stats, stats.ended

    def _draft(self, p: m.Proposal, now: float) -> None:
        timeline = self.timelines.get(p.request_id)
        if timeline is None or timeline.reason is not None:
            return  # a step that ends after the answer is not its own
        step = Draft(p.source, now - p.elapsed, now, p.forwarded, len(p.token_ids), p.applied_len)
        timeline.drafts.append(step)

    def _round(self, verdict: m.Verdict, now: float, effects: Sequence[m.Effect]) -> None:
        window = self._windows.pop(verdict.request_id, None)
        emitted = [e for e in effects if isinstance(e, m.Emit) and e.request_id == verdict.request_id]
        if window is None or window.step_id != verdict.step_id or not emitted:
            return
        timeline, (emit,) = self.timelines[verdict.request_id], emitted
        if not timeline.rounds:
            timeline.first_token = now
        rows = len(window.token_ids)
        took = verdict.elapsed / rows * (rows + verdict.read) if verdict.together == 1 else verdict.elapsed
        is_last = any(isinstance(e, m.Finish) and e.request_id == verdict.request_id for e in effects)
        hit = None if is_last else emit.hit
        timeline.rounds.append(
            Round(now - took, now, rows, verdict.read, emit.token_ids, emit.sources, hit, window.schedule)
        )


def corrections(timeline: Timeline) -> list[tuple[Round, Draft]]:
    """For each round and drafter the first step that knew what the round had committed, where there was one."""
    found, known = list[tuple[Round, Draft]](), 0
    for done in timeline.rounds:
        known += len(done.token_ids)
        for source in timeline.sources:
            steps = (step for step in timeline.drafts if step.source == source)
            first = next((step for step in steps if step.applied_len >= known), None)
            if first is not None and first.applied_len == known:  # else it heard of two rounds at once
                found.append((done, first))
    return found
