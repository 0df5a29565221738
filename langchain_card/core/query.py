"""The query: which candidates a round verifies, and which draft steps it waits for.

After a miss the cache is empty. The target may then wait for the draft, but only for a bounded time and only where it
pays; an empty window is plain decoding. (CARD's authors do not wait. A target much slower than its draft then spends a
whole step on one token, where a few draft steps would have filled the window.)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from langchain_card.core import messages as m
from langchain_card.core.candidates import Frontier, frontier
from langchain_card.core.policy import DraftGrant, Load, Policy
from langchain_card.core.state import RequestState
from langchain_card.limits import Limits


@dataclass(frozen=True, slots=True)
class DrafterTraits:
    """The properties of a drafter that the core needs; see `ports.Drafter`.

    Attributes:
        name: unique in an engine.
        paced: whether its steps cost device time; if so, `sequential` weighs each one.
        from_model: whether its scores are a language model's.
        of_grammars: whether it works for requests with a grammar only.
        reads_target: whether its steps are taken on the target's thread, so that they never overlap a pass.
    """

    name: str
    paced: bool
    from_model: bool = False
    of_grammars: bool = False
    reads_target: bool = False


class Query:
    """Plans the rounds of requests.

    Args:
        drafters: their traits, by name.
        limits: bounds.
        policy: decides what depends on measurements.
        chains: verify no more than one candidate after each row.
    """

    def __init__(
        self, drafters: Mapping[str, DrafterTraits], limits: Limits, policy: Policy, *, chains: bool = False
    ) -> None:
        self.drafters, self.chains = drafters, chains
        self.limits = limits
        self.policy = policy

    def draft_first(self, states: Sequence[RequestState], loads: Sequence[Load], now: float) -> list[m.Effect]:
        """Set `wait_until` of requests whose round shall wait for its draft, and grant steps where none are under way.

        The first token never waits.
        """
        effects: list[m.Effect] = []
        for load in dict.fromkeys(loads):
            group = [state for state, other in zip(states, loads) if other == load and state.output_ids]  # noqa: B905
            if not self._in_turns(load):
                for state in group:
                    self._await_draft(state, load, now)
            else:
                effects += self._grant_in_turns([state for state in group if not self.drafts(state)], load, now)
        return effects

    def _in_turns(self, load: Load) -> bool:
        """Return whether target and drafters take turns: by the schedule, or because a drafter reads the target."""
        return load.schedule != "parallel" or any(traits.reads_target for traits in self.drafters.values())

    def _await_draft(self, state: RequestState, load: Load, now: float) -> None:
        """Let a round wait for a draft that is at work, if that pays."""
        paced = [name for name in state.drafters if self.drafters[name].paced]
        if not (self.drafts(state) and any(self._waiting_pays(state, name, load) for name in paced)):
            state.wait(now, None)
        elif state.wait_until is None:
            state.wait(now, now + self.policy.patience(load))

    def _waiting_pays(self, state: RequestState, name: str, load: Load) -> bool:
        if not self.policy.may_wait(load, state.drafters[name].lead(state.tree)):
            return False
        at = self._frontier(state, name, load)
        return at is not None and self.policy.draft_pays(load, [state.text], [at])[0]

    def _grant_in_turns(self, states: Sequence[RequestState], load: Load, now: float) -> list[m.Effect]:
        """Grant one step of each drafter, which all of its requests share, to those for which it pays."""
        effects: list[m.Effect] = []
        granted, grant = set[int](), self.policy.grant(load, hit=True)
        grant = grant._replace(widths=grant.widths[-1:])
        for name in (name for name, drafter in self.drafters.items() if drafter.paced):
            open_ = [state for state in states if name in state.drafters]
            unread = [state for state in open_ if state.drafters[name].unread]
            steps = [(state, max_read) for state in unread if (max_read := self._read_budget(state, name, load))]
            steps = steps[: self.policy.max_readers(load)]
            growing = [(state, at) for state in open_ if (at := self._frontier(state, name, load)) is not None]
            pays = self.policy.draft_pays(load, [state.text for state, _ in growing], [at for _, at in growing])
            for (state, _), worth in zip(growing, pays, strict=True):
                steps += [(state, self._read_budget(state, name, load))] if worth else []
            for state, max_read in steps:
                effects += grow(state, name, grant._replace(max_read=max_read))
                granted.add(state.request.request_id)
        for state in states:
            going_on = state.request.request_id in granted
            state.wait(now, now + self.policy.patience(load) if going_on else None)
        return effects

    def initial_grant(self, state: RequestState, name: str, load: Load, *, hit: bool) -> DraftGrant:
        """Return the draft steps that come with a correction; none if each step is weighed on its own.

        A draft that has to read, before the first token as far as is known, and may not, gets none: the target has all
        threads meanwhile.
        """
        paced, max_read = self.drafters[name].paced, 0
        if paced and self._in_turns(load):
            return DraftGrant()
        if paced:
            max_read = self._read_budget(state, name, load)
            if not max_read and (state.drafters[name].unread or not state.output_ids):
                return DraftGrant()
        grant = self.policy.grant(load, hit=hit) if paced else DraftGrant((1,))
        room = max(0, self.limits.max_lead - state.drafters[name].lead(state.tree))
        return grant._replace(widths=grant.widths[:room], max_read=max_read)

    def _read_budget(self, state: RequestState, name: str, load: Load) -> int:
        """Return how many tokens of the text a step of a drafter may read; 0 once it has read in this round."""
        drafter = state.drafters[name]
        if drafter.exhausted or not self.drafters[name].paced:
            return 0
        written, left = len(state.output_ids), state.tokens_left
        return self.policy.read_budget(load, state.text, drafter.unread, written, left)

    def open_windows(
        self, states: Sequence[RequestState], loads: Sequence[Load], step_id: int, now: float
    ) -> list[m.Window]:
        """Open a window for each request: its last committed token, and the candidates below it that pay."""
        candidates = [self._candidates(state) for state in states]
        widths = [0] * len(states)
        for load in set(loads):
            group = [i for i, other in enumerate(loads) if other == load]
            texts, chances = [states[i].text for i in group], [candidates[i][1] for i in group]
            for i, width in zip(group, self.policy.windows(load, texts, chances), strict=True):
                widths[i] = width
        windows = []
        for i, (state, (nodes, _), width) in enumerate(zip(states, candidates, widths, strict=True)):
            state.wait(now, None)
            most = min(width, self.limits.max_step_rows // loads[i].num_seqs - 1)
            state.window = self._window(state, nodes if state.request.labels else nodes[:most], step_id + i)
            windows.append(state.window)
        return windows

    def _candidates(self, state: RequestState) -> tuple[list[int], list[float]]:
        best = state.tree.best_chain if self.chains else state.tree.best_subtree
        return best(self._budget(state))

    def _budget(self, state: RequestState) -> int:
        if state.request.labels:
            return self.limits.max_window - 1
        return min(self.limits.max_window, state.tokens_left) - 1 if state.drafters and not state.failures else 0

    def _window(self, state: RequestState, candidates: Sequence[int], step_id: int) -> m.Window:
        tree, nodes = state.tree, [state.tree.root, *candidates]
        tokens, parents, sources = tree.tokens, tree.parents, tree.sources
        row = {node: i for i, node in enumerate(nodes)}
        return m.Window(
            request_id=state.request.request_id,
            step_id=step_id,
            start_position=len(state.request.prompt_ids) - 1 + len(state.output_ids),
            token_ids=tuple([tokens[node] for node in nodes]),
            parents=(m.ROOT, *[row[parents[node]] for node in candidates]),
            kept_rows=state.kept_rows,
            schedule=state.schedule,
            drafting=state.schedule == "parallel" and self.drafts(state),
            sources=tuple([sources[node] for node in candidates]),
        )

    def drafts(self, state: RequestState) -> bool:
        """Return whether a drafter whose steps cost device time is at work for a request."""
        paced = (drafter for name, drafter in state.drafters.items() if self.drafters[name].paced)
        return any(drafter.granted and not drafter.exhausted for drafter in paced)

    def _frontier(self, state: RequestState, name: str, load: Load) -> Frontier | None:
        """Return what a drafter would expand next for a request; None if it can add nothing."""
        drafter, budget = state.drafters[name], self._budget(state)
        lead = drafter.lead(state.tree)
        if drafter.exhausted or drafter.unread or not budget:
            return None
        if lead >= min(self.limits.max_lead, state.tokens_left - 1):
            return None
        grant = self.policy.grant(load, hit=True)
        width, least = grant.widths[-1], grant.min_chance
        at = frontier(state.tree, drafter.published, drafter.expanded, budget, width, least)
        _, verified = self._candidates(state)
        if len(verified) == budget:  # a new candidate takes the place of the least likely one
            chances = [chance - verified[-1] for chance in at.chances if chance > verified[-1]]
            at = Frontier(chances)
        return at._replace(lead=lead) if at.chances else None


def grow(state: RequestState, name: str, grant: DraftGrant) -> list[m.Effect]:
    """Grant draft steps to a drafter, after the committed tokens that it has not received."""
    drafter = state.drafters[name]
    drafter.granted += len(grant.widths)
    step = m.Grow(name, state.request.request_id, grant.widths, grant.min_chance, grant.max_read)
    return [step] if drafter.sent_len == len(state.output_ids) else [correct(state, name), step]


def correct(state: RequestState, name: str) -> m.Correct:
    """Send a drafter the committed tokens that it is not known to have applied."""
    drafter = state.drafters[name]
    drafter.sent_len = len(state.output_ids)
    return m.Correct(
        name, state.request.request_id, drafter.applied_len, tuple(state.output_ids[drafter.applied_len :])
    )
