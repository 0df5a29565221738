"""What must hold after every event, whatever happened before."""

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
    """Raises AssertionError when an invariant does not hold.

    - the emitted tokens begin the target's own answer, each once and in order;
    - an answer ends whole (`check_end`);
    - requests submitted are those that wait, run and have ended;
    - every candidate sits under a prefix from which its drafter proposes it;
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
        assert state.window is not None or not state.pending, "a proposal that nobody takes in"
        emitted = world.emitted[state.request.request_id]
        assert tuple(state.output_ids) == emitted, "what is committed is not what was emitted"
        _check_tree(world, state)
    held = set(world.target.held) if world.target is not None else set()
    assert held <= set(core.scheduler.running), "an ended request holds KV"
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
        assert source.lead(tree) <= 2 * limits.max_lead, "candidates deeper than may be"
        assert source.granted <= limits.max_lead, "more leave than there may be lead"
    check_prefixes(state, lambda prefix, source: world.model.candidates(prefix, world.numbers[source]))


def check_prefixes(
    state: RequestState, candidates: Callable[[tuple[int, ...], str], Sequence[tuple[int, float]]]
) -> None:
    """Raises AssertionError unless every candidate sits under a prefix from which its drafter proposes it.

    Args:
        state: of a request.
        candidates: what a drafter says after a prefix, given its name.
    """
    tree = state.tree
    prefixes = {tree.root: (*state.request.prompt_ids, *state.output_ids)}
    for node in range(tree.root + 1, len(tree)):
        above = prefixes.get(tree.parents[node])
        if above is not None:
            proposed = candidates(above, tree.sources[node])
            assert any(tree.tokens[node] == token for token, _ in proposed), "a candidate under a wrong prefix"
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
    """Raises AssertionError unless a request may end now, for this reason.

    - an answer is whole: cut at `max_tokens`, at the end of text, or where its consumer wanted no more;
    - a request fails only where faults may end one.
    """
    assert request_id not in world.finished, "ended twice"
    emitted, whole = world.emitted[request_id], world.answers[request_id]
    if request_id == world.stopping:
        assert reason in (FinishReason.ABORT, FinishReason.STOP), "another reason than the consumer's"
    elif reason is FinishReason.ERROR:
        assert world.scope.may_fail, "a request failed without need"
    else:
        end = FinishReason.STOP if whole[-1] == world.scope.eos else FinishReason.LENGTH
        assert emitted == whole and reason is end, "the answer is not whole"


def check_window(world: World, window: m.Window) -> None:
    """Raises AssertionError unless a window starts at the last committed token and has no row too many."""
    state = world.core.scheduler.running[window.request_id]
    assert window is state.window, "two windows of one request in flight"
    assert len(window.token_ids) <= world.core.limits.max_window, "more rows than max_window"
    last = state.output_ids[-1] if state.output_ids else state.request.prompt_ids[-1]
    assert window.token_ids[0] == last, "the window does not start at the last committed token"
    left = state.request.params.max_tokens - len(state.output_ids)
    assert len(window.token_ids) <= left, "more rows than tokens that may follow"
