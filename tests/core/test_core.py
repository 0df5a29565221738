"""The pure core, part by part. Its behaviour under every interleaving: test_explorer.py and test_planted.py."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from unittest.mock import ANY

import pytest

from langchain_card.core import messages as m
from langchain_card.core.candidates import DEAD, CandidateTree
from langchain_card.core.controller import Controller
from langchain_card.core.coordinator import Coordinator
from langchain_card.core.drafter_state import DrafterState, is_valid
from langchain_card.core.query import DrafterTraits
from langchain_card.core.request import FinishReason, Request, SamplingParams
from langchain_card.core.walk import ExactRule
from langchain_card.drafters.tree import DraftTree
from langchain_card.limits import Limits, Pins
from tests.simulation import FixedPolicy
from tests.support.rounds import coordinator, propose, run_round


def test_walk_follows_the_branch_that_the_target_chose() -> None:
    window = m.Window(0, 0, 5, token_ids=(1, 10, 11, 12, 13), parents=(m.ROOT, 0, 0, 2, 3))

    def walk(*target_ids: int) -> tuple[list[int], list[int]]:
        return ExactRule().walk(window, m.Verdict(0, 0, target_ids), Request(0, (1,), SamplingParams()))

    assert walk(11, 0, 12, 13, 14) == ([0, 2, 3, 4], [11, 12, 13, 14])
    assert walk(12, 10, 0, 0, 0) == ([0], [12])
    assert walk(10, 7, 0, 0, 0) == ([0, 1], [10, 7])


def test_tree_re_roots_and_keeps_what_survives() -> None:
    tree = CandidateTree(0)
    a, b = tree.insert(0, 1, -0.1, "s"), tree.insert(0, 2, -3.0, "s")
    aa, ab, ba = tree.insert(a, 3, -0.1, "s"), tree.insert(a, 4, -2.5, "s"), tree.insert(b, 5, -0.1, "s")
    assert tree.best_subtree(2)[0] == [a, aa]
    nodes, chances = tree.best_subtree(9)
    assert nodes[:3] == [a, aa, ab] and len(nodes) == 5
    assert chances == sorted(chances, reverse=True) and chances[1] == pytest.approx(math.exp(-0.2))
    assert tree.advance(1) is True
    assert tree.insert(b, 6, -0.1, "s") == DEAD and tree.insert(ba, 6, -0.1, "s") == DEAD
    assert tree.best_subtree(9)[0] == [aa, ab] and tree.depth(aa) == tree.depth(ab) == 1
    assert tree.insert(0, 1, -0.1, "late") == a, "a committed token proposed late is found, not doubled"
    assert tree.advance(77) is False
    assert tree.best_subtree(9) == ([], []) and not tree.is_alive(aa)
    new = tree.sweep()
    stay = [node for node, number in enumerate(new) if number != DEAD]
    assert stay[:2] == [0, a] and new[stay[2]] == tree.root == 2 and len(stay) == 3 and new[DEAD] == DEAD
    assert [tree.tokens[n] for n in tree.path] == [0, 1, 77]


def test_siblings_of_drafters_that_disagree_share_one_chance() -> None:
    tree = CandidateTree(0)
    a, b = tree.insert(0, 1, math.log(0.8), "s"), tree.insert(0, 2, math.log(0.8), "t")
    aa = tree.insert(a, 3, math.log(0.5), "s")
    nodes, chances = tree.best_subtree(9)
    assert nodes == [a, b, aa] and chances == pytest.approx([0.5, 0.5, 0.25])
    assert tree.best_chain(9) == ([a, aa], pytest.approx([0.5, 0.25]))


def test_who_knows_has_the_last_word() -> None:
    """Whatever others say of a candidate, before or after: listed by a model it has the model's chance."""
    text = {"source": "text", "trusted_logps": (math.log(0.6), math.log(0.02))}
    for text_first in (False, True):
        tree = CandidateTree(0)
        if text_first:
            tree.insert(0, 1, math.log(0.9), **text)  # type: ignore[arg-type]
        node = tree.insert(0, 1, math.log(0.3), "model", from_model=True)
        assert tree.insert(0, 1, math.log(0.9), **text) == node  # type: ignore[arg-type]
        tree.insert(0, 2, math.log(0.9), **text)  # type: ignore[arg-type]
        tree.insert(0, 3, math.log(0.4), "model", from_model=True)
        assert tree.best_subtree(9)[1] == pytest.approx([0.6 / 1.3, 0.4 / 1.3, 0.3 / 1.3])
        tree.mark_expanded([0])  # it has listed all that is likely
        assert [tree.tokens[node] for node in tree.best_subtree(9)[0]] == [3, 1, 2]
        assert tree.best_subtree(9)[1] == pytest.approx([0.4, 0.3, 0.02])
        assert [tree.is_unlisted(node) for node in tree.best_subtree(9)[0]] == [False, False, True]
        tree.advance(3)
        new = tree.sweep()
        assert (
            tree.expanded_by_model == {new[0]}
            and tree.listed_by_model == {tree.root}
            and tree.unlisted_logps[tree.root] == math.log(0.4)
        )


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


def test_answers_that_were_not_written_to_their_end_teach_no_length() -> None:
    policy = Controller(shared_device=True)
    core = Coordinator([DrafterTraits("toy", True, True)], Limits(), policy)
    for reason, learned in ((FinishReason.ABORT, False), (FinishReason.ERROR, False), (FinishReason.STOP, True)):
        core.handle(m.Submitted(Request(0, (1, 2), SamplingParams(max_tokens=9), ()), 0.0))
        run_round(core, [5], 0.0)
        before = policy.answers.value
        core.handle(m.Stopped(0, reason, 2.0))
        assert (policy.answers.value != before) == learned


def test_a_dead_drafter_ends_the_wait_at_once() -> None:
    core = Coordinator([DrafterTraits("toy", True, True)], Limits(), Controller(shared_device=True))
    core.handle(m.Submitted(Request(0, (1, 2), SamplingParams(max_tokens=9, schedule="sequential"), ()), 0.0))
    run_round(core, [5], 0.0)
    effects = core.handle(m.TargetReady(1.0))
    assert [type(effect) for effect in effects] == [m.Correct, m.Grow, m.Wait]
    core.handle(m.WorkerDied("toy", 1.1))
    assert isinstance(core.handle(m.TargetReady(1.2))[0], m.Verify)


def test_a_drafter_without_steps_is_corrected_before_its_next_ones() -> None:
    policy = Controller(shared_device=True, pins=Pins(lead=0))
    core = Coordinator([DrafterTraits("toy", True, True)], Limits(), policy)
    core.handle(m.Submitted(Request(0, (1, 2), SamplingParams(max_tokens=9, schedule="sequential"), ()), 0.0))
    for token in (5, 6):
        assert not any(isinstance(effect, m.Correct) for effect in run_round(core, [token], 0.0))
    policy.pins = Pins(lead=1)
    assert core.handle(m.TargetReady(1.0))[:2] == [m.Correct("toy", 0, 0, (5, 6)), m.Grow("toy", 0, (1,), ANY, ANY)]


def test_a_change_of_schedule_begins_anew_only_on_drafters_that_share_the_device() -> None:
    """Others would enter the whole text into their tables once more."""
    traits, limits = [DrafterTraits("model", True, True), DrafterTraits("table", False)], Limits(max_num_seqs=2)
    core = Coordinator(traits, limits, FixedPolicy())
    core.handle(m.Submitted(Request(0, (1, 2), SamplingParams(max_tokens=9), ()), 0.0))
    run_round(core, [5], 0.0)
    core.handle(m.Submitted(Request(1, (3, 4), SamplingParams(max_tokens=9), ()), 0.1))
    effects = core.handle(m.TargetReady(0.1))
    assert {state.schedule for state in core.scheduler.running.values()} == {"sequential"}
    begun = [(effect.worker, effect.request.request_id) for effect in effects if isinstance(effect, m.Begin)]
    assert ("model", 0) in begun and ("table", 0) not in begun
    assert m.End("model", 0) in effects and m.End("table", 0) not in effects


def test_nobody_waits_for_a_drafter_that_has_nothing_to_say() -> None:
    """Under `parallel`, with leave for more steps: its text is longer than its context, say."""
    core = Coordinator([DrafterTraits("toy", True, True)], Limits(), FixedPolicy((1, 1, 1)))
    core.handle(m.Submitted(Request(0, (1, 2), SamplingParams(max_tokens=9, schedule="parallel"), ()), 0.0))
    run_round(core, [5], 0.0)
    assert core.handle(m.TargetReady(0.1)) == [m.Wait(1.1)]
    propose(core, [], 0, 1)
    assert core.scheduler.running[0].drafters["toy"].granted == 2
    assert isinstance(core.handle(m.TargetReady(0.2))[-1], m.Verify)


def test_waiting_requests_are_forgotten_when_stopped() -> None:
    core = coordinator(max_num_seqs=1)
    for i in range(2):
        core.handle(m.Submitted(Request(i, (1, 2), SamplingParams(), ()), 0.0))
    core.handle(m.TargetReady(0.0))
    effects = core.handle(m.Stopped(1, FinishReason.ABORT, 0.1))
    assert any(isinstance(e, m.Finish) and e.request_id == 1 for e in effects), "a waiting request must end too"
    assert not core.scheduler.waiting


def test_a_pause_is_no_waiting() -> None:
    core = Coordinator([DrafterTraits("toy", True, True)], Limits(), FixedPolicy((1, 1, 1)))
    core.handle(m.Submitted(Request(0, (1, 2), SamplingParams(max_tokens=9, schedule="parallel"), ()), 0.0))
    run_round(core, [5], 0.0)
    assert core.handle(m.TargetReady(0.1)) == [m.Wait(1.1)]
    core.handle(m.Paused(0, True, 0.3))
    core.handle(m.Paused(0, False, 100.0))
    assert core.handle(m.TargetReady(200.0)) == [m.Wait(201.0)], "it waits anew"
    core.handle(m.Paused(0, True, 200.0))
    assert core.scheduler.running[0].stats.waited == pytest.approx(0.2)


def test_no_time_between_passes_is_learned_where_the_thread_was_interrupted() -> None:
    gaps = list[float | None]()
    policy = FixedPolicy()
    policy.observe_pass = lambda *seen: gaps.append(seen[-1])  # type: ignore[method-assign]
    core = Coordinator([], Limits(), policy)
    core.handle(m.Submitted(Request(0, (1, 2), SamplingParams(max_tokens=9), ()), 0.0))
    for now in (1.0, 2.0, 9.0, 10.0):
        if now == 9.0:
            assert core.handle(m.Interrupted(8.0)) == []
        run_round(core, [5], now)
    assert gaps == [None, 1.0, None, 1.0]


def test_a_paused_request_is_no_load() -> None:
    limits, policy = Limits(max_num_seqs=4), Controller(shared_device=True, overlaps=True)
    core = Coordinator([DrafterTraits("toy", True, True)], limits, policy)
    for number in range(3):
        core.handle(m.Submitted(Request(number, (1, 2), SamplingParams(max_tokens=9), ()), 0.0))
    core.handle(m.TargetReady(0.0))
    running = core.scheduler.running
    assert core.scheduler.load(running[0]).num_seqs == 3
    for number in (1, 2):
        core.handle(m.Paused(number, True, 0.1))
    assert core.scheduler.load(running[0]).num_seqs == 1
    core.handle(m.Stopped(1, FinishReason.ABORT, 0.2))
    core.handle(m.Draining(0.3))
    assert core.scheduler.load(running[0]).num_seqs == 2, "what nobody reads is written to its end"


def test_a_full_round_is_a_matter_of_a_millisecond(say: Callable[[str], None]) -> None:
    """Eight proposals of 32 nodes, a walk, a re-rooting, a query of 64 of 640 nodes. More: `benchmarks/rounds.py`."""
    limits = Limits(max_window=64, max_tree_nodes=1024)
    times = []
    for _ in range(30):
        core, proposals, verdict = big_round(limits)
        started = time.thread_time()
        for proposal in proposals:
            core.handle(m.Proposed(proposal, 1.0))
        core.handle(m.Verified(verdict, 1.0))
        core.handle(m.TargetReady(1.0))
        times.append(time.thread_time() - started)
        state = core.scheduler.running[0]
        assert state.window is not None and len(state.window.token_ids) == 64
        assert len(state.output_ids) > 10 and state.stats.hits == 1
    say(f"one round of the core: {1e3 * min(times):.2f} ms, median {1e3 * statistics.median(times):.2f}")
    assert min(times) < 0.005, "the goal is 1 ms on a quiet core; this catches what is far off"


def big_round(limits: Limits) -> tuple[Coordinator, list[m.Proposal], m.Verdict]:
    """A core with 384 nodes in its tree and a window in flight, 256 more on their way, and the verdict."""
    core = Coordinator([DrafterTraits("toy", True, True)], limits, FixedPolicy())
    core.handle(m.Submitted(Request(0, (1, 2), SamplingParams(max_tokens=900, schedule="parallel")), 0.0))
    run_round(core, [5], 0.0)
    incarnation = core.scheduler.running[0].drafters["toy"].incarnation

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


def test_two_corrections_without_a_step_between_leave_a_proposal_that_is_valid() -> None:
    """A child that was held back becomes a node with the first, and the root with the second: nobody was told of it."""
    draft, core_tree, source = DraftTree((1,), (), 8), CandidateTree(1), DrafterState()
    draft.expand(draft.root, (3, 2), (-5.0, -6.0))
    draft.expand(known(draft, draft.root, 3), (4, 5), (-0.1, -6.0))
    assert source.admit(first := draft.publish("toy", 0), core_tree, 10) and 5 not in first.token_ids
    draft.apply(0, (3,))
    draft.apply(1, (5,))
    draft.expand(draft.root, (6, 7), (-0.2, -2.0))
    proposal = draft.publish("toy", 0)
    assert is_valid(proposal) and proposal.token_ids == (6, 7) and set(proposal.parents) == {proposal.root}


def known(draft: DraftTree, parent: int, token: int) -> int:
    node = draft.known(parent, token)
    assert node is not None
    return node


def test_a_round_of_64_nodes_draft_tree_included(say: Callable[[str], None]) -> None:
    """A draft step over 64 nodes of three children each, beside a window of 64; the verdict; the next window."""
    limits = Limits(max_window=64, max_lead=64, max_draft_width=64, max_tree_nodes=16384)
    core, draft = (
        Coordinator([DrafterTraits("toy", True, True)], limits, FixedPolicy((64,) * 64)),
        DraftTree((1,), (), 4096),
    )
    core.handle(m.Submitted(Request(0, (1,), SamplingParams(max_tokens=9000, schedule="parallel"), ()), 0.0))
    core.handle(m.TargetReady(0.0))
    state, times = core.scheduler.running[0], []
    for _ in range(40):
        for _ in range(4):
            step(core, draft)
        started = time.thread_time()
        step(core, draft)
        assert state.window is not None
        ids = tuple(token + 1 for token in state.window.token_ids)  # the target takes first children
        core.handle(m.Verified(m.Verdict(0, state.window.step_id, ids), 0.0))
        core.handle(m.TargetReady(0.0))
        draft.apply(len(draft.output_ids), state.output_ids[len(draft.output_ids) :])
        times.append(time.thread_time() - started)
    assert state.stats.mean_window > 50 and state.stats.mean_accepted_length > 3
    say(f"one round of 64 nodes: {1e3 * min(times):.2f} ms, median {1e3 * statistics.median(times):.2f}")
    assert min(times[len(times) // 2 :]) < 0.008, "the goal is 1 ms on a quiet core; this catches what is far off"


def step(core: Coordinator, draft: DraftTree) -> None:
    """One step of a draft that finds three children under everything."""
    nodes = draft.choose(64)
    for node in nodes if nodes != [draft.root] else ():
        draft.place(node)
    for node in nodes:
        token = draft.tokens[node]
        draft.expand(node, (token + 1, token + 10_000, token + 20_000), (-0.2, -2.0, -3.5))
    incarnation = core.scheduler.running[0].drafters["toy"].incarnation
    core.handle(m.Proposed(replace(draft.publish("toy", 0, forwarded=len(nodes)), incarnation=incarnation), 0.0))


def test_a_draft_that_is_far_ahead_is_given_no_more_steps() -> None:
    core = Coordinator([DrafterTraits("toy", True, True)], Limits(max_lead=4, max_window=1), FixedPolicy((1,) * 9))
    core.handle(m.Submitted(Request(0, (1, 2), SamplingParams(max_tokens=9, schedule="parallel")), 0.0))
    assert [e.widths for e in run_round(core, [5], 0.0) if isinstance(e, m.Grow)] == [(1, 1, 1, 1)]
    propose(core, [6, 7, 8, 9, 10, 11], 0, 1)
    assert not [e for e in run_round(core, [6], 0.0) if isinstance(e, m.Grow)], "five ahead"
    run_round(core, [7], 0.0)
    assert [e.widths for e in run_round(core, [8], 0.0) if isinstance(e, m.Grow)] == [(1,)], "three ahead"
