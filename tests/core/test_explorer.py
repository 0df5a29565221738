"""The protocol under every interleaving of small worlds, and under random ones with faults in large worlds.

`make explore` runs the larger numbers, which docs/LOG.md keeps.
"""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable, Iterable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

import pytest

from langchain_card.core.request import FinishReason
from langchain_card.runtime.threads import num_cores
from tests.simulation import PriorityChooser, RandomChooser, Violation, World, exhaust, replay, run, scopes
from tests.simulation.explorer import Coverage, RecordedChooser
from tests.simulation.fingerprint import fingerprint

LONG = bool(os.environ.get("CARD_EXPLORE"))
TOKENS = 3_000_000 if LONG else 15_000
WORLDS = [scope for scope in scopes.EXHAUSTIVE if scope.name not in scopes.LARGE]
LARGE_WORLDS = [scope for scope in scopes.EXHAUSTIVE if scope.name in scopes.LARGE]
LARGE_WORLDS = LARGE_WORLDS + scopes.LONG if LONG else LARGE_WORLDS[1::4]
"""Every fourth of the large worlds, but for `make explore`: each takes up to a minute of both cores."""


def pool() -> ProcessPoolExecutor:
    return ProcessPoolExecutor(num_cores(), mp_context=get_context("spawn"))


def check_coverage(
    worlds: list[scopes.Scope], coverages: Iterable[Coverage], least: int, say: Callable[[str], None]
) -> None:
    states = transitions = 0
    for scope, seen in zip(worlds, coverages, strict=True):
        assert seen.complete and seen.ends
        states, transitions = states + seen.states, transitions + seen.transitions
        say(f"{scope.name}: {seen.states:,} states, {seen.transitions:,} transitions, {seen.ends} ends")
    say(f"{states:,} distinct states, {transitions:,} transitions, no violation, an end reachable from all")
    assert states >= least


def test_explore_every_interleaving(say: Callable[[str], None]) -> None:
    check_coverage(WORLDS, map(exhaust, WORLDS), 75_000, say)


@pytest.mark.timeout(7200 if LONG else 900)
@pytest.mark.slow
def test_explore_every_interleaving_of_large_worlds(say: Callable[[str], None]) -> None:
    with pool() as workers:
        check_coverage(LARGE_WORLDS, workers.map(exhaust, LARGE_WORLDS), 1_500_000 if LONG else 50_000, say)


def random_run(seed: int) -> tuple[int, int, int]:
    """Tokens that were checked, failed requests and aborted requests of one run."""
    scope = scopes.long_text(seed, schedule=("parallel", "auto", "sequential")[seed % 3])
    chooser = PriorityChooser(seed) if seed % 5 == 0 else RandomChooser(seed, fault_chance=0.02)
    if seed % 5 == 0:
        scope.faults.clear()  # type: ignore[attr-defined]  # by priority a fault would strike as soon as it may
    world = run(scope, chooser, seed=seed)
    for request_id, reason in world.finished.items():
        assert reason is not FinishReason.LENGTH or len(world.emitted[request_id]) == scope.max_tokens
    aborted = sum(reason is FinishReason.ABORT for reason in world.finished.values())
    errors = sum(reason is FinishReason.ERROR for reason in world.finished.values())
    return sum(map(len, world.emitted.values())), errors, aborted


def test_explore_random_schedules_with_faults() -> None:
    figures = [random_run(seed) for seed in range(40)]
    tokens, errors, aborted = map(sum, zip(*figures, strict=True))
    assert tokens > 5_000 and aborted and not errors


@pytest.mark.timeout(7200 if LONG else 900)
@pytest.mark.slow
def test_explore_many_random_schedules_with_faults(say: Callable[[str], None]) -> None:
    tokens = errors = aborted = runs = 0
    with pool() as workers:
        while tokens < TOKENS:
            for figures in workers.map(random_run, range(runs, runs + 80), chunksize=10):
                tokens, errors, aborted = tokens + figures[0], errors + figures[1], aborted + figures[2]
            runs += 80
    say(f"{tokens:,} tokens in {runs:,} runs, none wrong; {aborted} requests aborted, {errors} failed")
    assert aborted and not errors


def test_explorer_replays_what_it_saw() -> None:
    actions = []

    def recording(world: World, possible: list) -> tuple:
        actions.append(RandomChooser(len(actions), 0.1)(world, possible))
        return actions[-1]

    scope = scopes.long_text(1)
    first = run(scope, recording)
    assert fingerprint(replay(scope, actions)) == fingerprint(first)
    assert fingerprint(run(scope, RecordedChooser(actions))) == fingerprint(first)


def test_explorer_names_what_broke(monkeypatch: pytest.MonkeyPatch) -> None:
    """A violation carries the actions that lead there, and they lead there again."""
    wrong = lambda rule, window, verdict, request: ([0], [verdict.target_ids[0] + 1], False)  # noqa: E731
    monkeypatch.setattr("langchain_card.core.coordinator.committed", wrong)
    with pytest.raises(
        Violation, match=r"not the target's \(scope 'draining', seed 3\); replay with actions = \["
    ) as seen:
        run(scopes.named("draining"), RandomChooser(3), seed=3)
    with pytest.raises(AssertionError, match="not the target's"):
        replay(seen.value.scope, seen.value.actions)
    assert str(pickle.loads(pickle.dumps(seen.value))) == str(seen.value), "so it comes out of a process"


def test_explorer_sees_a_state_from_which_no_end_is_reached(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("langchain_card.core.workers.Workers.started", lambda self, worker: False)
    with pytest.raises(Violation, match="no end can be reached"):
        exhaust(scopes.named("the target dies and comes back"))


def test_invariant_a_copied_world_goes_its_own_way() -> None:
    scope = scopes.long_text(2)
    world, chooser = World(scope), RandomChooser(5, 0.1)
    for _ in range(300):
        copied = world.copy()
        mark = fingerprint(copied)
        assert mark == fingerprint(world)
        if world.ended:
            break
        world.do(chooser(world, world.actions()))
        assert fingerprint(copied) == mark
