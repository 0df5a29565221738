"""The controller against others and against its own best fixed settings, on the virtual clock.

A part of the contest; all of it is `make contest`, whose figures are in docs/performance.json and checked here, too.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from itertools import groupby
from pathlib import Path

import pytest

from benchmarks.contest import contest, trees
from benchmarks.contest.changes import Change, change, changes
from benchmarks.contest.contenders import Costs
from benchmarks.contest.devices import costs_of, load_device
from benchmarks.contest.traces import Trace, shipped
from langchain_card.core.controller import Controller
from langchain_card.limits import Limits, Pins
from tests.support import ROOT

KINDS = shipped()
GPU, CPU, AVX2 = load_device("h200"), load_device("cpu"), load_device("avx2")
RECORDED = ROOT / "docs" / "performance.json"


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.slow
def test_card_is_as_good_as_the_best_in_its_cell(
    kind: str, monkeypatch: pytest.MonkeyPatch, say: Callable[[str], None]
) -> None:
    """0.97 of the best contender and of its own best setting, over 1,000 tokens, learning included."""
    monkeypatch.setattr(trees, "DEPTHS", (4, 8, 16))
    monkeypatch.setattr(trees, "WIDTHS", (16,))
    monkeypatch.setattr(trees, "WINDOWS", (64,))
    grid = [("parallel", Pins(64, 64, lead)) for lead in (0, 8)]
    monkeypatch.setattr(contest, "GRID", grid)
    runs = trees.tree_runs(contest.joined(KINDS[kind]))
    for c in (2.0, 16.0):
        rows = {row.method: row for row in contest.cell(kind, KINDS[kind], runs, GPU, c)}
        ours = rows.pop("card").speedup
        best = max(rows.values(), key=lambda row: row.speedup)
        say(f"{kind}, c {c:g}: card {ours:.2f}, best other {best.method} {best.speedup:.2f} ({best.setting})")
        assert ours >= 0.97 * best.speedup and ours >= 1.0 - 1e-6
        assert ours <= 1.02 * best.ceiling


@pytest.mark.parametrize("kind", KINDS)
def test_card_on_one_bus_is_never_below_sequential(kind: str, say: Callable[[str], None]) -> None:
    """Its `auto` is `sequential` there, which must be the best choice."""
    rows = {row.method: row.speedup for row in contest.shared_cell(kind, KINDS[kind], CPU)}
    say(f"{kind} on one CPU: " + ", ".join(f"{method} {speedup:.2f}" for method, speedup in rows.items()))
    assert rows["card"] >= rows["sequential"] and rows["sequential"] > max(rows["plain"], rows["parallel"])


@pytest.mark.parametrize("count", [1, 4, 16])
@pytest.mark.slow
def test_card_in_batches_is_never_below_plain(count: int, say: Callable[[str], None]) -> None:
    for kind in KINDS:
        plain, ours = contest.batch_cell(kind, KINDS[kind], GPU, 8.0, count)
        say(f"{kind}, {count} at once: {ours.speedup:.2f} times plain")
        assert ours.speedup >= 0.97 * plain.speedup


def test_a_batch_whose_rows_are_dear_is_decoded_plainly() -> None:
    """Where each row costs as much as the first, nothing is drafted for long."""
    dear = load_device("h200").__class__("dear", False, "", {1: 1.0, 2: 2.0}, {1: 0.5, 2: 1.0})
    plain, ours = contest.batch_cell("chat", KINDS["chat"], dear, 2.0, 4)
    assert ours.speedup >= 0.97 * plain.speedup


def test_the_last_answers_of_a_batch_are_as_fast_as_plain_ones() -> None:
    """Where each row takes 21 ms, passes of the last one were filled up to eight rows, the fewest ever measured."""
    text, limits, speeds = contest.joined(KINDS["chat"], 1024), Limits(max_num_seqs=8), list[float]()
    texts = [contest.cut(text, start, 64 + start // 16) for start in range(0, 896, 56)]
    for schedule in ("plain", "auto"):
        policy = Controller(shared_device=True, limits=limits, overlaps=True)
        speeds.append(contest.card(texts, costs_of(AVX2), schedule, policy, limits=limits, num_slots=64))
    assert speeds[1] > 0.98 * speeds[0]


@pytest.mark.parametrize("cold", [1.0, 10.0])
def test_a_cold_first_draft_step_does_not_end_drafting_in_batches(cold: float) -> None:
    """On a GPU, the first of all loads kernels; at its price, no step of four requests seemed to pay ever after."""
    factors = itertools.chain([cold], itertools.repeat(1.0))
    costs = Costs(draft=lambda rows: 0.0033 * next(factors), target=lambda rows: 0.007 + 0.00005 * rows)
    text, limits = contest.joined(KINDS["code"], 1024), Limits(max_num_seqs=4)
    texts = [contest.cut(text, start, 128) for start in range(0, 1024, 128)]
    policy = Controller(shared_device=True, limits=limits)
    speed = contest.card(texts, costs, "auto", policy, limits=limits, num_slots=64)
    assert speed > 1.3 * 4 / costs.target(4)


@pytest.fixture(scope="module")
def seen() -> list[Change]:
    return changes(KINDS, GPU)


@pytest.mark.parametrize("number", range(3))
@pytest.mark.slow
def test_a_sudden_change_is_followed_within_twenty_rounds(
    number: int, seen: list[Change], say: Callable[[str], None]
) -> None:
    """By then it knows what a pass takes, and goes on as fast as one that has known nothing else before."""
    run = seen[number]
    believed = run.rounds[run.index + 20].believed
    assert believed == pytest.approx(run.true_pass, rel=0.25)
    around, after = run.per_token(10, 30), run.per_token(20)
    known = run.rounds[run.index + 20].per_token
    say(
        f"{run.name}: after 20 rounds {1e3 * known:.2f} ms a token believed, {1e3 * around:.2f} in rounds 10 to 30; "
        f"from then on {1e3 * after:.2f}, {1e3 * run.fresh:.2f} for one that knew nothing"
    )
    assert known == pytest.approx(around, rel=0.35)
    assert after <= 1.1 * run.fresh


@pytest.mark.slow
def test_planted_windows_that_do_not_follow_a_change_are_seen(
    seen: list[Change], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three candidates at most, whatever happens: right for nothing that comes, and slower than `fresh`."""
    windows = Controller.windows
    monkeypatch.setattr(Controller, "windows", lambda *args: [min(3, width) for width in windows(*args)])
    assert change("chat, then code", KINDS["chat"], KINDS["code"], GPU).per_token(20) > 1.1 * seen[1].fresh


def test_the_recorded_contest_holds() -> None:
    """What docs/performance.md shows: every cell of the whole contest."""
    rows = [contest.Row(**row) for row in json.loads(RECORDED.read_text())]
    cells = {key: list(group) for key, group in groupby(rows, key=lambda row: (row.trace, row.c))}
    assert {c for trace, c in cells if trace in KINDS} == set(contest.RATIOS)
    assert len(cells) == len(KINDS) * (len(contest.RATIOS) + 1 + len(contest.BATCHES) + len(contest.CPU_CELLS))
    for key, group in cells.items():
        speedup = {row.method: row.speedup for row in group}
        ours = speedup.pop("card")
        if key[0] in KINDS:
            assert ours >= 0.97 * max(speedup.values()) and ours >= 1.0 - 1e-6, key
        elif "card-fixed" in speedup:  # on a CPU
            assert ours >= 0.97 * max(speedup.values()), key
        elif "sequential" in speedup:
            assert ours >= speedup["sequential"], key
        else:
            assert ours >= 0.97, key


def test_a_planted_controller_that_waits_too_long_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """The figures can fail: one that always waits for sixteen layers is far below."""
    text, costs = contest.joined(KINDS["code"]), costs_of(GPU, 8.0)
    good, bad = (contest.card([text], costs, "auto", contest.controller(pins)) for pins in (None, Pins(lead=16)))
    assert bad < 0.9 * good


def test_traces_are_small_and_say_what_they_are() -> None:
    folder = Path(contest.__file__).parent / "data"
    assert sum(file.stat().st_size for file in folder.glob("*.json")) <= 5_000_000
    for kind, traces in KINDS.items():
        assert sum(len(trace.token_ids) for trace in traces) >= contest.TOKENS, kind
        assert all(isinstance(trace, Trace) and len(trace.draft_ids) == len(trace.token_ids) for trace in traces)
