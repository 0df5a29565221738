"""Two processes of engines behind a relay: seats, sessions, kinds and what remains when one is lost."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest

from langchain_card.config import EngineConfig
from langchain_card.core.request import FinishReason, RequestStats
from langchain_card.engine.isolated import messages as f
from langchain_card.engine.isolated.process_pool import ProcessPool
from langchain_card.engine.isolated.sites import Site
from langchain_card.engine.relay.messages import Began, Ended
from langchain_card.engine.relay.relay import Relay
from langchain_card.errors import DeviceError, EngineError
from langchain_card.limits import Limits
from langchain_card.runtime.kind import Kind
from langchain_card.serve.health import judge
from tests.support.isolated import Waiting
from tests.support.processes import wait_until
from tests.support.scripted_processes import FAILING, LIVES, Scripted, Time, settle, wrote


@pytest.fixture
def clock() -> Time:
    return Time()


SEATS = Limits(max_num_seqs=2, max_queue=0)
KINDS = (Kind("model", "machine"), Kind("model", "other machine"), Kind("other model", "machine"))


@pytest.fixture
def two(monkeypatch: pytest.MonkeyPatch, clock: Time) -> Iterator[Relay]:
    """Two processes of two seats each; both are up."""
    LIVES.clear()
    FAILING.clear()
    monkeypatch.setattr("langchain_card.engine.isolated.engine_process.start_engine", Scripted)
    monkeypatch.setattr("langchain_card.engine.isolated.process_pool.split", lambda config: [Site((0,)), Site((1,))])
    config = EngineConfig("a", None, replicas=2, limits=Limits(restart_seconds=0.01, max_num_seqs=2, max_queue=0))
    made = Relay(ProcessPool(config, clock), config.limits)
    made.start()
    LIVES[0].say(f.Loaded(SEATS, "auto", KINDS[0]))
    wait_until(lambda: len(LIVES) == 2)
    yield made
    made.close()


def up(relay: Relay, life: int, kind: Kind = KINDS[0]) -> None:
    LIVES[life].say(f.Loaded(SEATS, "auto", kind))
    settle(relay)


def submitted(relay: Relay, *sessions: str) -> list[Waiting]:
    consumers = [Waiting(relay.num_open + number) for number in range(len(sessions))]
    for consumer, session in zip(consumers, sessions, strict=True):
        consumer.request = replace(consumer.request, params=replace(consumer.request.params, session=session))
        relay.submit(consumer)
    settle(relay)
    return consumers


def test_requests_wait_for_a_seat_of_any_process(two: Relay) -> None:
    """A session keeps to its process while that has a seat; no process gets more than its seats."""
    assert two.num_seats == 2
    up(two, 1)
    assert two.num_seats == 4
    submitted(two, *["same"] * 6)
    sent = [len(life.requests) for life in LIVES]
    assert sent == [2, 2]
    number = LIVES[1].requests[0][0]
    LIVES[1].say(Ended(number, FinishReason.STOP, RequestStats()))
    settle(two)
    assert [len(life.requests) for life in LIVES] == [2, 3] and two.num_open == 5


def test_a_session_keeps_to_its_process(two: Relay) -> None:
    up(two, 1)
    places = []
    for _ in range(6):
        consumers = submitted(two, "a", "b")
        for life in LIVES:
            places.append([number for number, _ in life.requests])
            for number in places[-1]:
                life.say(Ended(number, FinishReason.STOP, RequestStats()))
        settle(two)
        assert all(consumer.ends for consumer in consumers)
    counts = [len(life.requests) for life in LIVES]
    assert sum(counts) == 12 and {*counts} <= {0, 6, 12}


def test_answers_go_on_before_those_that_have_not_begun(two: Relay) -> None:
    """Also where the queue is full: they were taken already."""
    up(two, 1)
    consumers = submitted(two, *["s"] * 5)
    for number, _ in LIVES[0].requests:
        LIVES[0].say(Began(number))
        LIVES[0].say(wrote(number, 5))
    settle(two)
    LIVES[0].die()
    settle(two)
    for number, _ in LIVES[1].requests:
        LIVES[1].say(Ended(number, FinishReason.STOP, RequestStats()))
    settle(two)
    assert [output_ids for _, output_ids in LIVES[1].requests] == [(), (), (5,), (5,)]
    assert sum(bool(consumer.ends) for consumer in consumers) == 2


@pytest.mark.parametrize("kind", KINDS)
def test_another_model_never_goes_on(two: Relay, kind: Kind) -> None:
    """Another machine does."""
    (consumer,) = submitted(two, "")
    LIVES[0].say(wrote(LIVES[0].requests[0][0], 5))
    settle(two)
    up(two, 1, kind)
    LIVES[0].die()
    wait_until(lambda: len(LIVES) == 3)
    LIVES[2].say(f.Loaded(SEATS, "auto", kind))
    settle(two)
    went_on = [life.requests for life in LIVES[1:] if life.requests]
    if kind is KINDS[2]:
        assert not went_on and "is another one now than the one that began this answer" in str(consumer.ends[0])
    else:
        assert [[output_ids for _, output_ids in each] for each in went_on] == [[(5,)]] and not consumer.ends


def test_a_second_process_that_cannot_load_leaves_the_first(two: Relay) -> None:
    LIVES[1].die(DeviceError("device", "cpu", "no room"))
    (consumer,) = submitted(two, "s")
    assert LIVES[0].requests and not consumer.ends and two.num_seats == 2
    assert {name: health.state for name, health in two.health().items()} == {
        "engine process 1": "up", "engine process 2": "given up"
    }  # fmt: skip
    assert judge(two.health()) == "degraded"
    LIVES[0].die()
    wait_until(lambda: len(LIVES) == 3)
    assert judge(two.health()) == "failing"
    up(two, 2)
    assert LIVES[2].requests and not consumer.ends


def test_a_second_process_that_cannot_be_started_leaves_the_first(monkeypatch: pytest.MonkeyPatch, clock: Time) -> None:
    LIVES.clear()
    FAILING.clear()
    monkeypatch.setattr("langchain_card.engine.isolated.engine_process.start_engine", Scripted)
    monkeypatch.setattr("langchain_card.engine.isolated.process_pool.split", lambda config: [Site((0,)), Site((1,))])
    config = EngineConfig("a", None, replicas=2)
    relay = Relay(ProcessPool(config, clock), config.limits)
    relay.start()
    FAILING.append(EngineError("engine process", "python", "could not be started (no memory)"))
    LIVES[0].say(f.Loaded(SEATS, "auto", KINDS[0]))
    (consumer,) = submitted(relay, "s")
    assert LIVES[0].requests and not FAILING and not consumer.ends
    relay.close()
