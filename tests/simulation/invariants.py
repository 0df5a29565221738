"""Invariants that must hold after every event, whatever happened before."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from langchain_card.core import messages as m
from langchain_card.core.request import FinishReason
from langchain_card.core.state import RequestState
from langchain_card.drafters.tree import DraftTree

if TYPE_CHECKING:
    from tests.simulation.world import World


def check(world: World) -> None:
    """Raise AssertionError if an invariant does not hold.

    - the emitted tokens are a prefix of the target's own answer;
    - an answer ends complete (`check_end`);
    - each submitted request waits, runs or has ended;
    - each candidate is below a prefix after which its drafter proposes it;
    - no two nodes of a draft share a KV slot;
    - all bounds hold;
    - an ended request holds nothing.
    """
    core, limits, scheduler = world.core, world.core.limits, world.core.scheduler
    for request_id, tokens in world.emitted.items():
        assert tokens == world.answers[request_id][: len(tokens)], "a token is not the target's"
    running, waiting = len(scheduler.running), len(scheduler.waiting)
    assert len(world.emitted) == running + waiting + len(world.finished), "a request was lost"
    assert scheduler.ended == len(world.finished), "a request was counted twice"
    assert running <= limits.num_seqs, "too many requests run"
    assert waiting <= limits.max_queue + limits.num_seqs, "too many requests wait"
    for state in (*scheduler.running.values(), *scheduler.waiting):
        assert state.window is not None or not state.pending, "a proposal that will never be taken in"
        emitted = world.emitted[state.request.request_id]
        assert tuple(state.output_ids) == emitted, "the committed tokens are not the emitted ones"
        _check_tree(world, state)
    with_kv = set(world.target.kv_lengths) if world.target is not None else set()
    assert with_kv <= set(core.scheduler.running), "an ended request holds KV"
    for draft in world.drafts.values():
        for tree in draft.drafter.trees.values():
            _check_slots(tree)
        assert draft.inbox or set(draft.worker.begun) <= set(scheduler.running), "an ended request holds a draft's KV"
    if len(world.finished) == world.scope.requests and world.ended:
        assert not any(draft.drafter.trees or draft.worker.begun for draft in world.drafts.values()), "a draft holds KV"


def _check_tree(world: World, state: RequestState) -> None:
    tree, limits = state.tree, world.core.limits
    assert [tree.tokens[node] for node in tree.path[1:]] == state.output_ids, "the tree does not hold the answer"
    assert len(tree) - len(tree.path) <= 2 * limits.max_tree_nodes, "the tree has no bound"
    for source in state.drafters.values():
        assert source.lead(tree) <= 2 * limits.max_lead, "candidates deeper than max_lead allows"
        assert source.granted <= limits.max_lead, "more steps granted than max_lead allows"
    check_prefixes(state, lambda prefix, source: world.model.candidates(prefix, world.numbers[source]))


def check_prefixes(
    state: RequestState, candidates: Callable[[tuple[int, ...], str], Sequence[tuple[int, float]]]
) -> None:
    """Raise AssertionError if a candidate is below a prefix after which its drafter does not propose it.

    Args:
        state: of a request.
        candidates: maps a prefix and the name of a drafter to the drafter's candidates.
    """
    tree = state.tree
    prefixes = {tree.root: (*state.request.prompt_ids, *state.output_ids)}
    for node in range(tree.root + 1, len(tree)):
        above = prefixes.get(tree.parents[node])
        if above is not None:
            proposed = candidates(above, tree.sources[node])
            assert any(tree.tokens[node] == token for token, _ in proposed), "a candidate below a wrong prefix"
            prefixes[node] = (*above, tree.tokens[node])


def _check_slots(tree: DraftTree) -> None:
    alive, used = {tree.root}, list(tree.free_slots)
    for node in range(tree.root + 1, len(tree.tokens)):
        if tree.parents[node] in alive:
            alive.add(node)
            if (slot := tree.slots.get(node)) is not None:
                used.append(slot)
    assert sorted(used) == list(range(tree.num_slots)), "a KV slot is lost or shared"


def check_end(world: World, request_id: int, reason: FinishReason) -> None:
    """Raise AssertionError if a request must not end now, for this reason.

    - an answer is complete: up to `max_tokens`, the end of text, or the point where its consumer stopped it;
    - a request fails only in scopes with `may_fail`.
    """
    assert request_id not in world.finished, "ended twice"
    emitted, whole = world.emitted[request_id], world.answers[request_id]
    if request_id == world.stopping:
        assert reason in (FinishReason.ABORT, FinishReason.STOP), "the reason is not the consumer's"
    elif reason is FinishReason.ERROR:
        assert world.scope.may_fail, "a request failed in a scope without may_fail"
    else:
        end = FinishReason.STOP if whole[-1] == world.scope.eos else FinishReason.LENGTH
        assert emitted == whole and reason is end, "the answer is not complete"


def check_window(world: World, window: m.Window) -> None:
    """Raise AssertionError if a window does not start at the last committed token, or has too many rows."""
    state = world.core.scheduler.running[window.request_id]
    assert window is state.window, "two windows of one request in flight"
    assert len(window.token_ids) <= world.core.limits.max_window, "more rows than max_window"
    last = state.output_ids[-1] if state.output_ids else state.request.prompt_ids[-1]
    assert window.token_ids[0] == last, "the window does not start at the last committed token"
    left = state.request.params.max_tokens - len(state.output_ids)
    assert len(window.token_ids) <= left, "more rows than tokens that may follow"
