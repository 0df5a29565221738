"""The query: what a round verifies, and for which draft steps it waits.

After a miss the cache is empty. The target may then wait for the draft, but only for a bounded time and only where
that pays; an empty window is plain decoding. (CARD's authors do not wait. A target much slower than its draft then
spends a whole step on one token, where a few draft steps would have filled the window.)
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from langchain_card.config import Limits
from langchain_card.core import messages as m
from langchain_card.core.controller import Policy
from langchain_card.core.request import RequestState

PROBE_ROUNDS = 16


@dataclass(frozen=True, slots=True)
class Source:
    """A drafter as the core sees it.

    Attributes:
        name: unique.
        paced: its steps cost device time, so that they are weighed before they are granted; others are always asked.
    """

    name: str
    paced: bool


class Query:
    """Plans one request's round.

    Args:
        sources: the drafters, by name.
        limits: bounds.
        policy: decides where measurements must.
    """

    def __init__(self, sources: Mapping[str, Source], limits: Limits, policy: Policy) -> None:
        self.sources = sources
        self.limits = limits
        self.policy = policy

    def draft_first(self, state: RequestState, now: float) -> list[m.Effect]:
        """Grants draft steps that pay, and sets `wait_until` when the round shall wait for its draft."""
        paced = [name for name in state.sources if self.sources[name].paced]
        waiting = any(state.sources[name].credits and not state.sources[name].exhausted for name in paced)
        if not state.output_ids:
            return []  # the first token never waits
        if state.schedule == "parallel":
            self._wait_for_lead(state, waiting, now)
            return []
        if waiting:
            return []
        state.wait_until = None
        grants: list[m.Effect] = []
        for name in paced:
            chance = self._chance_to_look(state, name)
            if chance and (self.policy.draft_pays(state.schedule, chance) or self._probe_due(state, name)):
                state.wait_until = now + self.policy.patience(state.schedule)
                grants.append(grant(state, name, (1,)))
        return grants

    def window(self, state: RequestState, step_id: int) -> m.Window:
        """The last committed token and the candidates under it that pay."""
        left = state.request.params.max_tokens - len(state.output_ids)
        budget = min(self.limits.max_window, left) - 1 if state.sources and not state.failures else 0
        candidates, chances = state.tree.best_subtree(budget)
        width = self.policy.window(state.schedule, chances) if candidates else 0
        nodes = [state.tree.root, *candidates[:width]]
        row = {node: i for i, node in enumerate(nodes)}
        return m.Window(
            request_id=state.request.request_id,
            step_id=step_id,
            start_position=len(state.request.prompt_ids) - 1 + len(state.output_ids),
            token_ids=tuple(state.tree.tokens[node] for node in nodes),
            parents=(m.ROOT, *(row[state.tree.parents[node]] for node in nodes[1:])),
            kept_rows=state.kept_rows,
        )

    def _wait_for_lead(self, state: RequestState, draft_works: bool, now: float) -> None:
        if not draft_works or state.tree.children(state.tree.root):
            state.wait_until = None
        elif state.wait_until is None:
            state.wait_until = now + self.policy.patience(state.schedule)

    def _chance_to_look(self, state: RequestState, name: str) -> float:
        """Chance that the target gets where this drafter would look next and finds no candidate there yet."""
        source = state.sources[name]
        if source.exhausted or state.tree.lead() >= self.limits.max_lead:
            return 0.0
        return state.tree.uncovered_chance(source.expanded)

    def _probe_due(self, state: RequestState, name: str) -> bool:
        """Now and then a step is taken that does not seem to pay, or costs measured in a bad moment would stand."""
        return state.stats.rounds % PROBE_ROUNDS == 0 and state.tree.root not in state.sources[name].expanded


def grant(state: RequestState, name: str, widths: tuple[int, ...]) -> m.Grow:
    """Leave for as many draft steps as there are widths."""
    state.sources[name].credits += len(widths)
    return m.Grow(name, state.request.request_id, widths)
