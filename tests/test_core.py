"""The pure core, part by part. Its behaviour under every interleaving: test_explorer.py and test_planted.py."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Mapping

import pytest
from rounds import coordinator, propose, run_round

from langchain_card.config import EngineConfig, Limits, Pins, Schedule
from langchain_card.core import messages as m
from langchain_card.core.candidates import DEAD, CandidateTree
from langchain_card.core.controller import MIN_CHANCE, Controller, Load
from langchain_card.core.coordinator import Coordinator
from langchain_card.core.query import Source
from langchain_card.core.request import FinishReason, Request, SamplingParams
from langchain_card.core.walk import walk
from langchain_card.errors import InvalidInputError
from langchain_card.testing import FixedPolicy, ToyDrafter, ToyModel, ToyTarget
from langchain_card.testing.simulated import Simulation, simulate


def test_walk_follows_the_branch_that_the_target_chose() -> None:
    window = m.Window(0, 0, 5, token_ids=(1, 10, 11, 12, 13), parents=(m.ROOT, 0, 0, 2, 3))
    assert walk(window, (11, 0, 12, 13, 14)) == ([0, 2, 3, 4], [11, 12, 13, 14])
    assert walk(window, (12, 10, 0, 0, 0)) == ([0], [12])
    assert walk(window, (10, 7, 0, 0, 0)) == ([0, 1], [10, 7])


def test_tree_re_roots_and_keeps_what_survives() -> None:
    tree = CandidateTree(0)
    a, b = tree.insert(0, 1, -0.1, "s"), tree.insert(0, 2, -2.0, "s")
    aa, ab, ba = tree.insert(a, 3, -0.1, "s"), tree.insert(a, 4, -1.5, "s"), tree.insert(b, 5, -0.1, "s")
    assert tree.best_subtree(2)[0] == [a, aa]
    nodes, chances = tree.best_subtree(9)
    assert nodes[:3] == [a, aa, ab] and len(nodes) == 5
    assert chances == sorted(chances, reverse=True) and chances[1] == pytest.approx(math.exp(-0.2))
    assert tree.advance(1) is True
    assert tree.insert(b, 6, -0.1, "s") == DEAD and tree.insert(ba, 6, -0.1, "s") == DEAD
    assert tree.best_subtree(9)[0] == [aa, ab] and tree.lead() == 1
    assert tree.insert(0, 1, -0.1, "late") == a, "a committed token proposed late is found, not doubled"
    assert tree.advance(77) is False
    assert tree.best_subtree(9) == ([], []) and not tree.is_alive(aa)
    new = tree.sweep()
    assert set(new) == {0, a, tree_root_before := max(new)} and tree.root == new[tree_root_before]
    assert [tree.tokens[n] for n in tree.path] == [0, 1, 77]


@pytest.mark.parametrize(
    ("max_tokens", "eos", "emitted", "reason"),
    [
        (10, 12, (11, 12), FinishReason.STOP),
        (3, 99, (11, 12, 13), FinishReason.LENGTH),
        (1, 99, (11,), FinishReason.LENGTH),
        (3, 13, (11, 12, 13), FinishReason.STOP),
    ],
)
def test_a_window_is_cut_at_end_of_text_and_at_max_tokens(
    max_tokens: int, eos: int, emitted: tuple[int, ...], reason: FinishReason
) -> None:
    core = coordinator()
    core.handle(m.Submitted(Request(0, (1, 2), SamplingParams(max_tokens=max_tokens + 1), (eos,)), 0.0))
    run_round(core, [10], 0.0)
    propose(core, [11, 12, 13, 14], 0, 1)
    effects = run_round(core, [11, 12, 13, 14, 15], 1.0)
    emit = next(e for e in effects if isinstance(e, m.Emit))
    finish = next(e for e in effects if isinstance(e, m.Finish))
    assert emit.token_ids == emitted and finish.reason is reason
    assert finish.stats.output_tokens == 1 + len(emitted) and finish.stats.accepted <= len(emitted)
    assert not core.scheduler.running


def test_a_stop_takes_back_what_lies_behind_it() -> None:
    core = coordinator()
    core.handle(m.Submitted(Request(0, (1, 2), SamplingParams(max_tokens=9), ()), 0.0))
    run_round(core, [5], 0.0)
    propose(core, [6, 7], 0, 1)
    run_round(core, [6, 7, 8], 1.0)
    effects = core.handle(m.Stopped(0, FinishReason.STOP, 2.0, num_tokens=2))
    finish = next(e for e in effects if isinstance(e, m.Finish))
    assert finish.stats.output_tokens == 2 and not core.scheduler.running
    assert core.handle(m.Stopped(0, FinishReason.ABORT, 3.0)) == []


def test_a_dead_drafter_ends_the_wait_at_once() -> None:
    core = Coordinator([Source("toy", True)], Limits(), Controller(shared_device=True))
    core.handle(m.Submitted(Request(0, (1, 2), SamplingParams(max_tokens=9, schedule="sequential"), ()), 0.0))
    run_round(core, [5], 0.0)
    effects = core.handle(m.TargetReady(1.0))
    assert isinstance(effects[0], m.Grow) and isinstance(effects[1], m.Wait)
    core.handle(m.WorkerDied("toy", 1.1))
    assert isinstance(core.handle(m.TargetReady(1.2))[0], m.Verify)


def test_nobody_waits_for_a_drafter_that_has_nothing_to_say() -> None:
    """Under `parallel`, with leave for more steps: its text is longer than its context, say."""
    core = Coordinator([Source("toy", True)], Limits(), FixedPolicy((1, 1, 1)))
    core.handle(m.Submitted(Request(0, (1, 2), SamplingParams(max_tokens=9, schedule="parallel"), ()), 0.0))
    run_round(core, [5], 0.0)
    assert core.handle(m.TargetReady(0.1)) == [m.Wait(1.1)]
    propose(core, [], 0, 1)
    assert core.scheduler.running[0].sources["toy"].credits == 2
    assert isinstance(core.handle(m.TargetReady(0.2))[-1], m.Verify)


def test_waiting_requests_are_forgotten_when_stopped() -> None:
    core = coordinator(max_num_seqs=1)
    for i in range(2):
        core.handle(m.Submitted(Request(i, (1, 2), SamplingParams(), ()), 0.0))
    core.handle(m.TargetReady(0.0))
    effects = core.handle(m.Stopped(1, FinishReason.ABORT, 0.1))
    assert any(isinstance(e, m.Finish) and e.request_id == 1 for e in effects), "a waiting request must end too"
    assert not core.scheduler.waiting


def learnt(schedule: str, draft: Mapping[int, float], target: Mapping[int, float], per_token: float) -> Controller:
    """A controller that has seen these step times and one token in `per_token` seconds."""
    policy, load = Controller(shared_device=schedule == "sequential"), Load(schedule)  # type: ignore[arg-type]
    for nodes, elapsed in draft.items():
        policy.saw_draft_step(load, nodes, nodes, elapsed)
    for rows, elapsed in target.items():
        policy.saw_pass(load, 1, rows, 1, elapsed, per_token)
    return policy


def test_draft_steps_must_pay() -> None:
    load = Load("sequential")
    assert Controller(shared_device=True).draft_pays(load, [0.5], 0), "nothing is known yet: measure"
    policy = learnt("sequential", {1: 0.06}, {1: 0.10, 4: 0.13, 8: 0.17}, 0.10)
    assert policy.draft_pays(load, [0.9], 0) and not policy.draft_pays(load, [0.5], 0)
    assert policy.draft_pays(load, [0.5, 0.45], 0), "several nodes a step count together"


def test_a_free_running_draft_is_waited_for_while_the_target_is_the_slower() -> None:
    load = Load("parallel")
    policy = learnt("parallel", {1: 0.01, 4: 0.01}, {1: 0.1, 9: 0.1}, 0.025)
    assert policy.draft_pays(load, [0.9], 3) and not policy.draft_pays(load, [0.5], 3)
    assert not policy.draft_pays(load, [0.9], 9), "ten layers a pass: the draft is the slower"
    assert policy.patience(load) == pytest.approx(0.02)


def test_a_node_is_expanded_when_its_row_costs_less_than_it_saves() -> None:
    free = learnt("parallel", {1: 0.01, 5: 0.01}, {1: 0.1}, 0.05).leave(Load("parallel"), hit=True)
    dear = learnt("parallel", {1: 0.01, 5: 0.02}, {1: 0.1}, 0.05).leave(Load("parallel"), hit=True)
    assert free.min_chance == MIN_CHANCE and dear.min_chance == pytest.approx(0.25)
    assert free.widths == (Limits().max_draft_width,) * Limits().max_lead
    missed = learnt("parallel", {1: 0.01}, {1: 0.1}, 0.05).leave(Load("parallel"), hit=False)
    assert missed.widths[:3] == (1, 1, Limits().max_draft_width), "narrow after a miss, then wide"


def test_requests_that_share_draft_steps_make_them_cheap() -> None:
    """Rows cost nothing in steps of 8 and of 16 nodes, though one request's share of them differs."""
    load, policy = Load("parallel", 8), Controller(shared_device=False)
    for nodes, together in ((1, 8), (2, 8), (2, 16), (4, 16)):
        policy.saw_draft_step(load, nodes, together, 0.01 * nodes / together)
    assert policy.leave(load, hit=True).min_chance == MIN_CHANCE
    assert policy.costs_of(load).draft_share(1) == pytest.approx(0.01 / policy.costs_of(load).sharing.value)


def test_chances_are_believed_as_far_as_they_came_true() -> None:
    load, policy = Load("sequential"), Controller(shared_device=True)
    for rows, elapsed in ((1, 0.10), (4, 0.13), (1, 0.10)):
        policy.saw_pass(load, 1, rows, 1, elapsed, 0.10)
    verified = [policy.windows(load, [[0.2]]) == [1]]
    while verified[-1] and len(verified) < 300:
        policy.saw_pass(load, 1, 2, 1, 0.11, 0.10)  # never accepted
        verified.append(policy.windows(load, [[0.2]]) == [1])
    assert verified[0] and not verified[-1]


def test_a_window_is_as_wide_as_its_rows_pay() -> None:
    load = Load("sequential")
    assert Controller(shared_device=True).windows(load, [[0.9, 0.1]]) == [1], "nothing is known yet: the likely ones"
    policy = learnt("sequential", {}, {1: 0.10, 4: 0.106, 8: 0.18}, 0.10)
    times = policy.costs["sequential", 1].target
    assert times.at(2) == pytest.approx(0.102) and times.at(6) == pytest.approx(0.143)
    assert policy.windows(load, [[0.9, 0.05, 0.05, 0.05]]) == [3], "rows are nearly free up to the knee"
    assert policy.windows(load, [[0.9, 0.8, 0.7, 0.6, 0.5, 0.1]]) == [5], "behind it they must pay"
    assert policy.windows(load, [[0.01]]) == [0]


def test_requests_that_are_verified_together_compete_for_rows() -> None:
    load = Load("parallel", 2)
    policy = Controller(shared_device=False)
    for rows, elapsed in ((2, 0.10), (4, 0.104), (6, 0.18)):
        policy.saw_pass(load, 2, rows, 2, elapsed, 0.10)
    assert policy.windows(load, [[0.9, 0.8, 0.3], [0.2, 0.1]]) == [2, 0], "two rows are cheap, and go to the likely"
    alone = Load("parallel", 1)
    assert policy.windows(alone, [[0.9, 0.8, 0.3]]) == [3], "of one request alone nothing is known yet"


def test_what_is_pinned_is_not_decided() -> None:
    pinned = Controller(shared_device=False, pins=Pins(draft_width=3, window=2, lead=2))
    load = Load("parallel")
    assert set(pinned.leave(load, hit=True).widths) == {3}
    assert pinned.windows(load, [[0.01, 0.01]]) == [1]
    assert pinned.draft_pays(load, [0.01], 1) and not pinned.draft_pays(load, [0.99], 2)
    with pytest.raises(InvalidInputError, match="draft_width"):
        Pins(draft_width=0)
    with pytest.raises(InvalidInputError, match=r"pins\.window.*16.*max_window"):
        EngineConfig(pins=Pins(window=17))


def slow_once(usual: Callable[[int], float], least: int, seconds: float) -> Callable[[int], float]:
    """Step times of which the first over `least` rows or more takes long."""
    cold = [seconds]
    return lambda rows: cold.pop() if rows >= least and cold else usual(rows)


@pytest.mark.parametrize("schedule", ["sequential", "parallel"])
@pytest.mark.parametrize("cold", [(0.1, 0.02), (20.0, 0.02), (0.1, 0.5), (0.1, 20.0)])
def test_one_slow_step_does_not_end_speculation(schedule: Schedule, cold: tuple[float, float]) -> None:
    """The first one over several rows, or of the draft, may take long: a page fault, a kernel that is built."""
    model, speeds = ToyModel(200, top=0.8, sibling=0.7), []
    for target_cold, draft_cold in ((0.1, 0.02), cold):
        policy = Controller(shared_device=schedule == "sequential")
        target = ToyTarget(model, slow_once(lambda rows: 0.1 + 0.002 * rows, 2, target_cold))
        drafter = ToyDrafter(model, step_time=slow_once(lambda _: 0.02, 1, draft_cold))
        for number in range(2):  # the second answer counts
            params = SamplingParams(max_tokens=200, schedule=schedule)
            _, stats = simulate(Request(number, (1, 2), params), target, drafter, policy, Limits())
        speeds.append(stats.tokens_per_second)
    assert speeds[1] > 0.9 * speeds[0]


def test_what_never_pays_is_tried_less_and_less() -> None:
    load, policy = Load("sequential"), Controller(shared_device=True)
    policy.saw_draft_step(load, 1, 1, 1.0)
    policy.saw_pass(load, 1, 2, 1, 5.0, 0.1)
    policy.saw_pass(load, 1, 1, 1, 0.1, 0.1)
    drafted, verified = [], []
    for number in range(1, 300):
        candidates = [0.9] if policy.draft_pays(load, [0.9], 0) else []
        if candidates:
            drafted.append(number)
            policy.saw_draft_step(load, 1, 1, 1.0)
        (width,) = policy.windows(load, [candidates])
        verified += [number] * width
        policy.saw_pass(load, 1, 1 + width, 1, 5.0 if width else 0.1, 5.0 if width else 0.1)
    assert drafted == [31, 31 + 64, 31 + 64 + 128]
    assert set(verified) <= set(drafted)


def test_requests_that_wait_are_not_in_the_pass() -> None:
    """Four run, one is verified: its candidates came true, so they are believed."""
    load, policy = Load("sequential", 4), Controller(shared_device=True)
    for rows, elapsed in ((1, 0.10), (4, 0.13)):
        policy.saw_pass(load, 1, rows, 1, elapsed, 0.10)
    for _ in range(50):
        assert policy.windows(load, [[0.9]]) == [1]
        policy.saw_pass(load, 1, 2, 2, 0.11, 0.11)
    assert policy.costs_of(load).trust.value > 1.0


@pytest.mark.parametrize("schedule", ["sequential", "parallel"])
def test_the_time_per_token_is_that_of_all_answers_together(schedule: Schedule) -> None:
    """Requests that drift apart are not counted twice."""
    model, policy = ToyModel(200, top=0.8), Told(shared_device=schedule == "sequential")
    target, drafter = ToyTarget(model, lambda rows: 0.1), ToyDrafter(model, step_time=lambda _: 0.03)
    limits = Limits(max_num_seqs=3)
    requests = [Request(i, (1, 2 + i), SamplingParams(max_tokens=60, schedule=schedule)) for i in range(3)]
    simulation = Simulation(target, drafter, policy, limits)
    simulation.run(requests)
    assert 0.9 * simulation.now < sum(policy.since) <= simulation.now


class Told(Controller):
    """Writes the times between passes down."""

    def saw_pass(
        self, load: Load, requests: int, rows: int, tokens: int, elapsed: float, since_last: float | None
    ) -> None:
        self.since = [*getattr(self, "since", []), since_last or 0.0]
        super().saw_pass(load, requests, rows, tokens, elapsed, since_last)


def test_a_pause_is_no_waiting() -> None:
    core = Coordinator([Source("toy", True)], Limits(), FixedPolicy((1, 1, 1)))
    core.handle(m.Submitted(Request(0, (1, 2), SamplingParams(max_tokens=9, schedule="parallel"), ()), 0.0))
    run_round(core, [5], 0.0)
    assert core.handle(m.TargetReady(0.1)) == [m.Wait(1.1)]
    core.handle(m.Paused(0, True, 0.3))
    core.handle(m.Paused(0, False, 100.0))
    assert core.handle(m.TargetReady(200.0)) == [m.Wait(201.0)], "it waits anew"
    core.handle(m.Paused(0, True, 200.0))
    assert core.scheduler.running[0].stats.waited == pytest.approx(0.2)


def test_a_full_round_is_a_matter_of_a_millisecond(say: Callable[[str], None]) -> None:
    """Eight proposals of 32 nodes, a walk, a re-rooting, a query of 64 of 640 nodes; the median is printed."""
    limits = Limits(max_window=64, max_tree_nodes=1024)
    times = []
    for _ in range(30):
        core, proposals, verdict = big_round(limits)
        started = time.perf_counter()
        for proposal in proposals:
            core.handle(m.Proposed(proposal, 1.0))
        core.handle(m.Verified(verdict, 1.0))
        core.handle(m.TargetReady(1.0))
        times.append(time.perf_counter() - started)
        state = core.scheduler.running[0]
        assert state.window is not None and len(state.window.token_ids) == 64
        assert len(state.output_ids) > 10 and state.stats.hits == 1
    say(f"one round of the core: median {1e3 * statistics.median(times):.2f} ms")
    assert statistics.median(times) < 0.003, "the goal is 1 ms on a quiet core; this catches what is far off"


def big_round(limits: Limits) -> tuple[Coordinator, list[m.Proposal], m.Verdict]:
    """A core with 384 nodes in its tree and a window in flight, 256 more on their way, and the verdict."""
    core = Coordinator([Source("toy", True)], limits, FixedPolicy())
    core.handle(m.Submitted(Request(0, (1, 2), SamplingParams(max_tokens=900, schedule="parallel")), 0.0))
    run_round(core, [5], 0.0)
    incarnation = core.scheduler.running[0].sources["toy"].incarnation

    def grow(number: int) -> m.Proposal:
        """Nodes 4, 9, 14, ... make one long path; each has five children."""
        nodes = range(1 + 32 * number, 33 + 32 * number)
        parents = tuple(0 if node == 1 else max(1, node - 1 - node % 5) for node in nodes)
        return m.Proposal(
            "toy", 0, 0, 0, 1, nodes[0], parents, tuple(10 + node for node in nodes), (-0.05,) * 32,
            tuple(sorted(set(parents))), incarnation=incarnation,
        )  # fmt: skip

    for number in range(12):
        core.handle(m.Proposed(grow(number), 0.5))
    verify = core.handle(m.TargetReady(0.6))[-1]
    assert isinstance(verify, m.Verify)
    window = verify.windows[0]
    follow = {5: 11, 11: 14} | {token: token + 5 for token in range(14, 400, 5)}  # the target goes along the path
    ids = tuple(follow.get(token, 3) for token in window.token_ids)
    return core, [grow(number) for number in range(12, 20)], m.Verdict(0, window.step_id, ids, 0.1)


def test_a_draft_that_is_far_ahead_is_given_no_more_steps() -> None:
    core = Coordinator([Source("toy", True)], Limits(max_lead=4, max_window=1), FixedPolicy((1,) * 9))
    core.handle(m.Submitted(Request(0, (1, 2), SamplingParams(max_tokens=9, schedule="parallel")), 0.0))
    assert [e.widths for e in run_round(core, [5], 0.0) if isinstance(e, m.Grow)] == [(1, 1, 1, 1)]
    propose(core, [6, 7, 8, 9, 10, 11], 0, 1)
    assert not [e for e in run_round(core, [6], 0.0) if isinstance(e, m.Grow)], "five ahead"
    run_round(core, [7], 0.0)
    assert [e.widths for e in run_round(core, [8], 0.0) if isinstance(e, m.Grow)] == [(1,)], "three ahead"
