"""Orders of events around an isolated engine that a real process takes too rarely."""

from __future__ import annotations

import logging
import re
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from langchain_card.config import EngineConfig, Limits
from langchain_card.core.request import FinishReason, Request, RequestStats, SamplingParams
from langchain_card.engine.engine import Engine
from langchain_card.engine.isolated import main as child
from langchain_card.engine.isolated import messages as f
from langchain_card.engine.isolated.supervisor import ROOM_SECONDS, Supervisor
from langchain_card.engine.liveness import GRACE_SECONDS
from langchain_card.errors import DeviceError, EngineClosedError, EngineError, InvalidInputError
from langchain_card.ports import Health
from tests.support import tiny
from tests.support.isolated import Waiting
from tests.support.processes import wait_until


class Scripted:
    """In place of a process: says what a test wants it to say."""

    def __init__(self, config: EngineConfig, hear: Any, die: Any, *, measure_kind: bool = False) -> None:
        self.pid, self.sent = len(LIVES), list[Any]()
        self.say: Any = hear
        self.killed = 0
        self.die: Any = lambda error=None: die(error or EngineError("engine process", self.pid, "killed by the test"))
        if FAILING:
            raise FAILING.pop()
        LIVES.append(self)

    def send(self, message: Any) -> None:
        self.sent.append(message)

    def kill(self) -> None:
        self.killed += 1

    def close(self) -> None:
        """It is gone."""

    @property
    def asked(self) -> list[tuple[int, tuple[int, ...]]]:
        asked = [message for message in self.sent if isinstance(message, f.Submit)]
        return [(message.request.request_id, message.output_ids) for message in asked]


LIVES: list[Scripted] = []
FAILING: list[Exception] = []


class Time:
    """A clock that runs, and that a test sets forward."""

    ahead = 0.0

    def __call__(self) -> float:
        return time.monotonic() + self.ahead


SHOWN = list[str]()


class Shown:
    """A progress that keeps its stages."""

    def update(self, stage: str, done: int, total: int) -> None:
        SHOWN.append(stage)


@pytest.fixture
def clock() -> Time:
    return Time()


@pytest.fixture
def supervisor(monkeypatch: pytest.MonkeyPatch, clock: Time) -> Iterator[Supervisor]:
    LIVES.clear()
    FAILING.clear()
    monkeypatch.setattr("langchain_card.engine.isolated.supervisor.start_engine", Scripted)
    SHOWN.clear()
    made = Supervisor(EngineConfig("a", None, limits=Limits(restart_seconds=0.01)), clock, Shown())
    for stage in ("load a", "compile kernels"):
        LIVES[0].say(f.LoadStep(stage))
    LIVES[0].say(f.Loaded(Limits(), "auto"))
    made.wait_ready()
    yield made
    made.close()


def settle(supervisor: Supervisor) -> None:
    done = threading.Event()
    supervisor._do(done.set)
    assert done.wait(10)


def die(life: int) -> Scripted:
    """Ends a life, and gives the next one."""
    LIVES[life].die()
    wait_until(lambda: len(LIVES) == life + 2)
    LIVES[-1].say(f.Loaded(Limits(), "auto"))
    return LIVES[-1]


def wrote(request_id: int, *token_ids: int) -> f.Committed:
    return f.Committed(request_id, token_ids, ("",) * len(token_ids), (), RequestStats(rounds=1))


def test_the_first_life_shows_how_it_loads(supervisor: Supervisor) -> None:
    assert SHOWN == ["load a", "compile kernels"]
    die(0).say(f.LoadStep("load a"))
    settle(supervisor)
    assert len(SHOWN) == 2, "later ones load where no bar is drawn any more"


def test_a_request_is_asked_once_in_each_life(supervisor: Supervisor) -> None:
    LIVES[0].die()
    wait_until(lambda: len(LIVES) == 2)
    held = threading.Event()
    supervisor._do(held.wait, 10)
    LIVES[1].say(f.Loaded(Limits(), "auto"))
    supervisor.submit(consumer := Waiting())  # known at once, and queued behind the welcome
    held.set()
    settle(supervisor)
    assert LIVES[1].asked == [(0, ())]
    LIVES[1].say(f.Began(0))
    LIVES[1].say(wrote(0, 5, 6))
    life = die(1)
    settle(supervisor)
    assert life.asked == [(0, (5, 6))]
    life.say(f.Ended(0, FinishReason.STOP, RequestStats()))
    settle(supervisor)
    assert consumer.ends == [FinishReason.STOP] and not supervisor.num_open


def test_nobody_goes_on_for_who_has_left(supervisor: Supervisor) -> None:
    supervisor.submit(consumer := Waiting())
    supervisor.stop(0)
    life = die(0)
    settle(supervisor)
    assert consumer.ends == [FinishReason.ABORT] and not life.asked


def test_an_answer_that_was_whole_has_ended(supervisor: Supervisor) -> None:
    consumers = [Waiting(i) for i in range(2)]
    for consumer in consumers:
        supervisor.submit(consumer)
    LIVES[0].say(wrote(0, 5, 0))
    LIVES[0].say(wrote(1, *[5] * 9))
    assert not die(0).asked
    settle(supervisor)
    assert [consumer.ends for consumer in consumers] == [[FinishReason.STOP], [FinishReason.LENGTH]]


def test_one_with_which_it_dies_again_and_again_fails_alone(supervisor: Supervisor) -> None:
    culprit, other = Waiting(0), Waiting(1)
    supervisor.submit(culprit)
    supervisor.submit(other)
    for life in range(2):
        LIVES[life].say(f.Began(0))
        LIVES[life].say(f.Began(1))
        LIVES[life].say(wrote(1, 5))
        die(life)
    settle(supervisor)
    assert "died of it" in str(culprit.ends[0]) and not other.ends
    assert LIVES[2].asked == [(1, (5, 5))]


def test_a_process_that_cannot_be_started_is_one_that_died(supervisor: Supervisor) -> None:
    supervisor.submit(consumer := Waiting())
    FAILING.append(RuntimeError("can't start new thread"))
    assert die(0).pid == 1
    settle(supervisor)
    assert not FAILING and LIVES[1].asked == [(0, ())]
    FAILING[:] = [EngineError("engine process", "python", "could not be started (no memory)")] * 9
    LIVES[1].die()
    wait_until(lambda: bool(consumer.ends))
    assert "no memory" in str(consumer.ends[0]) and supervisor.health()["engine process"].state == "given up"


def test_loading_that_fails_later_is_no_fault_of_requests(supervisor: Supervisor) -> None:
    """Nor the end at once: a folder may come back."""
    supervisor.submit(consumer := Waiting())
    missing = InvalidInputError("draft_model", "/a/b", "is no folder")
    LIVES[0].die()
    for life in range(1, 4):
        wait_until(lambda life=life: len(LIVES) == life + 1)
        LIVES[life].die(missing)
    assert not consumer.ends
    wait_until(lambda: len(LIVES) == 5)
    LIVES[4].say(f.Loaded(Limits(), "auto"))
    settle(supervisor)
    assert LIVES[4].asked == [(0, ())]
    for life in range(4, 6):
        wait_until(lambda life=life: len(LIVES) == life + 1)
        LIVES[life].die(missing)
    wait_until(lambda: bool(consumer.ends))
    supervisor.submit(later := Waiting(1))
    settle(supervisor)
    for error in (*consumer.ends, *later.ends):
        assert type(error) is EngineError and error.__cause__ is missing and "is no folder" in str(error)
    assert len(LIVES) == 6 and len(later.ends) == 1


def test_memory_that_is_freed_late_is_waited_for(supervisor: Supervisor, clock: Time) -> None:
    """More often than a process may die, but not for ever."""
    supervisor.submit(consumer := Waiting())
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


def test_silence_while_this_process_slept_too_is_no_hang(supervisor: Supervisor, clock: Time) -> None:
    for silence in (60.0, 1000.0):
        clock.ahead += silence
        supervisor._do(supervisor._check_process)
        settle(supervisor)
        assert not LIVES[0].killed and not supervisor.health()["engine process"].ok
        LIVES[0].say(f.EngineHeartbeat({}))
        settle(supervisor)
        assert supervisor.health()["engine process"].ok
        clock.ahead += GRACE_SECONDS + 1
        supervisor._do(supervisor._check_process)
        settle(supervisor)
        assert not LIVES[0].killed
    for _ in range(2):
        clock.ahead += 60
        supervisor._do(supervisor._check_process)
        settle(supervisor)
    assert LIVES[0].killed == 1


def test_one_bad_beat_is_no_hang(supervisor: Supervisor) -> None:
    bad, good = f.EngineHeartbeat({"target": Health("up", 61.0, 60.0)}), f.EngineHeartbeat({"target": Health()})
    for beat in (bad, good, bad, good):
        LIVES[0].say(beat)
    settle(supervisor)
    assert not LIVES[0].killed
    LIVES[0].say(bad)
    LIVES[0].say(bad)
    settle(supervisor)
    assert LIVES[0].killed == 1


def test_a_death_is_logged_and_how_long_it_took(
    supervisor: Supervisor, clock: Time, caplog: pytest.LogCaptureFixture
) -> None:
    supervisor.submit(Waiting())
    LIVES[0].die()
    wait_until(lambda: len(LIVES) == 2)
    clock.ahead += 30
    LIVES[1].say(f.Loaded(Limits(), "auto"))
    settle(supervisor)
    died, up = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert died == "engine process = 0: killed by the test. It is started again; requests that go on: 1"
    assert re.fullmatch(r"the engine is up again after 3\d\.\d seconds", up)


def test_who_comes_after_the_end_is_told(supervisor: Supervisor) -> None:
    supervisor.close()
    supervisor.submit(consumer := Waiting())
    assert isinstance(consumer.ends[0], EngineClosedError) and not supervisor.num_open


@pytest.mark.usefixtures("one_thread")
def test_a_bad_request_of_the_process_ends_alone(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[Any] = []
    wire: Any = type("Wire", (), {"send": lambda _, message: said.append(message)})()
    with Engine(EngineConfig(tiny.make_target("llama", tmp_path), None, dtype="float64", max_model_len=512)) as engine:
        child._handle(f.Submit(Request(0, (1, 2), SamplingParams(grammar="start: ("))), engine, wire)
        child._handle(f.Submit(Request(1, (1, 2), SamplingParams(max_tokens=2))), engine, wire)
        wait_until(lambda: any(isinstance(message, f.Ended) for message in said))
        monkeypatch.setattr(engine.grammars, "start", lambda grammar: 1 // 0)
        child._handle(f.Submit(Request(2, (1, 2), SamplingParams(grammar="start: /a/"))), engine, wire)
    refused = {message.request_id: message.error.kind for message in said if isinstance(message, f.RequestFailed)}
    assert refused == {0: "InvalidInputError", 2: "ZeroDivisionError"}
