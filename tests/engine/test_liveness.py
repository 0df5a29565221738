"""Progress of workers, on a clock of our own; and real ones that hang."""

from __future__ import annotations

import os
import signal
import threading
import time
from dataclasses import replace
from typing import Any

import psutil
import pytest

from langchain_card.config import EngineConfig
from langchain_card.core.request import SamplingParams
from langchain_card.engine.engine import Engine
from langchain_card.engine.liveness import FIRST_STEP_SECONDS, MIN_STEP_SECONDS, STEP_DUE_SECONDS, StepWatch
from langchain_card.engine.transports import process
from langchain_card.limits import Limits
from langchain_card.ports import Health
from tests.support import tiny
from tests.support.processes import gone, wait_until

PROMPT = tiny.byte_tokenizer()("def add(a, b):").input_ids


class Time:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_a_step_may_take_ten_times_what_others_took() -> None:
    clock = Time()
    watch = StepWatch(clock)
    assert watch.health() == Health() and watch.health().ok
    with watch.step(1):
        clock.now += 5
        assert watch.health() == Health("up", 5.0, FIRST_STEP_SECONDS)
        clock.now += FIRST_STEP_SECONDS
        assert not watch.health().ok
        clock.now -= FIRST_STEP_SECONDS
    assert watch.health().busy == 0 and watch.health().ok, "idle is healthy"
    with watch.step(1):
        assert watch.health().budget == 50
        clock.now += 49
        assert watch.health().ok
        clock.now += 2
        assert not watch.health().ok


def test_long_texts_take_long() -> None:
    clock = Time()
    watch = StepWatch(clock)
    for _ in range(3):
        with watch.step(1):
            clock.now += 0.5
    assert watch.budget(1) == MIN_STEP_SECONDS
    assert watch.budget(512) == 10 * 512 * 0.5, "in proportion, as long as nothing else is known"
    with watch.step(256):
        clock.now += 8
    assert watch.budget(512) == 10 * 2 * 8
    assert watch.budget(200) == 10 * 8


def test_a_step_that_is_due_begins_in_time() -> None:
    clock = Time()
    watch = StepWatch(clock)
    clock.now += 10 * STEP_DUE_SECONDS
    assert watch.health().ok and not watch.health(due=True).ok
    watch.expect()
    assert watch.health(due=True) == Health("up", 0.0, STEP_DUE_SECONDS)
    clock.now += STEP_DUE_SECONDS
    with watch.step(1):
        clock.now += STEP_DUE_SECONDS
        assert watch.health(due=True).ok, "it runs"
    assert watch.health(due=True).busy == 0
    clock.now += STEP_DUE_SECONDS + 1
    assert watch.health().ok and not watch.health(due=True).ok


def test_a_step_that_raises_has_ended() -> None:
    watch = StepWatch(Time())
    with pytest.raises(ZeroDivisionError), watch.step(1):
        raise ZeroDivisionError
    assert watch.health().ok and watch.health().busy == 0


@pytest.fixture
def config(tmp_path: Any) -> EngineConfig:
    target = tiny.make_target("llama", tmp_path / "target")
    draft = tiny.make_draft(target, tmp_path / "draft", noise=0.02)
    return EngineConfig(target, draft, dtype="float64", max_model_len=512)


@pytest.mark.usefixtures("one_thread")
def test_a_target_that_hangs_is_seen(config: EngineConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    with Engine(config) as engine:
        engine.submit(PROMPT, SamplingParams(max_tokens=4)).result()
        assert {*engine.health()} == {"target", "model", "ngram", "forced"}
        wait_until(lambda: all(health.ok and not health.busy for health in engine.health().values()))
        release, target = threading.Event(), engine.backend._target  # type: ignore[attr-defined]
        verify = target.verify
        monkeypatch.setattr(target, "verify", lambda windows: (release.wait(30), verify(windows))[1])
        monkeypatch.setattr("langchain_card.engine.liveness.MIN_STEP_SECONDS", 0.2)
        monkeypatch.setattr("langchain_card.engine.liveness.SLOWDOWN", 1.0)
        generation = engine.submit(PROMPT, SamplingParams(max_tokens=4))
        wait_until(lambda: not engine.health()["target"].ok)
        assert engine.health()["target"].state == "up"
        release.set()
        assert generation.result().token_ids
        wait_until(lambda: engine.health()["target"].ok)


@pytest.mark.usefixtures("one_thread")
@pytest.mark.slow
def test_a_reader_that_is_slow_makes_nobody_late(config: EngineConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    """While one request is held, the time since the last step says nothing of the next one."""
    monkeypatch.setattr("langchain_card.engine.liveness.STEP_DUE_SECONDS", 1.0)
    with Engine(replace(config, limits=Limits(max_unread=4))) as engine:
        backend: Any = engine.backend
        slow = engine.submit(PROMPT, SamplingParams(max_tokens=60))
        next(pieces := iter(slow))
        wait_until(lambda: engine.num_running == 1 and not backend._is_due())
        time.sleep(1.1)
        assert engine.health()["target"].ok
        release, target = threading.Event(), backend._target
        begin = target.begin
        monkeypatch.setattr(target, "begin", lambda message: (release.wait(30), begin(message))[1])
        generation = engine.submit(PROMPT, SamplingParams(max_tokens=4))
        wait_until(backend._is_due)
        assert engine.health()["target"].ok
        release.set()
        assert generation.result().token_ids and len([*pieces]) == 59


@pytest.mark.usefixtures("one_thread")
@pytest.mark.slow
def test_a_drafts_process_that_hangs_is_started_again(config: EngineConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "SILENCE_SECONDS", 3.0)
    apart = replace(config, draft_transport="process")
    params = SamplingParams(max_tokens=60, schedule="parallel")
    with Engine(apart) as engine:
        wanted = engine.submit(PROMPT, params).result().token_ids
        transports = engine.backend.transports  # type: ignore[attr-defined]
        pid = transports["model"].pid
        wait_until(lambda: transports["model"]._last_heartbeat < float("inf"))
        os.kill(pid, signal.SIGSTOP)
        wait_until(lambda: not engine.health()["model"].ok)
        while not gone(pid):
            assert engine.submit(PROMPT, params).result().token_ids == wanted
        wait_until(lambda: transports["model"].pid != pid and engine.health()["model"].ok, 60)
        assert psutil.pid_exists(transports["model"].pid)
