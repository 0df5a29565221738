"""A timeline as a file for Perfetto (ui.perfetto.dev) and chrome://tracing: the JSON form of their traces."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

from langchain_card.bench.timeline import Timeline, corrections
from langchain_card.core.messages import TARGET

_Event: TypeAlias = dict[str, Any]

_PROCESS = 1
_ANSWER = "answer"


def to_perfetto(timeline: Timeline, decode: Callable[[Sequence[int]], str]) -> dict[str, Any]:
    """One track each for the answer, the target and every drafter; corrections are flows between them.

    Args:
        timeline: of one answer.
        decode: token ids -> text.

    Returns:
        What is to be written as JSON. Times are microseconds since the request was submitted.
    """
    lanes = {name: number for number, name in enumerate((_ANSWER, TARGET, *timeline.sources), 1)}
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
        events.append(block(TARGET, name, done.begin, done.end, round=i, schedule=done.schedule, **facts))
        until = timeline.rounds[i + 1].end if i + 1 < len(timeline.rounds) else timeline.ended
        text = decode(done.token_ids)
        events.append(block(_ANSWER, text, done.end, until, token_ids=done.token_ids, drafted_by=done.sources))
    for step in timeline.drafts:
        name = f"{step.expanded} nodes"
        facts = {"expanded": step.expanded, "published": step.published, "knows_tokens": step.applied_len}
        events.append(block(step.source, name, step.begin, step.end, **facts))
    for number, (done, step) in enumerate(corrections(timeline)):
        flow = {"cat": "correction", "name": "correct", "id": number, "pid": _PROCESS}
        events.append({"ph": "s", "tid": lanes[TARGET], "ts": at(done.end) - 0.001, **flow})
        events.append({"ph": "f", "bp": "e", "tid": lanes[step.source], "ts": at(step.begin) + 0.001, **flow})
    busy = {lane: timeline.busy(lane) for lane in (TARGET, *timeline.sources)}
    about = {"busy": busy, "schedule": timeline.stats.schedule, "tokens": timeline.stats.output_tokens}
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": about}
