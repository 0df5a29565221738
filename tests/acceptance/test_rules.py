"""Rules of acceptance are plug-ins: what one says wrongly ends one answer and harms no other."""

from __future__ import annotations

from typing import Any

import pytest

from langchain_card.core import messages as m
from langchain_card.core.controller import Controller
from langchain_card.core.coordinator import Coordinator
from langchain_card.core.query import DrafterTraits
from langchain_card.core.request import FinishReason, Request, SamplingParams
from langchain_card.core.walk import ExactRule
from langchain_card.limits import Limits

OWN, DRAFTED = (11, 12, 13), (11, 99)  # what the target chooses, and what stands in the window


class Scripted(ExactRule):
    """Answers the first request as it is told, once there are candidates, and the others exactly."""

    name = "scripted"

    def __init__(self, said: Any, *, lossy: bool = True) -> None:
        super().__init__()
        self.said, self.lossy = said, lossy

    def is_exact(self, request: Request) -> bool:
        return not self.lossy

    def walk(self, window: m.Window, verdict: m.Verdict, request: Request) -> Any:
        if request.request_id or len(window.token_ids) == 1:
            return super().walk(window, verdict, request)
        assert (window.token_ids, window.parents) == ((10, *DRAFTED), (m.ROOT, 0, 1))
        if isinstance(self.said, Exception):
            raise self.said
        return self.said


def second_round(rule: ExactRule) -> tuple[list[m.Effect], list[m.Effect], Coordinator]:
    """What comes of two requests' second windows; the target chooses `OWN` in both."""
    core = Coordinator([DrafterTraits("toy", False)], Limits(max_num_seqs=2), Controller(shared_device=True), rule=rule)
    for i in range(2):
        core.handle(m.Submitted(Request(i, (1, 2), SamplingParams(max_tokens=9)), 0.0))
    for ids, now in (((10, 0, 0), 0.0), (OWN, 1.0)):
        verify = next(e for e in core.handle(m.TargetReady(now)) if isinstance(e, m.Verify))
        heard = [
            core.handle(m.Verified(m.Verdict(w.request_id, w.step_id, ids[: len(w.token_ids)], 0.1), now))
            for w in verify.windows
        ]
        for i in range(2 if now == 0.0 else 0):
            again = core.scheduler.running[i].drafters["toy"].incarnation
            chain = m.Proposal("toy", i, 0, 0, 1, 1, (0, 1), DRAFTED, (-0.1, -0.1), incarnation=again)
            core.handle(m.Proposed(chain, 0.0))
    return heard[0], heard[1], core


WRONG: dict[str, Any] = {
    "raises": RuntimeError("oh"),
    "nothing": None,
    "no rows": ([], []),
    "not from the first": ([1], [12]),
    "not below one another": ([0, 2], [99, 13]),
    "from behind": ([0, -2], [11, 12]),
    "no such row": ([0, 1, 2, 3], [11, 99, 13, 14]),
    "too many tokens": ([0, 1], [11, 12, 13]),
    "too few tokens": ([0, 1], [11]),
    "nobody's token": ([0, 1], [11, 77]),
}


@pytest.mark.parametrize("said", WRONG.values(), ids=WRONG)
def test_a_rule_that_goes_wrong_ends_that_answer_alone(said: Any) -> None:
    (*_, finish), (emit, *_), core = second_round(Scripted(said))
    assert isinstance(finish, m.Finish) and finish.reason is FinishReason.ERROR and "'scripted'" in str(finish.error)
    assert finish.stats.output_tokens == 1, "nothing of it counts"
    assert isinstance(emit, m.Emit) and emit.token_ids == (11, 12) and list(core.scheduler.running) == [1]
    assert any(isinstance(effect, m.Verify) for effect in core.handle(m.TargetReady(2.0)))


@pytest.mark.parametrize("lossy", [False, True])
def test_only_a_lossy_rule_passes_the_target_by(lossy: bool) -> None:
    (first, *_), _, core = second_round(Scripted(([0, 1, 2], [11, 99, 13]), lossy=lossy))
    assert isinstance(first, m.Emit) is lossy and (0 in core.scheduler.running) is lossy
    if lossy:
        stats = core.scheduler.running[0].stats
        assert stats.lossy and stats.rescued == 1
