"""`fingerprint`: a value for the state of a world, equal for states that behave in the same way.

Statistics and times are left out. So are the absolute values of step ids, epochs and incarnations: only their order
matters.
"""

from __future__ import annotations

from typing import Any

from langchain_card.core import messages as m
from langchain_card.core.candidates import DEAD, CandidateTree
from langchain_card.core.drafter_state import DrafterState
from langchain_card.core.state import RequestState
from tests.simulation.process import Draft
from tests.simulation.world import World


def fingerprint(world: World) -> int:
    """Return a hash of the state that matters: 64 bits, so that a collision among millions is unlikely.

    Python gives -1 and -2 the same hash: no field may hold both.
    """
    core, scheduler = world.core, world.core.scheduler
    states = {s.request.request_id: s for s in (*scheduler.running.values(), *scheduler.waiting)}
    value = (
        tuple(scheduler.running),
        tuple(state.request.request_id for state in scheduler.waiting),
        tuple(_request(state) for state in states.values()),
        tuple(int(state.text.pace.weight) % 2 for state in states.values()) if world.scope.turns else (),
        tuple(sorted(world.finished)),
        tuple(world.finished[request_id].value for request_id in sorted(world.finished)),
        tuple(len(tokens) for tokens in world.emitted.values()),
        scheduler.capacity,
        core.draining,
        tuple(name in core.workers for name in (m.TARGET, *world.drafts)),
        None if world.target is None else tuple(world.target.kv_lengths.items()),
        None if world.windows is None else tuple(window.request_id for window in world.windows),
        tuple(window.request_id for window in world.unread),
        world.waiting,
        tuple((verdict.request_id, _is_awaited(states, verdict)) for verdict in world.late),
        tuple(world.restarts),
        tuple(sorted(world.faults.items())),
        tuple(_draft(draft, name, states) for name, draft in world.drafts.items()),
    )
    return hash(value)


def _is_awaited(states: dict[int, RequestState], verdict: m.Verdict) -> bool:
    state = states.get(verdict.request_id)
    return state is not None and state.window is not None and state.window.step_id == verdict.step_id


def _request(state: RequestState) -> Any:
    tree, number = state.tree, _canonical(state.tree)
    live = [node for node in range(tree.root + 1, len(tree)) if number.get(node, DEAD) >= 0]
    window = state.window
    return (
        len(state.output_ids),
        tuple(
            (
                number[tree.parents[node]],
                tree.tokens[node],
                tree.sources[node],
                node in tree.expanded_by_model,
                node in tree.listed_by_model,
            )
            for node in live
        ),
        tree.root in tree.expanded_by_model,
        None if window is None else (window.token_ids, window.parents, window.kept_rows),
        state.kept_rows,
        state.wait_until is not None,
        state.paused,
        state.schedule,
        state.failures,
        tuple((name, source.lead(tree), _source(source, number)) for name, source in state.drafters.items()),
        tuple((p.source, *_proposal(p)) for p in state.pending if _is_known(p, state.drafters.get(p.source))),
    )


def _source(source: DrafterState, number: dict[int, int]) -> Any:
    return (
        tuple(number.get(node, DEAD) for node in source.nodes),
        tuple(sorted(n for node in source.expanded if (n := number.get(node, DEAD)) != DEAD)),
        source.applied_len,
        source.granted,
        source.exhausted,
        source.unread,
    )


def _is_known(p: m.Proposal, source: DrafterState | None) -> bool:
    return source is not None and p.incarnation == source.incarnation


def _draft(draft: Draft, name: str, states: dict[int, RequestState]) -> Any:
    def against(request_id: int, incarnation: int, epoch: int) -> Any:
        state = states.get(request_id)
        source = state.drafters.get(name) if state is not None else None
        if source is None or source.incarnation != incarnation:
            return None  # stale from now on
        return max(epoch - source.epoch, -1)  # older epochs are all stale

    trees = []
    for request_id, tree in draft.drafter.trees.items():
        begun, leave = draft.worker.begun[request_id], draft.worker.granted[request_id]
        shape = (tuple(tree.parents), tuple(tree.tokens), tree.root, tuple(sorted(tree.open)), tree.published)
        epoch = against(request_id, begun.incarnation, tree.epoch)
        unread, read = draft.drafter.unread[request_id], draft.worker.max_read.get(request_id, 0)
        trees.append((request_id, epoch, shape, len(tree.output_ids), leave, unread, read))
    outbox = [
        (p.request_id, relative, *_proposal(p))
        for p in draft.outbox
        if (relative := against(p.request_id, p.incarnation, p.epoch)) is not None
    ]
    stale = len(draft.outbox) - len(outbox)
    return draft.alive, tuple(trees), tuple(map(_command, draft.inbox)), tuple(outbox), stale


def _proposal(p: m.Proposal) -> Any:
    return (p.root, p.applied_len, p.first, p.parents, p.token_ids, p.expanded, p.read, p.unread)


def _command(command: Any) -> Any:
    match command:
        case m.Begin(_, request):
            return ("begin", request.request_id, len(command.output_ids))
        case m.Correct(_, request_id, start, token_ids):
            return ("correct", request_id, start, len(token_ids))
        case m.Grow(_, request_id, widths):
            return ("grow", request_id, widths, command.max_read)
        case m.End(_, request_id):
            return ("end", request_id)


def _canonical(tree: CandidateTree) -> dict[int, int]:
    """Number the nodes that still matter: committed ones from -3 downwards, live candidates from 0 upwards."""
    number = {node: -3 - depth for depth, node in enumerate(tree.path)}
    live = (node for node in range(tree.root + 1, len(tree)) if tree.is_alive(node))
    return number | {node: i for i, node in enumerate(live)} | {DEAD: DEAD}
