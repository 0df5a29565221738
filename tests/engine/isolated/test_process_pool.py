"""Orders of events around an isolated engine that a real process takes too rarely."""

from __future__ import annotations

import logging
import re
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from langchain_card.config import EngineConfig
from langchain_card.core.messages import Reading
from langchain_card.core.request import FinishReason, Request, RequestStats, SamplingParams
from langchain_card.engine.engine import Engine
from langchain_card.engine.isolated import main as child
from langchain_card.engine.isolated import messages as f
from langchain_card.engine.isolated.engine_process import ROOM_SECONDS
from langchain_card.engine.isolated.process_pool import ProcessPool
from langchain_card.engine.liveness import GRACE_SECONDS
from langchain_card.engine.relay.messages import Began, Committed, Ended, Submit
from langchain_card.engine.relay.relay import Relay
from langchain_card.errors import DeviceError, EngineClosedError, EngineError, InvalidInputError
from langchain_card.limits import Limits
from langchain_card.ports import Health
from tests.support import tiny
from tests.support.isolated import Waiting
from tests.support.processes import wait_until
from tests.support.scripted_processes import FAILING, KIND, LIVES, Scripted, Time, check, die, settle, wrote

SHOWN = list[str]()


class Shown:
    """A progress that keeps its stages."""

    def update(self, stage: str, done: int, total: int) -> None:
        SHOWN.append(stage)


@pytest.fixture
def clock() -> Time:
    return Time()


@pytest.fixture
def relay(monkeypatch: pytest.MonkeyPatch, clock: Time) -> Iterator[Relay]:
    LIVES.clear()
    FAILING.clear()
    monkeypatch.setattr("langchain_card.engine.isolated.engine_process.start_engine", Scripted)
    SHOWN.clear()
    config = EngineConfig("a", None, limits=Limits(restart_seconds=0.01))
    made = Relay(pool := ProcessPool(config, clock, Shown()), config.limits)
    made.start()
    for stage in ("load a", "compile kernels"):
        LIVES[0].say(f.LoadStep(stage))
    LIVES[0].say(f.Loaded(Limits(), "auto", KIND))
    pool.wait_ready()
    yield made
    made.close()


def test_the_first_process_shows_how_it_loads(relay: Relay) -> None:
    assert SHOWN == ["load a", "compile kernels"]
    die(0).say(f.LoadStep("load a"))
    settle(relay)
    assert len(SHOWN) == 2, "later ones load where no bar is drawn any more"


def test_each_process_gets_a_request_once(relay: Relay) -> None:
    LIVES[0].die()
    wait_until(lambda: len(LIVES) == 2)
    held = threading.Event()
    relay._do(held.wait, 10)
    LIVES[1].say(f.Loaded(Limits(), "auto", KIND))
    relay.submit(consumer := Waiting())  # known at once, and queued behind the welcome
    held.set()
    settle(relay)
    assert LIVES[1].requests == [(0, ())]
    LIVES[1].say(Began(0))
    LIVES[1].say(wrote(0, 5, 6))
    life = die(1)
    settle(relay)
    assert life.requests == [(1, (5, 6))]
    life.say(Ended(1, FinishReason.STOP, RequestStats()))
    settle(relay)
    assert consumer.ends == [FinishReason.STOP] and not relay.num_open


def test_an_aborted_request_does_not_go_on(relay: Relay) -> None:
    relay.submit(consumer := Waiting())
    relay.stop(0)
    life = die(0)
    settle(relay)
    assert consumer.ends == [FinishReason.ABORT] and not life.requests


def test_an_answer_that_was_whole_has_ended(relay: Relay) -> None:
    consumers = [Waiting(i) for i in range(2)]
    for consumer in consumers:
        relay.submit(consumer)
    LIVES[0].say(wrote(0, 5, 0))
    LIVES[0].say(wrote(1, *[5] * 9))
    assert not die(0).requests
    settle(relay)
    assert [consumer.ends for consumer in consumers] == [[FinishReason.STOP], [FinishReason.LENGTH]]


def test_one_with_which_it_dies_again_and_again_fails_alone(relay: Relay) -> None:
    culprit, other = Waiting(0), Waiting(1)
    relay.submit(culprit)
    relay.submit(other)
    for life in range(2):
        LIVES[life].say(Began(2 * life))
        LIVES[life].say(Began(2 * life + 1))
        LIVES[life].say(wrote(2 * life + 1, 5))
        die(life)
    settle(relay)
    assert "died of it" in str(culprit.ends[0]) and not other.ends
    assert LIVES[2].requests == [(4, (5, 5))]


def test_a_process_that_cannot_be_started_is_one_that_died(relay: Relay) -> None:
    relay.submit(consumer := Waiting())
    FAILING.append(RuntimeError("can't start new thread"))
    assert die(0).pid == 1
    settle(relay)
    assert not FAILING and LIVES[1].requests == [(1, ())]
    FAILING[:] = [EngineError("engine process", "python", "could not be started (no memory)")] * 9
    LIVES[1].die()
    wait_until(lambda: bool(consumer.ends))
    assert "no memory" in str(consumer.ends[0]) and relay.health()["engine process"].state == "given up"


def test_loading_that_fails_later_is_no_fault_of_requests(relay: Relay) -> None:
    """Nor the end at once: a folder may come back."""
    relay.submit(consumer := Waiting())
    missing = InvalidInputError("draft_model", "/a/b", "is no folder")
    LIVES[0].die()
    for life in range(1, 4):
        wait_until(lambda life=life: len(LIVES) == life + 1)
        LIVES[life].die(missing)
    assert not consumer.ends
    wait_until(lambda: len(LIVES) == 5)
    LIVES[4].say(f.Loaded(Limits(), "auto", KIND))
    settle(relay)
    assert LIVES[4].requests == [(1, ())]
    for life in range(4, 6):
        wait_until(lambda life=life: len(LIVES) == life + 1)
        LIVES[life].die(missing)
    wait_until(lambda: bool(consumer.ends))
    relay.submit(later := Waiting(1))
    settle(relay)
    for error in (*consumer.ends, *later.ends):
        assert type(error) is EngineError and error.__cause__ is missing and "is no folder" in str(error)
    assert len(LIVES) == 6 and len(later.ends) == 1


def test_memory_that_is_freed_late_is_waited_for(relay: Relay, clock: Time) -> None:
    """More often than a process may die, but not for ever."""
    relay.submit(consumer := Waiting())
    full = DeviceError("device", "cuda:0", "2 sequences need 9.00 GiB, 1.00 GiB are free")
    LIVES[0].die()
    for life in range(1, 8):
        wait_until(lambda life=life: len(LIVES) == life + 1)
        LIVES[life].die(full)
    wait_until(lambda: len(LIVES) == 9)
    assert not consumer.ends
    clock.ahead += ROOM_SECONDS
    for life in range(8, 13):
        wait_until(lambda life=life: len(LIVES) == life + 1)
        LIVES[life].die(full)
    wait_until(lambda: bool(consumer.ends))
    assert "1.00 GiB are free" in str(consumer.ends[0]) and len(LIVES) == 13


def test_silence_while_this_process_slept_too_is_no_hang(relay: Relay, clock: Time) -> None:
    for silence in (60.0, 1000.0):
        clock.ahead += silence
        check(relay)
        assert not LIVES[0].killed and not relay.health()["engine process"].ok
        LIVES[0].say(f.EngineHeartbeat({}))
        settle(relay)
        assert relay.health()["engine process"].ok
        clock.ahead += GRACE_SECONDS + 1
        check(relay)
        assert not LIVES[0].killed
    for _ in range(2):
        clock.ahead += 60
        check(relay)
    assert LIVES[0].killed == 1


def test_one_bad_beat_is_no_hang(relay: Relay) -> None:
    bad, good = f.EngineHeartbeat({"target": Health("up", 61.0, 60.0)}), f.EngineHeartbeat({"target": Health()})
    for beat in (bad, good, bad, good):
        LIVES[0].say(beat)
    settle(relay)
    assert not LIVES[0].killed
    LIVES[0].say(bad)
    LIVES[0].say(bad)
    settle(relay)
    assert LIVES[0].killed == 1


def test_a_death_is_logged_and_how_long_it_took(relay: Relay, clock: Time, caplog: pytest.LogCaptureFixture) -> None:
    relay.submit(Waiting())
    LIVES[0].die()
    wait_until(lambda: len(LIVES) == 2)
    clock.ahead += 30
    LIVES[1].say(f.Loaded(Limits(), "auto", KIND))
    settle(relay)
    died, up = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert died == "engine process = 0: killed by the test. It is started again; requests that go on: 1"
    assert re.fullmatch(r"the engine process is up again after 3\d\.\d seconds", up)


def test_requests_after_the_end_fail(relay: Relay) -> None:
    relay.close()
    relay.submit(consumer := Waiting())
    assert isinstance(consumer.ends[0], EngineClosedError) and not relay.num_open


@pytest.mark.usefixtures("one_thread")
def test_a_bad_request_of_the_process_ends_alone(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[Any] = []
    wire: Any = type("Wire", (), {"send": lambda _, message: said.append(message)})()
    with Engine(EngineConfig(tiny.make_target("llama", tmp_path), None, dtype="float64", max_model_len=512)) as engine:
        child._handle(Submit(Request(0, (1, 2), SamplingParams(grammar="start: ("))), engine, wire)
        child._handle(Submit(Request(1, (1, 2), SamplingParams(max_tokens=2))), engine, wire)
        wait_until(lambda: any(isinstance(message, Ended) for message in said))
        monkeypatch.setattr(engine.grammars, "start", lambda grammar: 1 // 0)
        child._handle(Submit(Request(2, (1, 2), SamplingParams(grammar="start: /a/"))), engine, wire)
    refused = {message.request_id: message.error.kind for message in said if isinstance(message, f.NotServed)}
    assert refused == {0: "InvalidInputError", 2: "ZeroDivisionError"}


def test_one_bad_request_among_those_that_wait_fails_alone(relay: Relay, monkeypatch: pytest.MonkeyPatch) -> None:
    LIVES[0].die()
    wait_until(lambda: len(LIVES) == 2)
    consumers = [Waiting(number) for number in range(3)]
    for consumer in consumers:
        relay.submit(consumer)
    send = Scripted.send

    def refuse(life: Scripted, message: Any) -> None:
        if isinstance(message, Submit) and message.request.request_id == 0:
            raise TypeError("no number")
        send(life, message)

    monkeypatch.setattr(Scripted, "send", refuse)
    LIVES[1].say(f.Loaded(Limits(), "auto", KIND))
    settle(relay)
    settle(relay)
    assert [number for number, _ in LIVES[1].requests] == [1, 2]
    assert "request = 0: it cannot be sent to an engine" in str(consumers[0].ends[0])
    assert not consumers[1].ends and not consumers[2].ends


def test_an_abort_just_before_an_engine_is_up_takes_no_seat(relay: Relay) -> None:
    LIVES[0].die()
    wait_until(lambda: len(LIVES) == 2)
    relay.submit(consumer := Waiting())
    settle(relay)
    held = threading.Event()
    relay._do(held.wait, 10)
    relay.stop(0)
    LIVES[1].say(f.Loaded(Limits(), "auto", KIND))
    held.set()
    settle(relay)
    settle(relay)
    assert consumer.ends == [FinishReason.ABORT] and not LIVES[1].requests


def test_a_reader_that_pauses_gives_its_seat_back(relay: Relay) -> None:
    """Readings of a text that was read before are not reported again, and its tokens are counted once."""
    relay.submit(consumer := Waiting())
    settle(relay)
    first = RequestStats(rounds=1, cached_tokens=1)
    LIVES[0].say(Committed(0, (5, 6), ("", ""), (), first))
    relay.pause(0, True)
    settle(relay)
    assert [message for message in LIVES[0].sent if isinstance(message, f.Stop)] == [f.Stop(0)]
    LIVES[0].say(wrote(0, 7))  # was on its way
    relay.pause(0, False)
    settle(relay)
    assert LIVES[0].requests == [(0, ()), (1, (5, 6))]
    LIVES[0].say(Reading(1, 512, 900))
    LIVES[0].say(Ended(1, FinishReason.LENGTH, RequestStats(rounds=2, cached_tokens=4)))
    settle(relay)
    assert consumer.ends == [FinishReason.LENGTH] and not consumer.readings
    assert (consumer.stats.rounds, consumer.stats.cached_tokens) == (3, 1)
