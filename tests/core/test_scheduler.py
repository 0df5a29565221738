"""The order in which waiting requests get a seat."""

from __future__ import annotations

from collections.abc import Sequence

from langchain_card.core import messages as m
from langchain_card.core.coordinator import Coordinator
from langchain_card.core.request import FinishReason, Request, SamplingParams
from langchain_card.limits import Limits
from tests.simulation import FixedPolicy


def submit(core: Coordinator, request_id: int, output_ids: tuple[int, ...] = ()) -> None:
    request = Request(request_id, (1, 2), SamplingParams(max_tokens=9), ())
    assert core.handle(m.Submitted(request, 0.0, output_ids)) == []


def waiting(core: Coordinator) -> list[int]:
    return [state.request.request_id for state in core.scheduler.waiting]


def begun(effects: Sequence[m.Effect]) -> list[int]:
    return [effect.request.request_id for effect in effects if isinstance(effect, m.Begin)]


def test_answers_that_go_on_wait_before_requests_that_have_not_begun() -> None:
    """Among themselves, both keep the order in which they came."""
    core = Coordinator([], Limits(max_num_seqs=1), FixedPolicy())
    order = [(0, ()), (1, (5,)), (2, ()), (3, (5, 6)), (4, ()), (5, (5,))]
    for request_id, output_ids in order:
        submit(core, request_id, output_ids)
    assert waiting(core) == [1, 3, 5, 0, 2, 4]
    admitted = list[int]()
    for _ in order:
        effects = core.handle(m.TargetReady(0.0))
        admitted += begun(effects)
        core.handle(m.Stopped(admitted[-1], FinishReason.ABORT, 0.0))
    assert admitted == [1, 3, 5, 0, 2, 4]


def test_a_request_that_was_put_back_waits_before_an_answer_that_came_later() -> None:
    """It has begun, too, although no token of it is written."""
    core = Coordinator([], Limits(max_num_seqs=1), FixedPolicy())
    for request_id in range(2):
        submit(core, request_id)
    assert begun(core.handle(m.TargetReady(0.0))) == [0]
    core.handle(m.WorkerDied(m.TARGET, 0.0, "planted"))
    submit(core, 2, (5,))
    assert waiting(core) == [0, 2, 1]
