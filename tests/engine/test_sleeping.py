"""Real threads against the virtual clock: the engine over models that only sleep."""

from __future__ import annotations

import itertools
import math
import statistics
import time
from collections.abc import Callable
from typing import Any

import pytest

from langchain_card.core.policy import Load
from langchain_card.limits import Limits
from tests.simulation import ToyModel
from tests.simulation.sleeping import TOKENS, TRIES, SleepingEngine, virtual

pytestmark = pytest.mark.usefixtures("frozen")

PROMPT = (1, 2)
CELLS = [(ratio, draft_ms) for draft_ms in (20, 5) for ratio in (2, 4, 8)]
LIMITS = Limits()


def wall_clock(model: ToyModel, t_target: float, t_draft: float, schedule: str) -> tuple[float, float, float]:
    """Tokens per second on two threads, and the seconds that a target step and a draft step took there."""
    with SleepingEngine(model, lambda rows: t_target, lambda rows: t_draft, LIMITS) as engine:
        done = engine.submit(PROMPT, max_tokens=TOKENS, schedule=schedule).result()
        took = [statistics.mean(device.taken) for device in (engine.driver._target, *engine.drafters)]  # type: ignore[attr-defined]
    assert done.token_ids == model.answer(PROMPT, TOKENS)
    return done.stats.tokens_per_second, *took


@pytest.mark.parametrize(("ratio", "draft_ms"), CELLS)
@pytest.mark.slow
def test_sleeping_devices_keep_up_with_the_virtual_clock(ratio: int, draft_ms: int, say: Callable[[str], None]) -> None:
    """`parallel` on real threads comes near what no overhead at all would give, and beats `sequential`.

    Nine tenths and more on a quiet machine (docs/LOG.md); without any overlap it would be six tenths.

    A busy machine wakes a sleeper late, which is no work of ours: the virtual clock runs with the steps as they were.
    """
    model, t_draft, shares, speedups = ToyModel(200, top=0.8, second=0.7), draft_ms / 1e3, [], []
    goal = virtual(model, ratio * t_draft, t_draft, "parallel")
    theory = goal / virtual(model, ratio * t_draft, t_draft, "sequential")
    for _ in range(TRIES):
        parallel, *took = wall_clock(model, ratio * t_draft, t_draft, "parallel")
        shares.append(parallel / virtual(model, *took, "parallel"))
        speedups.append(parallel / wall_clock(model, ratio * t_draft, t_draft, "sequential")[0])
        if max(shares) >= 0.9 and max(speedups) > 1:
            break
    say(
        f"target {ratio * draft_ms} ms, draft {draft_ms} ms: {max(shares):.2f} of the virtual clock's "
        f"tokens/s ({parallel / goal:.2f} had no sleeper been late); "
        f"{max(speedups):.2f} times sequential ({theory:.2f} in theory)"
    )
    assert max(shares) >= 0.75
    assert theory > 1 < max(speedups)


@pytest.mark.parametrize("ratio", [2, 4, 8])
def test_sleeping_draft_gets_ahead_while_the_target_works(ratio: int, say: Callable[[str], None]) -> None:
    """A draft that is always right adds about the ratio to its lead while the target takes a step.

    As long as there is room: it is sure, so that it draws one path only, and the first five rounds count.
    """
    model, seen = ToyModel(200, top=1.0, stated=0.99), []
    with SleepingEngine(model, lambda rows: ratio * 0.02, lambda rows: 0.02, Limits(max_draft_width=1)) as engine:
        query = engine.driver.coordinator.query
        plan = query.open_windows

        def windows(states: Any, *rest: Any) -> Any:
            seen.append(
                len(states[0].output_ids) + states[0].drafters["toy"].lead(states[0].tree)
            )  # how far the draft has looked
            return plan(states, *rest)

        query.open_windows = windows  # type: ignore[method-assign]
        engine.submit(PROMPT, max_tokens=60, schedule="parallel").result()
    grown = [after - before for before, after in itertools.pairwise(seen[:6])]
    say(f"layers grown in each step of the target, ratio {ratio}: {grown}")
    assert statistics.mean(grown) >= 0.7 * ratio


@pytest.mark.slow
def test_sleeping_draft_that_stalls_holds_nobody_up(say: Callable[[str], None]) -> None:
    """Five seconds in one draft step: rounds go on, none later than its wait deadline."""
    model, t_target, t_draft = ToyModel(200, top=0.8), 0.04, 0.005
    with SleepingEngine(model, lambda rows: t_target, lambda rows: t_draft, LIMITS) as engine:
        generation = engine.submit(PROMPT, max_tokens=110, schedule="parallel")
        times, stalled_at = [], math.inf
        for count, _ in enumerate(generation):
            times.append(time.perf_counter())
            if count == 30:
                engine.drafters[0].stall, stalled_at = 5.0, times[-1]
        gaps = [later - earlier for earlier, later in itertools.pairwise(times) if later > stalled_at]
        patience = engine.driver.coordinator.policy.patience(Load("parallel"))
    assert tuple(piece.token_id for piece in generation._taken) == model.answer(PROMPT, 110)
    say(f"longest gap between tokens while the draft stalls: {1e3 * max(gaps):.0f} ms; patience {1e3 * patience:.0f}")
    assert times[-1] - stalled_at < 5.0, "the answer was finished while the draft stalled"
    assert max(gaps) < t_target + patience + 0.5


def test_sleeping_target_teaches_the_time_per_token_of_several_requests() -> None:
    """Their verdicts come one after another, at times of their own, and make one pass all the same."""
    with SleepingEngine(
        ToyModel(200, top=0.8), lambda rows: 0.01, lambda rows: 0.002, Limits(max_num_seqs=2)
    ) as engine:
        asked = [engine.submit((1, 2 + i), max_tokens=40, schedule="parallel") for i in range(2)]
        for generation in asked:
            generation.result()
        learnt = engine.driver.coordinator.policy.costs_of(Load("parallel", 2)).per_token  # type: ignore[attr-defined]
    assert learnt.weight > 5 and 0.001 < learnt.value < 0.02


def test_sleeping_target_that_dies_comes_back(caplog: pytest.LogCaptureFixture) -> None:
    """A failing step costs a restart; the answer goes on where it was, and nothing is lost or doubled."""
    model = ToyModel(200, top=0.8)
    with SleepingEngine(model, lambda rows: 0.004, lambda rows: 0.001, LIMITS) as engine:
        generation = engine.submit(PROMPT, max_tokens=60, schedule="parallel")
        for count, _ in enumerate(generation):
            if count in (10, 40):
                engine.driver._target.script = None  # type: ignore[attr-defined]
    assert tuple(piece.token_id for piece in generation._taken) == model.answer(PROMPT, 60)
    assert sum("a target step failed" in record.message for record in caplog.records) == 2


def test_sleeping_draft_that_dies_comes_back(caplog: pytest.LogCaptureFixture) -> None:
    model = ToyModel(200, top=1.0)
    with SleepingEngine(model, lambda rows: 0.01, lambda rows: 0.002, LIMITS) as engine:
        generation = engine.submit(PROMPT, max_tokens=200, schedule="parallel")
        for count, _ in enumerate(generation):
            if count == 20:
                engine.drafters[0]._script = None  # type: ignore[assignment]
        assert tuple(piece.token_id for piece in generation._taken) == model.answer(PROMPT, 200)
        assert len(engine.drafters) == 2, "a second drafter was made"
        assert generation.stats is not None
        assert generation.stats.accepted > 100, "and its candidates were used"


def test_sleeping_slow_consumer_pauses_its_request() -> None:
    """At most `max_unread` tokens (and the round that went past them) wait for somebody who does not read."""
    limits = Limits(max_unread=8)
    model = ToyModel(200, top=0.8)
    with SleepingEngine(model, lambda rows: 0.002, lambda rows: 0.001, limits) as engine:
        generation = engine.submit(PROMPT, max_tokens=100, schedule="parallel")
        pieces = iter(generation)
        read = [next(pieces).token_id]
        until = time.monotonic() + 10
        while len(generation._pieces) < 8 and time.monotonic() < until:
            time.sleep(0.05)
        time.sleep(0.3)
        assert 8 <= len(generation._pieces) <= 8 + limits.max_window
        before = len(generation._pieces)
        time.sleep(0.1)
        assert len(generation._pieces) == before
        read += [piece.token_id for piece in pieces]
        assert tuple(read) == model.answer(PROMPT, 100)
        other = engine.submit(PROMPT, max_tokens=100, schedule="parallel").result()
        assert other.token_ids == tuple(read), "one who waits for the whole answer is no slow consumer"
