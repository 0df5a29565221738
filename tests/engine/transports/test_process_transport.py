"""A drafter in a process of its own: it keeps up, and whatever becomes of it costs speed only and leaves nothing."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import psutil
import pytest
from typing_extensions import Self

from langchain_card.core import messages as m
from langchain_card.core.request import Request, SamplingParams
from langchain_card.engine.transports.process import ProcessTransport
from langchain_card.errors import DeviceError, EngineError
from langchain_card.limits import Limits
from tests.simulation import FixedPolicy, ToyModel
from tests.simulation.invariants import check_prefixes
from tests.simulation.sleeping import TOKENS, TRIES, SleepingEngine, virtual
from tests.support.children import PROMPT, SENT, in_process
from tests.support.processes import child_processes, gone, wait_until

pytestmark = pytest.mark.usefixtures("frozen")

MODEL = ToyModel(200, top=0.8)
BEGIN = m.Begin("toy", Request(0, PROMPT, SamplingParams(max_tokens=50)), "parallel", (), 1)


def transport_of(engine: SleepingEngine) -> Any:
    return engine.driver.transports["toy"]


class Bare:
    """A transport without an engine, and what it reported. A context manager."""

    def __init__(self, factory: str, **arguments: Any) -> None:
        self.proposals: list[m.Proposal] = []
        self.exhausted: list[tuple[int, ...]] = []
        self.ready: list[bool] = []
        self.deaths: list[BaseException] = []
        self.transport = ProcessTransport(
            f"tests.support.children:{factory}",
            arguments,
            name="toy",
            publish=self.proposals.append,
            report_out_of_memory=self.exhausted.append,
            on_ready=lambda: self.ready.append(True),
            on_death=self.deaths.append,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.transport.close()
        assert not psutil.pid_exists(self.transport.pid), "nobody buried it"


# It works.


def checked(engine: SleepingEngine) -> list[int]:
    """Checks the cache after every proposal; grows with each one."""
    handle, seen = engine.driver.coordinator.handle, []

    def checking(event: m.Event) -> list[m.Effect]:
        effects = handle(event)
        if isinstance(event, m.Proposed):
            for state in engine.driver.coordinator.scheduler.running.values():
                check_prefixes(state, lambda prefix, _: MODEL.candidates(prefix))
            seen.append(event.proposal.incarnation)
        return effects

    engine.driver.coordinator.handle = checking  # type: ignore[method-assign]
    return seen


def wall_clock(schedule: str, t_target: float, t_draft: float) -> tuple[float, float, float]:
    """Tokens per second, and the seconds that a target step and a draft step took."""
    make = in_process(seconds=t_draft)
    with SleepingEngine(MODEL, lambda rows: t_target, lambda rows: 0.0, Limits(), transport=make) as engine:
        done = engine.submit(PROMPT, max_tokens=TOKENS, schedule=schedule).result()
        took = engine.driver._target.taken  # type: ignore[attr-defined]
    assert done.token_ids == MODEL.answer(PROMPT, TOKENS)
    stats = done.stats
    return stats.tokens_per_second, sum(took) / len(took), stats.draft_busy / stats.draft_steps


@pytest.mark.slow
def test_both_work_at_once(say: Callable[[str], None]) -> None:
    """`parallel` reaches nine tenths of the virtual clock's speed, and beats taking turns."""
    shares, speedups = [], []
    for _ in range(TRIES):
        parallel, *took = wall_clock("parallel", 0.04, 0.01)
        shares.append(parallel / virtual(ToyModel(200, top=0.8), *took, "parallel"))
        speedups.append(parallel / wall_clock("sequential", 0.04, 0.01)[0])
        if max(shares) >= 0.9 and max(speedups) > 1:
            break
    say(f"draft in a process: {max(shares):.2f} of the virtual clock, {max(speedups):.2f} times sequential")
    assert max(shares) >= 0.75
    assert max(speedups) > 1


def test_several_requests_under_all_schedules() -> None:
    make, limits, policy = in_process(seconds=0.001), Limits(max_num_seqs=2), FixedPolicy((2,) * 8)
    with SleepingEngine(MODEL, lambda rows: 0.004, lambda rows: 0.0, limits, policy, make) as engine:
        seen = checked(engine)
        schedules = ("parallel", "sequential", "plain", "parallel")
        asked = [engine.submit((1, i), max_tokens=60, schedule=schedule) for i, schedule in enumerate(schedules)]
        for i, generation in enumerate(asked):
            done = generation.result()
            assert done.token_ids == MODEL.answer((1, i), 60)
            assert (done.stats.accepted > 10) is (schedules[i] != "plain")
        assert len(seen) > 20


def test_a_process_that_stalls_holds_nobody_up() -> None:
    """What it has to catch up on stays small, and is all there."""
    with Bare("sleeping") as bare:
        bare.transport.wait_ready()
        bare.transport.send(BEGIN)
        os.kill(bare.transport.pid, signal.SIGSTOP)
        begun = time.monotonic()
        for length in range(1, 3000):
            bare.transport.send(m.Correct("toy", 0, 0, (7,) * length))
            bare.transport.send(m.Grow("toy", 0, (1,)))
        assert time.monotonic() - begun < 5
        assert len(bare.transport._mailbox) <= 2
        os.kill(bare.transport.pid, signal.SIGCONT)
        wait_until(lambda: bool(bare.proposals) and bare.proposals[-1].applied_len == 2999)
        assert not bare.deaths


def test_log_records_and_ctrl_c(caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]) -> None:
    """Records come up to this process's loggers; an interrupt is for this process, which decides what it means."""
    with caplog.at_level(logging.INFO, "langchain_card"), Bare("talking", text="hello") as bare:
        bare.transport.wait_ready()
        os.kill(bare.transport.pid, signal.SIGINT)
        bare.transport.send(BEGIN)
        bare.transport.send(m.Grow("toy", 0, (1,)))
        wait_until(lambda: bool(bare.proposals))
    assert [(r.name, r.levelname, r.getMessage()) for r in caplog.records] == [
        ("langchain_card.test", "INFO", "hello 100%")
    ]
    assert bare.ready == [True] and not bare.deaths
    said = capfd.readouterr()
    assert not said.out and "what a library prints" in said.err, "standard output is this process's own"


# It dies.


def test_killed_three_times_under_load() -> None:
    """Each time the target goes on alone, and the draft comes back and is of use again."""
    killed: list[int] = []
    alone = accepted = 0
    make, policy = in_process(seconds=0.001, start=0.5), FixedPolicy((2,) * 8, patience=60.0)
    with SleepingEngine(MODEL, lambda rows: 0.004, lambda rows: 0.0, policy=policy, transport=make) as engine:
        seen = checked(engine)
        generation = engine.submit(PROMPT, max_tokens=20_000, schedule="parallel")
        tokens = []
        for piece in generation:
            tokens.append(piece.token_id)
            transport, stats = transport_of(engine), generation.stats
            assert stats is not None
            if not transport.ready:
                alone, accepted = alone + (transport.pid not in killed), stats.accepted
            elif stats.accepted > accepted + 20 and transport.pid not in killed:
                if len(killed) == 3:
                    break
                os.kill(transport.pid, signal.SIGKILL)
                killed.append(transport.pid)
        generation.abort()
    assert tuple(tokens) == MODEL.answer(PROMPT, len(tokens))
    assert len({transport_of(engine).pid, *killed}) == 4
    assert alone > 50, "the target did not wait for one that starts"
    assert len(set(seen)) == 4, "each life had candidates of its own"


DEATHS = {
    "killed": r"draft process = \d+: was ended by signal 9 \(Killed\)",
    "exits": r"draft process = \d+: ended with exit code 3",
    "raises": "draft process = 'KeyError': 'planted'",
    "too long a frame": "frame = '4,294,967,295 bytes': at most 4,194,304 may be sent",
    **dict.fromkeys(
        (how for how in SENT if how != "too long a frame"), "frame = .*(makes no sense|is none of Ready, Proposal)"
    ),
}


@pytest.mark.parametrize("how", DEATHS)
def test_a_death_is_told_once_with_its_reason(how: str, caplog: pytest.LogCaptureFixture) -> None:
    with Bare("failing", how=how) as bare:
        bare.transport.wait_ready()
        bare.transport.send(BEGIN)
        bare.transport.send(m.Grow("toy", 0, (1,)))
        wait_until(lambda: bool(bare.deaths))
        assert gone(bare.transport.pid) and not bare.transport.ready
        for _ in range(3):
            bare.transport.send(m.End("toy", 0))
    (death,) = bare.deaths
    assert isinstance(death, EngineError)
    assert death.field in ("draft process", "frame")
    with pytest.raises(EngineError, match=DEATHS[how]):
        bare.transport.wait_ready()
    traces = [record.getMessage() for record in caplog.records if "Traceback" in record.getMessage()]
    assert bool(traces) is (how == "raises"), "the trace of what it raised is in this process's log"


def test_want_of_memory_is_no_death() -> None:
    with Bare("failing", how="memory") as bare:
        bare.transport.send(BEGIN)
        bare.transport.send(m.Grow("toy", 0, (1,)))
        wait_until(lambda: bool(bare.exhausted))
        assert bare.exhausted == [(0,)] and not bare.deaths


@pytest.mark.parametrize(
    ("factory", "how", "kind", "message"),
    [
        ("no_start", "device", DeviceError, "draft_device = 'cuda:7': has no room for it. Hint: use a smaller draft"),
        ("no_start", "raises", EngineError, "draft process = 'KeyError': 'planted'"),
        ("no_start", "exits", EngineError, "ended with exit code 4"),
        ("nobody", "", EngineError, "draft process = 'AttributeError'.*no attribute 'nobody'"),
    ],
)
def test_what_keeps_it_from_starting(factory: str, how: str, kind: type[Exception], message: str) -> None:
    with Bare(factory, how=how) as bare:
        with pytest.raises(kind, match=message):
            bare.transport.wait_ready()
        assert len(bare.deaths) == 1 and not bare.ready


def test_a_command_that_makes_no_frame_ends_the_worker() -> None:
    with Bare("sleeping") as bare:
        bare.transport.wait_ready()
        bare.transport.send(m.Correct("toy", 0, 0, (1j,)))  # type: ignore[arg-type]
        wait_until(lambda: bool(bare.deaths))
        assert isinstance(bare.deaths[0], TypeError)


# It ends.


@pytest.mark.parametrize("state", ["starting", "ready", "stopped"])
def test_close_leaves_nothing(state: str) -> None:
    before = child_processes()
    with Bare("sleeping", start=60.0 if state == "starting" else 0.0) as bare:
        if state != "starting":
            bare.transport.wait_ready()
        if state == "stopped":
            os.kill(bare.transport.pid, signal.SIGSTOP)
            wait_until(lambda: psutil.Process(bare.transport.pid).status() == psutil.STATUS_STOPPED)
        begun = time.monotonic()
        bare.transport.close()
        assert time.monotonic() - begun < 10
        assert (bare.transport._child._process.returncode == 0) is (state != "stopped"), "force only where it is needed"
    assert not bare.deaths, "that is no death"
    assert child_processes() <= before
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("card-toy")]


def test_nothing_outlives_a_parent_that_is_killed() -> None:
    """Even where a fork of the parent holds the connection open."""
    path = os.pathsep.join(sys.path)
    owner = subprocess.Popen(
        [sys.executable, "-W", "ignore", "-m", "tests.support.children"],
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": path},
    )
    assert owner.stdout is not None
    child, fork = map(int, owner.stdout.readline().split())
    try:
        assert not gone(child)
        owner.kill()
        owner.wait()
        assert not gone(fork)
        wait_until(lambda: gone(child), 15)
    finally:
        os.kill(fork, signal.SIGKILL)
        owner.stdout.close()
