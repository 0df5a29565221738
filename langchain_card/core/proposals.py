"""The intake: how proposals enter the cache.

Proposals that arrive while a window is in flight wait for its verdict. Most of them then hang under branches that the
target did not take, and never enter the cache.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping

from langchain_card.core.drafter_state import DrafterState
from langchain_card.core.messages import Proposal
from langchain_card.core.pass_timing import Passes
from langchain_card.core.policy import Load, Policy
from langchain_card.core.query import DrafterTraits
from langchain_card.core.state import RequestState
from langchain_card.limits import Limits


class Intake:
    """Receives the drafters' proposals.

    Args:
        drafters: their traits, by name.
        limits: bounds.
        policy: observes draft steps.
        passes: interrupted when a drafter had to read text.
        vocab_size: token ids at and above it are refused.
    """

    def __init__(
        self, drafters: Mapping[str, DrafterTraits], limits: Limits, policy: Policy, passes: Passes, vocab_size: int
    ) -> None:
        self.drafters = drafters
        self.limits = limits
        self.policy = policy
        self.passes = passes
        self.vocab_size = vocab_size

    def receive(self, state: RequestState, drafter: DrafterState, proposal: Proposal, load: Load, now: float) -> bool:
        """Take a proposal that arrived at `now`; return False when it is stale or breaks a fence."""
        if any(other.source == proposal.source and other.epoch != proposal.epoch for other in state.pending):
            self.absorb(state)  # while its numbers still hold
        admitted = drafter.admit(proposal, state.tree, self.vocab_size)
        if self.is_current(drafter, proposal):
            drafter.unread = proposal.unread
        if self.is_current(drafter, proposal) and proposal.applied_len == len(state.output_ids):
            # Else it answers a grant that a correction has taken back.
            drafter.granted = max(0, drafter.granted - admitted)
            parallel = state.schedule == "parallel"
            has_read = proposal.read > 0
            may_go_on = has_read if parallel else not has_read  # under `sequential`, a round has one step of reading
            drafter.exhausted = not admitted or not (proposal.token_ids or (proposal.unread and may_go_on))
            if parallel:
                state.wait_until = None  # the draft moves: whether to wait on is a new question
        if proposal.reading:
            self.passes.interrupt()
        if admitted and proposal.read:
            self.policy.observe_reading(load, proposal.read, proposal.reading)
        if admitted and proposal.forwarded and self.drafters[proposal.source].paced:
            since = max(0.0, now - state.stats.first_token) if state.output_ids else 0.0
            state.stats.add_draft_step(proposal.forwarded, min(proposal.elapsed, since))
            self.policy.observe_draft_step(
                load, state.text, proposal.forwarded, proposal.together, proposal.elapsed, proposal.layers
            )
        if admitted:
            state.pending.append(proposal)
            if state.window is None or len(state.pending) > self.limits.max_lead:
                self.absorb(state)
        return admitted

    def absorb(self, state: RequestState) -> None:
        """Enter the pending proposals into the cache."""
        pending, state.pending = state.pending, []
        for proposal in pending:
            drafter = state.drafters.get(proposal.source)
            if drafter is not None and self.is_current(drafter, proposal):  # else the drafter died since
                self.enter(state, drafter, proposal)

    def is_current(self, drafter: DrafterState, proposal: Proposal) -> bool:
        """Return whether a proposal answers the `Begin` that is in force."""
        return drafter.incarnation == proposal.incarnation

    def enter(self, state: RequestState, drafter: DrafterState, proposal: Proposal) -> None:
        """Enter one proposal into the cache."""
        trust = functools.partial(self.policy.trust, proposal.source)
        max_nodes, from_model = 2 * self.limits.max_tree_nodes, self.drafters[proposal.source].from_model
        state.stats.dropped += drafter.enter(proposal, state.tree, max_nodes, trust, from_model=from_model)
