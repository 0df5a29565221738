"""The core when things go wrong: refusals, deaths, want of memory, hostile drafters."""

from __future__ import annotations

import math
from dataclasses import replace

from langchain_card.core import messages as m
from langchain_card.core.controller import Controller
from langchain_card.core.coordinator import Coordinator
from langchain_card.core.drafter_state import is_valid
from langchain_card.core.query import DrafterTraits
from langchain_card.core.request import FinishReason, Request, SamplingParams
from langchain_card.limits import Limits
from tests.support.rounds import coordinator, run_round


def test_a_full_queue_and_a_draining_engine_refuse() -> None:
    core = coordinator(max_queue=1)
    params = SamplingParams(max_tokens=4)
    assert core.handle(m.Submitted(Request(0, (1, 2), params), 0.0)) == []
    assert core.handle(m.Submitted(Request(3, (1, 2), params), 0.0)) == [], "the first will not wait"
    (refused,) = core.handle(m.Submitted(Request(1, (1, 2), params), 0.0))
    assert (
        isinstance(refused, m.Finish) and refused.reason is FinishReason.ERROR and "max_queue = 1" in str(refused.error)
    )
    core.handle(m.TargetReady(0.0))
    core.handle(m.Draining(0.0))
    (refused,) = core.handle(m.Submitted(Request(2, (1, 2), params), 0.0))
    assert isinstance(refused, m.Finish) and "draining" in str(refused.error)
    assert list(core.scheduler.running) == [0], "what was taken goes on"


def test_a_worker_that_dies_too_often_is_given_up() -> None:
    core = coordinator(max_deaths=2, restart_seconds=0.5)
    core.handle(m.Submitted(Request(0, (1, 2), SamplingParams(max_tokens=9)), 0.0))
    restarts = []
    for now in (1.0, 2.0, 3.0):
        restarts += [e.at for e in core.handle(m.WorkerDied("toy", now)) if isinstance(e, m.Restart)]
        core.handle(m.WorkerStarted("toy", now + 0.9)) if len(restarts) else None
        assert core.handle(m.WorkerDied("nobody", now)) == []
    assert restarts == [1.5, 3.0], "half a second, then one, then no more"
    assert isinstance(core.handle(m.TargetReady(9.0))[-1], m.Verify), "the request goes on without it"


def test_a_request_that_kills_the_target_fails_alone() -> None:
    core = coordinator(max_num_seqs=2)
    for i in range(2):
        core.handle(m.Submitted(Request(i, (1, 2), SamplingParams(max_tokens=9)), 0.0))
    verify = core.handle(m.TargetReady(0.0))[-1]
    assert isinstance(verify, m.Verify) and len(verify.windows) == 2
    assert core.handle(m.WorkerDied(m.TARGET, 0.0))[0] == m.Restart(m.TARGET, 0.1)
    assert core.handle(m.TargetReady(0.05)) == [m.Wait(math.inf)], "there is no target"
    core.handle(m.WorkerStarted(m.TARGET, 0.1))
    verify = core.handle(m.TargetReady(0.1))[-1]
    assert isinstance(verify, m.Verify) and [w.request_id for w in verify.windows] == [0], "one at a time"
    finish = core.handle(m.WorkerDied(m.TARGET, 0.2))[-1]
    assert (
        isinstance(finish, m.Finish)
        and finish.request_id == 0
        and "the target failed with it (it gave none)" in str(finish.error)
    )
    core.handle(m.WorkerStarted(m.TARGET, 0.3))
    verify = core.handle(m.TargetReady(0.3))[-1]
    assert isinstance(verify, m.Verify) and verify.windows[0].request_id == 1
    core.handle(m.Verified(m.Verdict(1, verify.windows[0].step_id, (7,), 0.1), 0.4))
    assert core.scheduler.running[1].failures == 0


def test_out_of_memory_puts_the_youngest_back_and_fails_one_alone() -> None:
    core = coordinator(max_num_seqs=2)
    for i in range(2):
        core.handle(m.Submitted(Request(i, (1, 2), SamplingParams(max_tokens=9)), 0.0))
    core.handle(m.TargetReady(0.0))
    core.handle(m.OutOfMemory(m.TARGET, (0, 1), 0.0))
    assert list(core.scheduler.running) == [0] and core.scheduler.capacity == 1
    for _ in range(2):
        verify = core.handle(m.TargetReady(0.1))[-1]
        assert isinstance(verify, m.Verify) and len(verify.windows[0].token_ids) == 1
        effects = core.handle(m.OutOfMemory(m.TARGET, (0,), 0.1))
    assert isinstance(effects[-1], m.Finish) and "out of memory" in str(effects[-1].error)
    core.handle(m.TargetReady(0.2))
    assert list(core.scheduler.running) == [1] and core.scheduler.capacity == 2


GOOD = m.Proposal("toy", 0, 0, 0, 1, 1, (0,), (7,), (-0.1,), (0,))


def test_stale_proposals_change_nothing() -> None:
    """One of another incarnation, request, drafter or vocabulary, or about tokens that were never committed."""
    core = Coordinator([DrafterTraits("toy", False)], Limits(), Controller(shared_device=True), vocab_size=50)
    core.handle(m.Submitted(Request(0, (1, 2), SamplingParams(max_tokens=9)), 0.0))
    run_round(core, [5], 0.0)
    drafter = core.scheduler.running[0].drafters["toy"]
    good = replace(GOOD, incarnation=drafter.incarnation)
    bad = [{"incarnation": 0}, {"applied_len": 2}, {"request_id": 9}, {"source": "other"}, {"token_ids": (50,)}]
    for fields in bad:
        core.handle(m.Proposed(replace(good, **fields), 0.0))  # type: ignore[arg-type]
        assert drafter.lead(core.scheduler.running[0].tree) == 0 and drafter.granted == 1
    assert core.stale == len(bad)
    core.handle(m.Proposed(good, 0.0))
    core.handle(m.Proposed(good, 0.0))
    assert drafter.lead(core.scheduler.running[0].tree) == 1 and core.stale == len(bad) + 1, "the second is a repeat"


def test_malformed_proposals_are_not_valid() -> None:
    """They end where a drafter's code returns them: in its worker, or in the level above it."""
    bad = [
        {"root": -1}, {"root": 5}, {"applied_len": -1}, {"first": 0}, {"first": 10**9}, {"parents": (1,)},
        {"parents": (-1,)}, {"parents": ()}, {"scores": ()}, {"expanded": (2,)}, {"expanded": (-1,)},
        {"token_ids": (-1,)}, {"scores": (1.0,)}, {"scores": (math.nan,)}, {"scores": ("no",)}, {"token_ids": (7.5,)},
        {"parents": (0.0,)}, {"epoch": "0"}, {"layers": 0}, {"layers": 1.5}, {"elapsed": -1.0}, {"elapsed": 1e12},
        {"elapsed": math.inf}, {"elapsed": math.nan}, {"elapsed": None}, {"forwarded": -1}, {"forwarded": 1},
        {"reading": -1.0}, {"read": -5}, {"read": 10**400}, {"unread": None}, {"unread": "x"},
        {"expanded": (None,)}, {"parents": [0]}, {"request_id": [1]}, {"source": None},
    ]  # fmt: skip
    assert is_valid(GOOD)
    for fields in bad:
        assert not is_valid(replace(GOOD, **fields)), fields  # type: ignore[arg-type]


def test_a_request_that_kills_the_target_does_not_use_up_its_lives() -> None:
    """Though its deaths are as many as are borne: they are forgiven when it is gone."""
    core = Coordinator((), Limits(max_num_seqs=1, max_failures=6, max_deaths=5), Controller(shared_device=True))
    for i in range(2):
        core.handle(m.Submitted(Request(i, (1, 2), SamplingParams(max_tokens=2), ()), 0.0))
    ends = []
    for _ in range(6):
        core.handle(m.TargetReady(0.0))
        ends += [e.request_id for e in core.handle(m.WorkerDied(m.TARGET, 0.0)) if isinstance(e, m.Finish)]
        core.handle(m.WorkerStarted(m.TARGET, 0.0))
    assert ends == [0] and m.TARGET in core.workers
    run_round(core, [5], 0.0)
    assert core.scheduler.running[1].output_ids == [5]
