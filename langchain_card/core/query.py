"""The query: what a round verifies, and for which draft steps it waits.

After a miss the cache is empty. The target may then wait for the draft, but only for a bounded time and only where
that pays; an empty window is plain decoding. (CARD's authors do not wait. A target much slower than its draft then
spends a whole step on one token, where a few draft steps would have filled the window.)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from langchain_card.config import Limits
from langchain_card.core import messages as m
from langchain_card.core.frontier import Frontier, frontier
from langchain_card.core.policy import Leave, Load, Policy
from langchain_card.core.state import RequestState


@dataclass(frozen=True, slots=True)
class Source:
    """A drafter as the core sees it.

    Attributes:
        name: unique.
        paced: its steps cost device time, so that they are weighed before they are granted; others are always asked.
        of_grammars: it works for requests with a grammar only.
    """

    name: str
    paced: bool
    of_grammars: bool = False


class Query:
    """Plans one request's round.

    Args:
        sources: the drafters, by name.
        limits: bounds.
        policy: decides where measurements must.
        chains: verify no more than one candidate after each row.
    """

    def __init__(self, sources: Mapping[str, Source], limits: Limits, policy: Policy, *, chains: bool = False) -> None:
        self.sources, self.chains = sources, chains
        self.limits = limits
        self.policy = policy

    def draft_first(self, state: RequestState, load: Load, now: float) -> list[m.Effect]:
        """Sets `wait_until` when the round shall wait for its draft, and grants the steps where none are under way."""
        paced = [name for name in state.sources if self.sources[name].paced]
        at_work = any(state.sources[name].credits and not state.sources[name].exhausted for name in paced)
        if not state.output_ids:
            return []  # the first token never waits
        if state.schedule == "parallel":
            worth = at_work and any(self._pays(state, name, load) for name in paced)
            if not worth:
                state.wait(now, None)
            elif state.wait_until is None:
                state.wait(now, now + self.policy.patience(load))
            return []
        if at_work:
            return []
        leave = self.policy.leave(load, hit=True)
        grants = [grant(state, name, leave) for name in paced if self._pays(state, name, load)]
        state.wait(now, now + self.policy.patience(load) if grants else None)
        return [*grants]

    def leave_at_once(self, state: RequestState, name: str, load: Load, *, hit: bool) -> Leave:
        """The draft steps that come with a correction, up to the largest lead; none where they are granted singly."""
        if not self.sources[name].paced:
            leave = Leave((1,))
        elif load.schedule == "parallel":
            leave = self.policy.leave(load, hit=hit)
        else:
            return Leave()
        return leave._replace(
            widths=leave.widths[: max(0, self.limits.max_lead - state.sources[name].lead(state.tree))]
        )

    def open_windows(
        self, states: Sequence[RequestState], loads: Sequence[Load], step_id: int, now: float
    ) -> list[m.Window]:
        """For each request the last committed token and the candidates under it that pay."""
        found = [self._candidates(state) for state in states]
        widths = [0] * len(states)
        for load in set(loads):
            group = [i for i, other in enumerate(loads) if other == load]
            for i, width in zip(group, self.policy.windows(load, [found[i][1] for i in group]), strict=True):
                widths[i] = width
        windows = []
        for i, (state, (nodes, _), width) in enumerate(zip(states, found, widths, strict=True)):
            state.wait(now, None)
            state.window = self._window(
                state, nodes[: min(width, self.limits.max_step_rows // loads[i].num_seqs - 1)], step_id + i
            )
            windows.append(state.window)
        return windows

    def _candidates(self, state: RequestState) -> tuple[list[int], list[float]]:
        best = state.tree.best_chain if self.chains else state.tree.best_subtree
        return best(self._budget(state))

    def _budget(self, state: RequestState) -> int:
        return min(self.limits.max_window, state.tokens_left) - 1 if state.sources and not state.failures else 0

    def _window(self, state: RequestState, candidates: Sequence[int], step_id: int) -> m.Window:
        nodes = [state.tree.root, *candidates]
        row = {node: i for i, node in enumerate(nodes)}
        return m.Window(
            request_id=state.request.request_id,
            step_id=step_id,
            start_position=len(state.request.prompt_ids) - 1 + len(state.output_ids),
            token_ids=tuple(state.tree.tokens[node] for node in nodes),
            parents=(m.ROOT, *(row[state.tree.parents[node]] for node in nodes[1:])),
            kept_rows=state.kept_rows,
            schedule=state.schedule,
            sources=tuple(state.tree.sources[node] for node in candidates),
        )

    def _pays(self, state: RequestState, name: str, load: Load) -> bool:
        source, budget = state.sources[name], self._budget(state)
        lead = source.lead(state.tree)
        if source.exhausted or not budget or lead >= min(self.limits.max_lead, state.tokens_left - 1):
            return False
        leave = self.policy.leave(load, hit=True)
        width, least = leave.widths[-1], leave.min_chance
        at = frontier(state.tree, source.known, source.expanded, budget, width, least)
        _, verified = self._candidates(state)
        if len(verified) == budget:  # what comes takes the place of the least likely
            chances = [chance - verified[-1] for chance in at.chances if chance > verified[-1]]
            at = Frontier(chances)
        return bool(at.chances) and self.policy.draft_pays(load, at, lead)


def grant(state: RequestState, name: str, leave: Leave) -> m.Grow:
    """Gives leave for draft steps."""
    state.sources[name].credits += len(leave.widths)
    return m.Grow(name, state.request.request_id, leave.widths, leave.min_chance)
