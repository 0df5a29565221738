"""What must hold after every event, whatever happened before."""

from __future__ import annotations

from typing import TYPE_CHECKING

from langchain_card.core import messages as m
from langchain_card.core.request import RequestState

if TYPE_CHECKING:
    from langchain_card.testing.world import World


def check(world: World) -> None:
    """Raises AssertionError when an invariant does not hold.

    - the emitted tokens begin the target's own answer, each once and in order;
    - requests submitted are those that wait, run and have ended;
    - every candidate sits under a prefix from which its drafter proposes it;
    - all bounds hold;
    - an ended request holds nothing.
    """
    core, limits, scheduler = world.core, world.core.limits, world.core.scheduler
    for request_id, tokens in world.emitted.items():
        assert tokens == world.answers[request_id][: len(tokens)], "a token is not the target's"
    running, waiting = len(scheduler.running), len(scheduler.waiting)
    assert len(world.emitted) == running + waiting + len(world.finished), "a request was lost"
    assert scheduler.ended == len(world.finished), "a request was counted twice"
    assert running <= limits.max_num_seqs, "too many requests run"
    assert waiting <= limits.max_queue + limits.max_num_seqs, "too many requests wait"
    for state in (*scheduler.running.values(), *scheduler.waiting):
        emitted = world.emitted[state.request.request_id]
        assert tuple(state.output_ids) == emitted, "what is committed is not what was emitted"
        _check_tree(world, state)
    held = set(world.target.held) if world.target is not None else set()
    assert held <= set(core.scheduler.running), "an ended request holds KV"
    for draft in world.drafts.values():
        assert draft.inbox or set(draft.worker.begun) <= set(scheduler.running), "an ended request holds a draft's KV"
    if len(world.finished) == world.scope.requests and world.ended:
        assert not any(draft.drafter.trees or draft.worker.begun for draft in world.drafts.values()), "a draft holds KV"


def _check_tree(world: World, state: RequestState) -> None:
    tree, limits = state.tree, world.core.limits
    assert [tree.tokens[node] for node in tree.path[1:]] == state.output_ids, "the tree does not hold the answer"
    assert len(tree) - len(tree.path) <= 2 * limits.max_tree_nodes, "the tree has no bound"
    for source in state.sources.values():
        assert source.credits <= limits.max_lead, "more leave than there may be lead"
    prefixes = {tree.root: (*state.request.prompt_ids, *state.output_ids)}
    for node in range(tree.root + 1, len(tree)):
        above = prefixes.get(tree.parents[node])
        if above is not None:
            proposed = world.model.candidates(above, world.numbers[tree.sources[node]])
            assert any(tree.tokens[node] == token for token, _ in proposed), "a candidate under a wrong prefix"
            prefixes[node] = (*above, tree.tokens[node])


def check_window(world: World, window: m.Window) -> None:
    """Raises AssertionError unless a window starts at the last committed token and has no row too many."""
    state = world.core.scheduler.running[window.request_id]
    assert window is state.window, "two windows of one request in flight"
    assert len(window.token_ids) <= world.core.limits.max_window, "more rows than max_window"
    last = state.output_ids[-1] if state.output_ids else state.request.prompt_ids[-1]
    assert window.token_ids[0] == last, "the window does not start at the last committed token"
    left = state.request.params.max_tokens - len(state.output_ids)
    assert len(window.token_ids) <= left, "more rows than tokens that may follow"
