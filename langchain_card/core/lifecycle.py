"""How requests begin on the workers, change their schedule, are kept up to date, and leave."""

from __future__ import annotations

from collections.abc import Mapping

from langchain_card.config import Schedule
from langchain_card.core import messages as m
from langchain_card.core.drafter_state import SourceState
from langchain_card.core.policy import Policy
from langchain_card.core.proposals import Intake
from langchain_card.core.query import Query, Source, grant
from langchain_card.core.scheduler import Scheduler
from langchain_card.core.state import RequestState
from langchain_card.core.workers import Workers


class Admission:
    """Knows who works for a request.

    Args:
        sources: the drafters, by name.
        scheduler: says who may run.
        workers: who is there.
        query: grants draft steps.
        intake: holds what was heard.
        policy: says what "auto" stands for.
    """

    def __init__(
        self,
        sources: Mapping[str, Source],
        scheduler: Scheduler,
        workers: Workers,
        query: Query,
        intake: Intake,
        policy: Policy,
    ) -> None:
        self.sources, self.scheduler, self.workers = sources, scheduler, workers
        self.query, self.intake, self.policy = query, intake, policy

    def admit(self, now: float) -> list[m.Effect]:
        """Lets requests run. Those that leave their schedule open all have the one that is best for so many."""
        begun = [*iter(self.scheduler.admit, None)]
        running = self.scheduler.running.values()
        open_ = [state for state in running if state.request.params.schedule == "auto" and self.sources]
        effects: list[m.Effect] = []
        if open_:
            going_on = [state for state in open_ if state not in begun]
            schedule = self.policy.auto(len(running), going_on[0].schedule if going_on else None)
            for state in open_:
                if state in begun:
                    state.schedule = schedule
                elif state.schedule != schedule:
                    effects += self._change_schedule(state, schedule, now)
        for state in begun:
            effects += self._begin(state, now)
        return effects

    def _change_schedule(self, state: RequestState, schedule: Schedule, now: float) -> list[m.Effect]:
        """The drafters begin anew; what they have proposed stays."""
        effects: list[m.Effect] = [m.End(name, state.request.request_id) for name in state.sources]
        self.intake.take_in(state)
        state.wait(now, None)
        state.sources, state.schedule, state.stats.schedule = {}, schedule, schedule
        return [*effects, *(effect for name in self.sources for effect in self.begin_drafting(name, state))]

    def _begin(self, state: RequestState, now: float) -> list[m.Effect]:
        """Starts a request on the target and on the drafters that are there, or lets it go on."""
        if not self.sources:
            state.schedule = "plain"
        if not state.incarnation:
            state.stats.started = now
        state.stats.schedule, state.kept_rows = state.schedule, ()
        begin = self._begin_on(m.TARGET, state)
        return [begin, *(effect for name in self.sources for effect in self.begin_drafting(name, state))]

    def begin_drafting(self, name: str, state: RequestState) -> list[m.Effect]:
        """Starts a request on a drafter, if it is there and the schedule has any."""
        if state.schedule == "plain" or name not in self.workers:
            return []
        if self.sources[name].of_grammars and not state.request.params.grammar:
            return []
        begin = self._begin_on(name, state)
        state.sources[name] = SourceState(state.incarnation, applied_len=len(state.output_ids))
        return [begin, *self.correct(state, name, hit=False)]

    def _begin_on(self, worker: str, state: RequestState) -> m.Begin:
        state.incarnation += 1
        return m.Begin(worker, state.request, state.schedule, tuple(state.output_ids), state.incarnation)

    def correct(self, state: RequestState, name: str, *, hit: bool) -> list[m.Effect]:
        """Tells a drafter what was committed, and grants what its schedule gives at once."""
        source, request_id = state.sources[name], state.request.request_id
        tokens = tuple(state.output_ids[source.applied_len :])
        source.credits, source.exhausted = 0, False
        effects: list[m.Effect] = [m.Correct(name, request_id, source.applied_len, tokens)]
        leave = self.query.leave_at_once(state, name, self.scheduler.load(state), hit=hit)
        return [*effects, grant(state, name, leave)] if leave.widths else effects

    def leave(self, state: RequestState, now: float) -> list[m.Effect]:
        """Frees what a request holds on the workers; what is in flight for it is stale from now on."""
        workers = [worker for worker in (m.TARGET, *state.sources) if worker in self.workers]
        state.wait(now, None)
        state.sources, state.window, state.heard = {}, None, []
        return [m.End(worker, state.request.request_id) for worker in workers]
