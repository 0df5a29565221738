"""The intake: how proposals enter the cache.

What comes while a window is in flight waits for its verdict. Most of it hangs, by then, under branches that the target
did not take, and what is dead is never entered.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping

from langchain_card.config import Limits
from langchain_card.core.drafter_state import SourceState
from langchain_card.core.messages import Proposal
from langchain_card.core.pass_timing import Passes
from langchain_card.core.policy import Load, Policy
from langchain_card.core.query import Source
from langchain_card.core.state import RequestState


class Intake:
    """Takes in what drafters say.

    Args:
        sources: the drafters, by name.
        limits: bounds.
        policy: told of draft steps.
        passes: told of reading.
        vocab_size: token ids at and above it are refused.
    """

    def __init__(
        self, sources: Mapping[str, Source], limits: Limits, policy: Policy, passes: Passes, vocab_size: int
    ) -> None:
        self.sources = sources
        self.limits = limits
        self.policy = policy
        self.passes = passes
        self.vocab_size = vocab_size

    def hear(self, state: RequestState, source: SourceState, proposal: Proposal, load: Load, now: float) -> bool:
        """A drafter has spoken, at `now`; whether that was neither stale nor senseless."""
        if any(other.source == proposal.source and other.epoch != proposal.epoch for other in state.heard):
            self.take_in(state)  # while its numbers still hold
        admitted = source.admit(proposal, state.tree, self.vocab_size)
        if self.is_current(source, proposal) and proposal.applied_len == len(state.output_ids):
            # Else it answers leave that a correction has taken back.
            source.credits = max(0, source.credits - (proposal.steps if admitted else 0))
            source.exhausted = not admitted or not proposal.token_ids
            if state.schedule == "parallel":
                state.wait_until = None  # the draft moves: whether to wait on is a new question
        if proposal.reading:
            self.passes.interrupt()
        if admitted and proposal.forwarded and self.sources[proposal.source].paced:
            since = max(0.0, now - state.stats.first_token) if state.output_ids else 0.0
            state.stats.add_draft_step(proposal.forwarded, min(proposal.elapsed, since))
            self.policy.saw_draft_step(load, proposal.forwarded, proposal.together, proposal.elapsed, proposal.layers)
        if admitted:
            state.heard.append(proposal)
            if state.window is None or len(state.heard) > self.limits.max_lead:
                self.take_in(state)
        return admitted

    def take_in(self, state: RequestState) -> None:
        """Enters what was heard into the cache."""
        heard, state.heard = state.heard, []
        for proposal in heard:
            source = state.sources.get(proposal.source)
            if source is not None and self.is_current(source, proposal):  # else it was lost since
                self.enter(state, source, proposal)

    def is_current(self, source: SourceState, proposal: Proposal) -> bool:
        """Whether a proposal is from the drafter's present life."""
        return source.incarnation == proposal.incarnation

    def enter(self, state: RequestState, source: SourceState, proposal: Proposal) -> None:
        """Enters one proposal."""
        judge = functools.partial(self.policy.judge, proposal.source)
        most, knows = 2 * self.limits.max_tree_nodes, self.sources[proposal.source].paced
        state.stats.dropped += source.enter(proposal, state.tree, most, judge, knows=knows)
