"""How commands reach a drafter: in order, few when it stalls, and on the right thread."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from dataclasses import replace

import pytest

from langchain_card.core import messages as m
from langchain_card.core.candidates import CandidateTree
from langchain_card.core.drafter_state import DrafterState
from langchain_card.core.request import Request, SamplingParams
from langchain_card.engine.draft_worker import DraftWorker
from langchain_card.engine.transports import thread
from langchain_card.engine.transports.thread import Mailbox, ThreadTransport
from langchain_card.limits import Limits
from langchain_card.ports import Budget, DraftCommand
from tests.simulation import ToyDrafter, ToyModel
from tests.simulation.sleeping import SleepingEngine

PROMPT = (1, 2)


def begin(request_id: int, schedule: str = "parallel") -> m.Begin:
    return m.Begin("toy", Request(request_id, PROMPT, SamplingParams(max_tokens=50)), schedule)


def test_a_stalled_worker_has_few_commands_to_catch_up_on() -> None:
    """A correction stands for those before it; other requests' commands and the order stay."""
    mailbox = Mailbox()
    for command in (begin(0), begin(1), m.Grow("toy", 1, (1,))):
        mailbox.put(command)
    for length in range(1, 2000):
        mailbox.put(m.Correct("toy", 0, 0, (7,) * length))
        mailbox.put(m.Grow("toy", 0, (1, 1)))
    taken = [mailbox.take(wait=False) for _ in range(len(mailbox))]
    assert taken == [
        begin(0),
        begin(1),
        m.Grow("toy", 1, (1,)),
        m.Correct("toy", 0, 0, (7,) * 1999),
        m.Grow("toy", 0, (1, 1)),
    ]
    assert mailbox.take(wait=False) is None


def test_a_request_that_came_and_went_is_never_heard_of() -> None:
    mailbox = Mailbox()
    commands = [m.End("toy", 0), begin(0), m.Correct("toy", 0, 0, (7,)), m.Grow("toy", 0, (1,)), begin(1)]
    for command in commands:
        mailbox.put(command)
    mailbox.put(m.End("toy", 0))
    assert [mailbox.take(wait=False) for _ in range(len(mailbox))] == [m.End("toy", 0), begin(1)]


class Watched(ToyDrafter):
    """Notes on which thread each request's steps are taken."""

    def __init__(self) -> None:
        super().__init__(ToyModel(200, top=1.0))
        self.steps: list[tuple[int, str]] = []

    def step(self, budgets: Sequence[Budget]) -> list[m.Proposal]:
        time.sleep(0.002)
        self.steps += [(budget.request_id, threading.current_thread().name) for budget in budgets]
        return super().step(budgets)


def test_a_sequential_request_does_not_take_the_steps_of_a_parallel_one() -> None:
    drafter = Watched()
    worker = DraftWorker(drafter, lambda proposal: None, lambda request_ids: None)
    transport = ThreadTransport(worker, name="draft", on_death=lambda error: None)
    transport.send(begin(0))
    transport.send(begin(1, "sequential"))
    transport.send(m.Grow("toy", 0, (1,) * 40))
    for _ in range(10):
        transport.send(m.Grow("toy", 1, (1,)))
        transport.work()
    while len(drafter.steps) < 50:
        time.sleep(0.001)
    transport.close()
    here = threading.current_thread().name
    assert drafter.steps.count((0, "card-draft")) == 40 and drafter.steps.count((1, here)) == 10


def test_two_schedules_at_once_give_both_answers() -> None:
    model = ToyModel(200, top=0.8)
    with SleepingEngine(model, lambda rows: 0.004, lambda rows: 0.001, Limits(max_num_seqs=2)) as engine:
        open_ = [
            engine.submit(PROMPT, max_tokens=60, schedule=schedule) for schedule in ("parallel", "sequential", "plain")
        ]
        for generation in open_:
            assert generation.result().token_ids == model.answer(PROMPT, 60)


def test_a_request_may_change_between_the_schedules() -> None:
    drafter = Watched()
    worker = DraftWorker(drafter, lambda proposal: None, lambda request_ids: None)
    transport = ThreadTransport(worker, name="draft", on_death=lambda error: None)
    here = threading.current_thread().name
    for count in range(1, 101):
        transport.send(begin(0))
        transport.send(m.Grow("toy", 0, (1,) * 4))
        time.sleep(0.0005 * (count % 8))  # the thread is anywhere between two steps
        transport.send(m.End("toy", 0))
        transport.send(begin(0, "sequential"))
        transport.send(m.Grow("toy", 0, (1,)))
        transport.work()
        assert worker.begun[0].schedule == "sequential", "what was under way has ended the new life"
        assert drafter.steps.count((0, here)) == count
        transport.send(m.End("toy", 0))
    transport.close()


def test_what_is_dropped_is_not_half_applied() -> None:
    mailbox, applied, may_end = Mailbox(), list[str](), threading.Event()

    def apply(command: DraftCommand) -> None:
        applied.append("begins")
        may_end.wait(5)
        applied.append("ends")

    mailbox.put(m.End("toy", 0))
    mailbox.put(m.End("toy", 1))
    applying = threading.Thread(target=mailbox.hand, args=(apply,), kwargs={"wait": False})
    applying.start()
    while not applied:
        time.sleep(0.001)
    threading.Timer(0.05, may_end.set).start()
    mailbox.drop(0)
    assert applied == ["begins", "ends"]
    assert mailbox.take(wait=False) == m.End("toy", 1)
    applying.join()


def test_room_is_freed_before_another_takes_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """An end that waits for the thread is applied before a request begins whose steps are taken elsewhere."""
    reads = threading.Event()
    monkeypatch.setattr(thread, "work", lambda *_, **__: reads.wait())
    worker = DraftWorker(Watched(), lambda proposal: None, lambda request_ids: None)
    transport = ThreadTransport(worker, name="toy", on_death=lambda error: None)
    worker.handle(begin(1))
    worker.handle(begin(2))
    transport.send(m.Correct("toy", 2, 0, (5,)))
    transport.send(m.End("toy", 1))
    assert worker.begun.keys() == {1, 2}, "the thread is busy"
    transport.send(begin(3, "sequential"))
    assert worker.begun.keys() == {2, 3}
    assert transport._mailbox.take(wait=False) == m.Correct("toy", 2, 0, (5,)), "all else waits"
    reads.set()
    transport.close()


class Mumbling(Watched):
    """What it says of request 0 cannot be read or makes no sense, 1 has no answer, 7 is nobody's."""

    def step(self, budgets: Sequence[Budget]) -> list[m.Proposal]:
        odd = m.Proposal("toy", 0, 0, 0, 3, 1, (0,), ("x",), (-0.1,))  # type: ignore[arg-type]
        sure = replace(odd, token_ids=(5,), scores=(0.4,))
        return [None, odd, sure, replace(sure, request_id=7, scores=(-0.4,))]  # type: ignore[list-item]


def test_who_waits_for_a_step_hears_that_it_brought_nothing(caplog: pytest.LogCaptureFixture) -> None:
    heard = list[m.Proposal]()
    worker = DraftWorker(Mumbling(), heard.append, lambda request_ids: None)
    for request_id in (0, 1):
        worker.handle(begin(request_id))
        worker.handle(m.Correct("toy", request_id, 0, (5, 6, 7)))
        worker.handle(m.Grow("toy", request_id, (1, 1)))
    assert worker.step() and not worker.step(), "what cannot grow is not asked again before the next correction"
    said = [(each.request_id, each.applied_len, each.token_ids) for each in heard]
    assert said == [(0, 3, ()), (1, 3, ())] and not worker.granted[0] and worker.granted.keys() == {0, 1}
    assert [record.getMessage()[:45] for record in caplog.records] == ["drafter 'toy' returned unusable proposals, or"]
    worker.handle(m.Correct("toy", 1, 5, (10, 11)))  # the one before it was lost
    worker.handle(m.Correct("toy", 1, 1, (6,)))  # late
    worker.handle(m.Grow("toy", 1, (1,)))
    assert worker.step() and heard[-1].applied_len == 3, "what did not arrive is not said to have been applied"
    source, tree = DrafterState(), CandidateTree(2)
    for token in (5, 6, 7):
        tree.advance(token)
    assert not any(source.admit(each, tree, 200) for each in heard) and source.applied_len == 0, "it is made up"
