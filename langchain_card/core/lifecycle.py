"""The life of a request on the workers: it begins, changes its schedule, is corrected, and is released."""

from __future__ import annotations

from collections.abc import Mapping

from langchain_card.config import Schedule
from langchain_card.core import messages as m
from langchain_card.core.drafter_state import DrafterState
from langchain_card.core.policy import Policy
from langchain_card.core.proposals import Intake
from langchain_card.core.query import DrafterTraits, Query, correct, grow
from langchain_card.core.scheduler import Scheduler
from langchain_card.core.state import RequestState
from langchain_card.core.workers import Workers


class Lifecycle:
    """Begins and ends requests on the target and the drafters.

    Args:
        drafters: their traits, by name.
        scheduler: which requests run.
        workers: which workers are up.
        query: grants draft steps.
        intake: keeps pending proposals.
        policy: chooses the schedule that "auto" stands for.
    """

    def __init__(
        self,
        drafters: Mapping[str, DrafterTraits],
        scheduler: Scheduler,
        workers: Workers,
        query: Query,
        intake: Intake,
        policy: Policy,
    ) -> None:
        self.drafters, self.scheduler, self.workers = drafters, scheduler, workers
        self.query, self.intake, self.policy = query, intake, policy

    def admit(self, now: float) -> list[m.Effect]:
        """Let waiting requests run. All requests with `schedule="auto"` get the one that is best for their number."""
        begun = [*iter(self.scheduler.admit, None)]
        working = [state for state in self.scheduler.running.values() if not state.paused]
        open_ = [state for state in working if state.request.params.schedule == "auto" and self.drafters]
        effects: list[m.Effect] = []
        if open_:
            going_on = [state for state in open_ if state not in begun]
            current = going_on[0].schedule if going_on else None
            texts = [state.text for state in working]
            schedule = self.policy.auto(texts, current, self.scheduler.longest)
            for state in open_:
                if state in begun:
                    state.schedule = schedule
                elif state.schedule != schedule:
                    effects += self._change_schedule(state, schedule, now)
        for state in begun:
            effects += self._begin(state, now)
        return effects

    def _change_schedule(self, state: RequestState, schedule: Schedule, now: float) -> list[m.Effect]:
        """Begin anew on the drafters whose steps cost device time; their candidates stay in the cache."""
        paced = [name for name in state.drafters if self.drafters[name].paced]
        effects: list[m.Effect] = [m.End(name, state.request.request_id) for name in paced]
        self.intake.absorb(state)
        state.wait(now, None)
        state.schedule = state.stats.schedule = schedule
        for name in paced:
            del state.drafters[name]
            effects += self.begin_drafting(name, state)
        return effects

    def _begin(self, state: RequestState, now: float) -> list[m.Effect]:
        """Begin, or continue, a request on the target and on the drafters that are up."""
        if not self.drafters:
            state.schedule = "plain"
        if not state.incarnation:
            state.stats.started = now
        state.stats.schedule, state.kept_rows = state.schedule, ()
        begin = self._begin_on(m.TARGET, state)
        return [begin, *(effect for name in self.drafters for effect in self.begin_drafting(name, state))]

    def begin_drafting(self, name: str, state: RequestState) -> list[m.Effect]:
        """Begin a request on a drafter, if the drafter is up and the request can use it."""
        if state.schedule == "plain" or name not in self.workers:
            return []
        if self.drafters[name].of_grammars and not state.request.params.grammar:
            return []
        begin = self._begin_on(name, state)
        written = len(state.output_ids)
        state.drafters[name] = DrafterState(state.incarnation, applied_len=written, sent_len=written)
        return [begin, *self.correct(state, name, hit=False)]

    def _begin_on(self, worker: str, state: RequestState) -> m.Begin:
        state.incarnation += 1
        return m.Begin(worker, state.request, state.schedule, tuple(state.output_ids), state.incarnation)

    def correct(self, state: RequestState, name: str, *, hit: bool) -> list[m.Effect]:
        """Correct a drafter and grant it the steps that come with a correction.

        A drafter without steps, under way or granted now, is not corrected before its next ones.
        """
        drafter = state.drafters[name]
        at_work, drafter.granted, drafter.exhausted = drafter.granted > 0, 0, False
        grant = self.query.initial_grant(state, name, self.scheduler.load(state), hit=hit)
        if grant.widths:
            return grow(state, name, grant)
        return [correct(state, name)] if at_work else []

    def release(self, state: RequestState, now: float) -> list[m.Effect]:
        """Free what a request holds on the workers; messages that are in flight for it are stale from now on."""
        workers = [worker for worker in (m.TARGET, *state.drafters) if worker in self.workers]
        state.wait(now, None)
        state.drafters, state.window, state.pending = {}, None, []
        return [m.End(worker, state.request.request_id) for worker in workers]
