"""Timelines of answers: what draft and target did and when, from the protocol's messages; and their Perfetto form."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from langchain_card.config import Schedule
from langchain_card.core import messages as m
from langchain_card.core.request import FinishReason, RequestStats

_Event: TypeAlias = dict[str, Any]

_PROCESS = 1
_ANSWER = "answer"


@dataclass(frozen=True, slots=True)
class Round:
    """A pass of the target over a window of the answer.

    Attributes:
        begin, end: in seconds of the engine's clock. Of a pass that requests share, only this request's share.
        rows: of the window.
        read: prompt tokens that the pass read.
        token_ids: committed tokens. The last one is the target's own.
        sources: drafter that proposed each token, or "".
        hit: True if the last token was in the cache, so that the draft continues below it; None in the last round.
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
        source: name of the drafter.
        begin, end: in seconds of the engine's clock. Of a step that requests share, only this request's share.
        expanded: nodes forwarded for this answer.
        published: candidates proposed.
        applied_len: committed tokens of the answer that the drafter knew.
    """

    source: str
    begin: float
    end: float
    expanded: int
    published: int
    applied_len: int


@dataclass(slots=True)
class Timeline:
    """The timeline of one answer.

    Attributes:
        request_id: of its request.
        submitted, first_token, ended: in seconds of the engine's clock.
        rounds, drafts: in the order in which they ended.
        reason: for the end of the answer.
        stats: the engine's statistics.
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
        """Names of the drafters whose steps took time."""
        return sorted({draft.source for draft in self.drafts})

    def busy(self, lane: str) -> float:
        """Return the share of the time between first and last token in which the target, or a drafter, worked."""
        steps: Sequence[Round | Draft] = self.rounds
        if lane != m.TARGET:
            steps = [draft for draft in self.drafts if draft.source == lane]
        spent = sum(max(0.0, min(step.end, self.ended) - max(step.begin, self.first_token)) for step in steps)
        return spent / (self.ended - self.first_token) if self.ended > self.first_token else 0.0


class Tracer:
    """An `Observer` that records the timelines of all requests.

    Attributes:
        timelines: by request id, including requests that have ended.
    """

    def __init__(self) -> None:
        self.timelines: dict[int, Timeline] = {}
        self._windows: dict[int, m.Window] = {}

    def __call__(self, event: m.Event, effects: Sequence[m.Effect]) -> None:
        """Record one event and its effects."""
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
            return  # the step ended after the answer
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
    """Return each round with the first step of each drafter that knew what the round had committed, if there is one."""
    pairs, known = list[tuple[Round, Draft]](), 0
    for done in timeline.rounds:
        known += len(done.token_ids)
        for source in timeline.sources:
            steps = (step for step in timeline.drafts if step.source == source)
            first = next((step for step in steps if step.applied_len >= known), None)
            if first is not None and first.applied_len == known:  # else it received two rounds at once
                pairs.append((done, first))
    return pairs


def to_perfetto(timeline: Timeline, decode: Callable[[Sequence[int]], str]) -> dict[str, Any]:
    """Return a timeline in the JSON trace format of Perfetto (ui.perfetto.dev) and chrome://tracing.

    The answer, the target and each drafter have a track. Corrections are flows between the tracks. Times are
    microseconds since the request was submitted.

    Args:
        timeline: of one answer.
        decode: turns token ids into text.
    """
    lanes = {name: number for number, name in enumerate((_ANSWER, m.TARGET, *timeline.sources), 1)}
    events = [
        {"ph": "M", "pid": _PROCESS, "tid": lane, "name": "thread_name", "args": {"name": name}}
        for name, lane in lanes.items()
    ]

    def at(seconds: float) -> float:
        return round(1e6 * (seconds - timeline.submitted), 3)

    def block(lane: str, name: str, begin: float, end: float, **args: Any) -> _Event:
        known = {"pid": _PROCESS, "tid": lanes[lane], "ts": at(begin), "dur": round(1e6 * (end - begin), 3)}
        return {"ph": "X", "name": name, **known, "args": args}

    for i, done in enumerate(timeline.rounds):
        outcome = "plain" if done.schedule == "plain" else {None: "end", True: "hit", False: "miss"}[done.hit]
        name = f"{done.rows} rows, {len(done.token_ids)} tokens, {outcome}"
        facts = {"rows": done.rows, "read": done.read, "tokens": len(done.token_ids), "then": outcome}
        events.append(block(m.TARGET, name, done.begin, done.end, round=i, schedule=done.schedule, **facts))
        until = timeline.rounds[i + 1].end if i + 1 < len(timeline.rounds) else timeline.ended
        text = decode(done.token_ids)
        events.append(block(_ANSWER, text, done.end, until, token_ids=done.token_ids, drafted_by=done.sources))
    for step in timeline.drafts:
        name = f"{step.expanded} nodes"
        facts = {"expanded": step.expanded, "published": step.published, "knows_tokens": step.applied_len}
        events.append(block(step.source, name, step.begin, step.end, **facts))
    for number, (done, step) in enumerate(corrections(timeline)):
        flow = {"cat": "correction", "name": "correct", "id": number, "pid": _PROCESS}
        events.append({"ph": "s", "tid": lanes[m.TARGET], "ts": at(done.end) - 0.001, **flow})
        events.append({"ph": "f", "bp": "e", "tid": lanes[step.source], "ts": at(step.begin) + 0.001, **flow})
    busy = {lane: timeline.busy(lane) for lane in (m.TARGET, *timeline.sources)}
    about = {"busy": busy, "schedule": timeline.stats.schedule, "tokens": timeline.stats.output_tokens}
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": about}
