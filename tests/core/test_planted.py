"""Bugs planted into the core, each of which the explorer must find."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from langchain_card.core import coordinator, drafter_state, lifecycle, proposals, query
from langchain_card.core import messages as m
from langchain_card.core import walk as walking
from langchain_card.core.candidates import CandidateTree
from langchain_card.core.coordinator import Coordinator
from langchain_card.core.drafter_state import DrafterState
from langchain_card.core.lifecycle import Lifecycle
from langchain_card.core.proposals import Intake
from langchain_card.core.request import FinishReason, Request, SamplingParams
from langchain_card.core.scheduler import Scheduler
from langchain_card.core.walk import ExactRule, cut
from langchain_card.drafters import tree as drafters
from langchain_card.drafters.tree import DraftTree
from tests.simulation import FixedPolicy, RandomChooser, Violation, exhaust, run, scopes

Patch = pytest.MonkeyPatch


def caught(reason: str, world: str = "", faults: tuple[str, ...] | None = None, first: int = 0) -> None:
    """Check that the exploration of a world, or one of many random runs with some faults, breaks with this reason.

    Args:
        reason: pattern that the violation must match.
        world: name of an exhaustive world; "" for random runs.
        faults: of the random runs; None is all.
        first: seed of the first run; no seed before it finds the bug.
    """
    with pytest.raises(Violation, match=reason):
        if world:
            exhaust(scopes.named(world))
        for seed in range(first, 0 if world else 200):
            scope = scopes.long_text(seed)
            if faults is not None:
                scope = replace(scope, faults={fault: scope.faults[fault] for fault in faults})
            run(scope, RandomChooser(seed, 0.02), seed=seed)


def replaced(function: Callable[..., Any], old: str, new: str, module: Any) -> Any:
    """The function with a piece of its source replaced, compiled where it came from."""
    import inspect
    import textwrap

    source = textwrap.dedent(inspect.getsource(function))
    assert old in source, "the bug no longer fits the code"
    space: dict[str, Any] = {}
    exec("from __future__ import annotations\n" + source.replace(old, new), vars(module), space)
    return space[function.__name__]


def remove_incarnations(monkeypatch: Patch) -> None:
    old = "proposal.incarnation != self.incarnation or "
    monkeypatch.setattr(DrafterState, "_passes_fences", replaced(DrafterState._passes_fences, old, "", drafter_state))
    monkeypatch.setattr(Intake, "is_current", lambda self, source, proposal: source is not None)


def test_planted_no_epoch_fence(monkeypatch: Patch) -> None:
    """All trees of a drafter share one numbering, whichever of them a proposal is from."""
    monkeypatch.setattr(
        DrafterState, "admit", replaced(DrafterState.admit, "proposal.epoch > self.epoch", "False", drafter_state)
    )
    caught("wrong prefix", faults=("lose", "repeat"), first=19)


def test_planted_no_incarnation_fence(monkeypatch: Patch) -> None:
    """Proposals of a drafter that died meet the numbering of its successor."""
    remove_incarnations(monkeypatch)
    caught("wrong prefix|list index", faults=("kill", "lose"), first=2)


def test_planted_stale_verdict_accepted(monkeypatch: Patch) -> None:
    """The answer of a target that was killed counts for the window that its successor works on."""
    bad = replaced(Coordinator._commit, " or state.window.step_id != verdict.step_id", "", coordinator)
    monkeypatch.setattr(Coordinator, "_commit", bad)
    caught("target's|KV|range|without may_fail", "the target dies and comes back")


def test_planted_lost_proposal_shifts_the_numbering(monkeypatch: Patch) -> None:
    """What was lost leaves no gap, so that all later numbers mean other nodes."""
    bad = replaced(
        DrafterState.admit, "self.nodes += [DEAD] * (proposal.first - len(self.nodes))", "pass", drafter_state
    )
    monkeypatch.setattr(DrafterState, "admit", bad)
    caught("wrong prefix|out of range", faults=("lose",))


def test_planted_cache_not_shifted_after_a_hit(monkeypatch: Patch) -> None:
    """The root stays where it was when its child came true."""

    def advance(self: CandidateTree, token: int) -> bool:
        hit = token in self._children.get(self.root, {})
        self.path.append(self.root)
        return hit

    monkeypatch.setattr(CandidateTree, "advance", advance)
    caught("the tree does not hold the answer", "two drafters")


def test_planted_window_off_by_one(monkeypatch: Patch) -> None:
    """A row more than the window or the answer has room for."""
    old, new = "min(self.limits.max_window, state.tokens_left) - 1", "min(self.limits.max_window, state.tokens_left)"
    monkeypatch.setattr(query.Query, "_budget", replaced(query.Query._budget, old, new, query))
    caught("more rows|max_window|^assert", "two drafters")


def test_planted_bonus_dropped(monkeypatch: Patch) -> None:
    """The target's token after the last accepted candidate is thrown away."""

    walk = ExactRule.walk

    def walk_without_bonus(*arguments: Any) -> tuple[list[int], list[int]]:
        rows, tokens = walk(*arguments)
        return (rows[:-1], tokens[:-1]) if len(rows) > 1 else (rows, tokens)

    monkeypatch.setattr(ExactRule, "walk", walk_without_bonus)
    with pytest.raises(AssertionError):
        check_bonus()


def test_planted_end_of_text_ignored_inside_a_window(monkeypatch: Patch) -> None:
    """Only the last token of a round is looked at."""

    def careless(tokens: list[int], request: Request, num_output: int) -> Any:
        ends = tokens[-1] in request.eos_ids
        return (tokens, FinishReason.STOP) if ends else cut(tokens, Request(0, (1,), request.params, ()), num_output)

    check_end_of_text()
    monkeypatch.setattr(coordinator, "cut", careless)
    with pytest.raises(AssertionError):
        check_end_of_text()


def test_planted_first_kept_row_dropped(monkeypatch: Patch) -> None:
    """The target is not told that the first row of the last window was committed."""
    bad = replaced(Coordinator._commit, "tuple(rows[: len(tokens)])", "tuple(rows[1 : len(tokens)])", coordinator)
    monkeypatch.setattr(Coordinator, "_commit", bad)
    caught("does not start where the KV ends", "two requests")


def test_planted_kept_rows_survive_a_new_beginning(monkeypatch: Patch) -> None:
    """A target that read the whole answer again is told to keep rows of a window that it never saw."""
    bad = replaced(Lifecycle._begin, "state.stats.schedule, state.kept_rows = state.schedule, ()", "pass", lifecycle)
    monkeypatch.setattr(Lifecycle, "_begin", bad)
    with pytest.raises(AssertionError, match="kept rows"):
        check_a_new_beginning()


def test_planted_one_source_takes_anothers_ids(monkeypatch: Patch) -> None:
    """All drafters share one numbering. (Nobody dies here, so the fence that is left out as well is not missed.)"""
    old, new = "state.drafters.get(proposal.source)", "next(iter(state.drafters.values()), None)"
    monkeypatch.setattr(Coordinator, "_receive", replaced(Coordinator._receive, old, new, coordinator))
    monkeypatch.setattr(Intake, "absorb", replaced(Intake.absorb, old, new, proposals))
    remove_incarnations(monkeypatch)
    caught("wrong prefix|out of range", faults=())


def test_planted_correction_not_cumulative(monkeypatch: Patch) -> None:
    """A drafter that missed a correction is told the newest tokens as if it had not."""
    old = "tuple(state.output_ids[drafter.applied_len :])"
    bad = replaced(query.correct, old, "tuple(state.output_ids[-1:])", query)
    for module in (query, lifecycle):
        monkeypatch.setattr(module, "correct", bad)
    caught("wrong prefix")


def test_planted_sweep_without_renumbering(monkeypatch: Patch) -> None:
    """Dead nodes are swept out of the tree, and the drafters' maps still show the old numbers."""
    monkeypatch.setattr(DrafterState, "renumber", lambda self, new: None)
    caught("wrong prefix|out of range")


def test_planted_the_target_waits_for_its_draft_for_ever(monkeypatch: Patch) -> None:
    """A lost message or a dead drafter stops the answer."""
    monkeypatch.setattr(FixedPolicy, "patience", lambda self, load: math.inf)
    caught("no end can be reached|nothing can happen", "lost and repeated messages")


def test_planted_a_slot_is_freed_twice(monkeypatch: Patch) -> None:
    """A draft's KV slots that are free already are freed again with a correction."""
    old, new = "self.free_slots += ", "self.free_slots += self.free_slots; self.free_slots += "
    monkeypatch.setattr(DraftTree, "_re_root", replaced(DraftTree._re_root, old, new, drafters))
    caught("KV slot is lost or shared", "one after the other")


def test_planted_a_slot_is_used_twice(monkeypatch: Patch) -> None:
    """A hit frees the slots of the subtree that survives."""
    bad = replaced(DraftTree._re_root, "slots.pop(node)", "slots[node]", drafters)
    monkeypatch.setattr(DraftTree, "_re_root", bad)
    caught("KV slot is lost or shared", "a draft dies between two steps")


def test_planted_a_new_numbering_in_the_old_epoch(monkeypatch: Patch) -> None:
    """A draft's tree that grew long is numbered anew, and the cache is not told."""
    monkeypatch.setattr(drafters, "MAX_NODES", 8)
    run(scopes.long_text(1), RandomChooser(1, 0.02))
    monkeypatch.setattr(DraftTree, "_renumber", replaced(DraftTree._renumber, "self.epoch += 1", "pass", drafters))
    caught("wrong prefix")


def test_planted_the_place_of_one_who_was_put_back_stays_taken(monkeypatch: Patch) -> None:
    """A request waits and runs at once."""
    monkeypatch.setattr(Scheduler, "put_back", lambda self, state: self.waiting.appendleft(state))
    caught("was lost", "the target dies and comes back")


def test_planted_an_answer_ends_early(monkeypatch: Patch) -> None:
    """One token is missing, and the reason is that of a whole answer."""
    monkeypatch.setattr(coordinator, "cut", replaced(cut, "request.params.max_tokens - num", "2 - num", walking))
    caught("not complete", "one after the other")


def test_planted_a_target_that_dies_takes_all_requests_with_it(monkeypatch: Patch) -> None:
    """Answers end where they would go on."""
    old, new = "culprits if restart_at is not None else list(self.scheduler.waiting)", "list(self.scheduler.waiting)"
    monkeypatch.setattr(Coordinator, "_on_died", replaced(Coordinator._on_died, old, new, coordinator))
    caught("without may_fail", "the target dies and comes back")


def test_planted_end_not_sent(monkeypatch: Patch) -> None:
    """An ended request keeps its KV on the workers."""
    monkeypatch.setattr(Lifecycle, "release", lambda self, state, now: [])
    caught("holds KV", "a consumer leaves")


def test_planted_what_came_during_a_pass_is_forgotten(monkeypatch: Patch) -> None:
    """Proposals that wait for a verdict are never taken in when the pass ran out of memory."""
    bad = replaced(Coordinator._on_out_of_memory, "self.intake.absorb(state)", "pass", coordinator)
    monkeypatch.setattr(Coordinator, "_on_out_of_memory", bad)
    caught("never be taken in")


def test_planted_a_long_text_is_read_only_once_there_is_another_window(monkeypatch: Patch) -> None:
    monkeypatch.setattr(Scheduler, "is_reading", False)
    caught("no end can be reached", "long texts")


# What the planted bugs above break, on the code as it is.


def commit_three_rows(eos_ids: tuple[int, ...]) -> tuple[int, ...]:
    """What is emitted when the target agrees with both candidates of a window."""
    core = Coordinator((), scopes.WIDE, scopes.POLICY)
    core.handle(m.Submitted(Request(0, (1, 2), SamplingParams(max_tokens=9), eos_ids), 0.0))
    core.handle(m.TargetReady(0.0))
    state = core.scheduler.running[0]
    assert state.window is not None
    state.tree.insert(0, 11, -0.1, "toy")
    state.tree.insert(1, 12, -0.1, "toy")
    state.window = m.Window(0, state.window.step_id, 1, (2, 11, 12), (m.ROOT, 0, 1))
    emit, *_ = core.handle(m.Verified(m.Verdict(0, state.window.step_id, (11, 12, 13)), 0.0))
    assert isinstance(emit, m.Emit)
    return emit.token_ids


def check_bonus() -> None:
    assert commit_three_rows(()) == (11, 12, 13)


def check_end_of_text() -> None:
    assert commit_three_rows((12,)) == (11, 12)


def check_a_new_beginning() -> None:
    core = Coordinator((), scopes.WIDE, scopes.POLICY)
    core.handle(m.Submitted(Request(0, (1, 2), SamplingParams(max_tokens=9)), 0.0))
    verify = core.handle(m.TargetReady(0.0))[-1]
    assert isinstance(verify, m.Verify)
    core.handle(m.Verified(m.Verdict(0, verify.windows[0].step_id, (11,)), 0.0))
    core.handle(m.WorkerDied(m.TARGET, 0.0))
    core.handle(m.WorkerStarted(m.TARGET, 0.0))
    verify = core.handle(m.TargetReady(0.0))[-1]
    assert isinstance(verify, m.Verify)
    assert not verify.windows[0].kept_rows, "kept rows of a window that this target never saw"


@pytest.mark.parametrize("check", [check_bonus, check_end_of_text, check_a_new_beginning])
def test_planted_checks_hold_without_a_bug(check: Callable[[], None]) -> None:
    check()
