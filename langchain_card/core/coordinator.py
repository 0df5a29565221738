"""Query and correct: the protocol, as one pure state machine.

```
TargetReady ─► query: pick the likeliest subtree of the cache ─► Verify
Verified    ─► walk: commit what the target chose ─► Emit, and Correct every drafter
Proposed    ─► grow the cache
```

`handle(event)` changes the state and returns what is to be done. No clock, no threads, no randomness: the same object
runs in production and under a virtual clock. (CARD, arXiv 2508.04462.)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from langchain_card.config import Limits
from langchain_card.core import messages as m
from langchain_card.core.candidates import DEAD, CandidateTree
from langchain_card.core.controller import Controller, CostModel
from langchain_card.core.request import FinishReason, Request, RequestState, RequestStats, SourceState
from langchain_card.core.scheduler import Scheduler
from langchain_card.core.walk import cut, walk

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


class Coordinator:
    """The only writer of request state.

    Args:
        sources: the drafters.
        limits: bounds.
        controller: cost model.
    """

    def __init__(self, sources: Sequence[Source], limits: Limits, controller: Controller) -> None:
        self.sources = {source.name: source for source in sources}
        self.limits = limits
        self.controller = controller
        self.scheduler = Scheduler(limits)
        self.stale = 0
        self._next_step_id = 0

    def handle(self, event: m.Event) -> list[m.Effect]:
        """One event in, the effects to carry out, in order."""
        match event:
            case m.TargetReady(now):
                return self._query(now)
            case m.Verified(verdict, now):
                return self._commit(verdict, now)
            case m.Proposed(proposal):
                return self._grow(proposal)
            case m.Submitted(request, now):
                self.scheduler.waiting.append((request, now))
                return []
            case m.Stopped(request_id, reason, now, num_tokens):
                return self._stop(request_id, reason, now, num_tokens)
            case m.SourceDied(source):
                return self._lose(source)

    @property
    def idle(self) -> bool:
        """Whether no request waits or runs."""
        return not self.scheduler.waiting and not self.scheduler.running

    # Query: what shall the target verify next?

    def _query(self, now: float) -> list[m.Effect]:
        effects: list[m.Effect] = []
        while self.scheduler.can_admit():
            effects += self._admit(*self.scheduler.waiting.popleft(), now)
        windows, deadlines = [], []
        for state in self.scheduler.running.values():
            grow = self._more_drafting(state, now)
            effects += grow
            if state.wait_until is not None and now < state.wait_until:
                deadlines.append(state.wait_until)
            else:
                windows.append(self._open_window(state))
        if windows:
            effects.append(m.Verify(tuple(windows)))
        elif deadlines:
            effects.append(m.Wait(min(deadlines)))
        return effects

    def _admit(self, request: Request, submitted: float, now: float) -> list[m.Effect]:
        schedule = self.controller.schedule(request.params.schedule, has_drafters=bool(self.sources))
        sources = {} if schedule == "plain" else {name: SourceState() for name in self.sources}
        state = RequestState(
            request=request,
            tree=CandidateTree(request.prompt_ids[-1]),
            sources=sources,
            schedule=schedule,
            stats=RequestStats(schedule=schedule, submitted=submitted, started=now),
        )
        self.scheduler.running[request.request_id] = state
        return [m.Begin(request, schedule), *self._correct(state)]

    def _more_drafting(self, state: RequestState, now: float) -> list[m.Effect]:
        """Grants draft steps that pay, and sets until when the round waits for them."""
        paced = [name for name in state.sources if self.sources[name].paced]
        waiting = any(state.sources[name].credits for name in paced)
        if not state.output_ids:
            return []  # the first token never waits
        if state.schedule == "parallel":
            if not waiting or state.tree.children(state.tree.root):
                state.wait_until = None
            elif state.wait_until is None:
                state.wait_until = now + self._costs(state).patience_parallel()
            return []
        if waiting:
            return []
        state.wait_until = None
        grants: list[m.Effect] = []
        for name in paced:
            gain = self._expected_gain(state, name)
            if self._costs(state).draft_pays(gain) or (gain and self._probe_due(state, name)):
                state.wait_until = now + self._costs(state).patience_sequential()
                grants.append(self._grant(state, name, 1))
        return grants

    def _probe_due(self, state: RequestState, name: str) -> bool:
        """Now and then a step is taken that does not seem to pay, or costs measured in a bad moment would stand."""
        return state.stats.rounds % PROBE_ROUNDS == 0 and state.tree.root not in state.sources[name].expanded

    def _expected_gain(self, state: RequestState, name: str) -> float:
        """Tokens that one more step of this drafter adds to the round."""
        source = state.sources[name]
        if source.exhausted or state.tree.lead() >= self.limits.max_lead:
            return 0.0
        return state.tree.uncovered_chance(source.expanded) * self._costs(state).draft_hits.value

    def _costs(self, state: RequestState) -> CostModel:
        return self.controller.costs[state.schedule]

    def _grant(self, state: RequestState, name: str, steps: int) -> m.Grow:
        state.sources[name].credits += steps
        return m.Grow(name, state.request.request_id, steps)

    def _open_window(self, state: RequestState) -> m.Window:
        left = state.request.params.max_tokens - len(state.output_ids)
        budget = min(self.limits.max_window, left) - 1 if state.sources else 0
        candidates, chances = state.tree.best_subtree(budget)
        nodes = [state.tree.root, *candidates[: self._costs(state).best_width(chances)]]
        row = {node: i for i, node in enumerate(nodes)}
        state.window = m.Window(
            request_id=state.request.request_id,
            step_id=self._next_step_id,
            start_position=len(state.request.prompt_ids) - 1 + len(state.output_ids),
            token_ids=tuple(state.tree.tokens[node] for node in nodes),
            parents=(m.ROOT, *(row[state.tree.parents[node]] for node in nodes[1:])),
            kept_rows=state.kept_rows,
        )
        self._next_step_id += 1
        return state.window

    # Correct: what did the target decide?

    def _commit(self, verdict: m.Verdict, now: float) -> list[m.Effect]:
        state = self.scheduler.running.get(verdict.request_id)
        if state is None or state.window is None or state.window.step_id != verdict.step_id:
            self.stale += 1
            return []
        window, state.window, state.wait_until = state.window, None, None
        rows, tokens = walk(window, verdict.target_ids)
        tokens, reason = cut(tokens, state.request, len(state.output_ids))
        sources, hit = [], False
        for token in tokens:
            drafted = any(state.tree.root in source.expanded for source in state.sources.values())
            hit = state.tree.advance(token)
            if drafted:
                self._costs(state).draft_hits.add(hit)
            sources.append(state.tree.sources[state.tree.root] if hit else "")
        state.kept_rows = tuple(rows[: len(tokens)])
        state.output_ids += tokens
        self._count(state, window, sources[: len(rows) - 1], hit, verdict.elapsed, now)
        accepted = tuple(sources[: len(rows) - 1]) + ("",) * (len(tokens) - len(rows) + 1)
        logprobs = tuple(verdict.logprobs[row] for row in state.kept_rows) if verdict.logprobs else ()
        effects: list[m.Effect] = [m.Emit(state.request.request_id, tuple(tokens), accepted[: len(tokens)], logprobs)]
        if reason is not None:
            return effects + self._finish(state, reason, now)
        if len(state.tree) > len(state.tree.path) + self.limits.max_tree_nodes:
            self._sweep(state)
        return effects + self._correct(state)

    def _correct(self, state: RequestState) -> list[m.Effect]:
        """Tells every drafter what was committed, and grants what its schedule gives at once."""
        effects: list[m.Effect] = []
        for name, source in state.sources.items():
            start = source.applied_len
            tokens = tuple(state.output_ids[start:])
            effects.append(m.Correct(name, state.request.request_id, start, tokens))
            source.credits, source.exhausted = 0, False
            if not self.sources[name].paced:
                effects.append(self._grant(state, name, 1))
            elif state.schedule == "parallel":
                effects.append(self._grant(state, name, self.limits.max_lead))
        return effects

    def _count(
        self, state: RequestState, window: m.Window, accepted: list[str], hit: bool, elapsed: float, now: float
    ) -> None:
        stats, tokens = state.stats, len(state.output_ids) - state.stats.output_tokens
        rows = len(window.token_ids)
        if stats.rounds:
            self._costs(state).observe_round(tokens, now - state.last_commit)
            stats.target_busy += elapsed
        else:
            stats.first_token = now
        self._costs(state).observe_target(rows, elapsed)
        stats.rounds += 1
        stats.output_tokens += tokens
        stats.verified += rows - 1
        stats.accepted += len(accepted)
        stats.hits += hit
        for name in accepted:
            stats.accepted_by_source[name] = stats.accepted_by_source.get(name, 0) + 1
        state.last_commit = now

    # Proposals, ends and deaths

    def _grow(self, proposal: m.Proposal) -> list[m.Effect]:
        state = self.scheduler.running.get(proposal.request_id)
        source = state.sources.get(proposal.source) if state is not None else None
        if state is None or source is None or proposal.epoch < source.epoch:
            self.stale += 1
            return []
        if proposal.epoch > source.epoch:
            source.epoch, source.nodes = proposal.epoch, []
        if proposal.first < len(source.nodes):
            self.stale += 1  # repeated
            return []
        source.nodes += [DEAD] * (proposal.first - len(source.nodes))  # lost
        source.nodes[proposal.root] = state.tree.path[proposal.applied_len]
        source.applied_len = proposal.applied_len
        source.exhausted = not proposal.token_ids
        source.credits = max(0, source.credits - proposal.steps)
        for parent, token, score in zip(proposal.parents, proposal.token_ids, proposal.scores):  # noqa: B905
            node = state.tree.insert(source.nodes[parent], token, score, proposal.source)
            source.nodes.append(node)
            state.stats.dropped += node == DEAD
        source.expanded.update(source.nodes[number] for number in proposal.expanded)
        if proposal.elapsed:
            state.stats.draft_busy += proposal.elapsed if state.output_ids else 0.0
            if self.sources[proposal.source].paced:
                self._costs(state).draft_step.add(proposal.elapsed)
        return []

    def _stop(self, request_id: int, reason: FinishReason, now: float, num_tokens: int | None) -> list[m.Effect]:
        state = self.scheduler.forget(request_id)
        if state is None:
            return []
        if isinstance(state, tuple):
            stats = RequestStats(submitted=state[1], started=now, first_token=now, ended=now)
            return [m.Finish(request_id, reason, stats)]
        if num_tokens is not None:
            del state.output_ids[num_tokens:]
            state.stats.output_tokens = len(state.output_ids)
        return self._end(state, reason, now)

    def _finish(self, state: RequestState, reason: FinishReason, now: float) -> list[m.Effect]:
        self.scheduler.forget(state.request.request_id)
        return self._end(state, reason, now)

    def _end(self, state: RequestState, reason: FinishReason, now: float) -> list[m.Effect]:
        state.stats.ended = now
        return [m.End(state.request.request_id), m.Finish(state.request.request_id, reason, state.stats)]

    def _lose(self, source: str) -> list[m.Effect]:
        self.sources.pop(source, None)
        for state in self.scheduler.running.values():
            state.sources.pop(source, None)
            state.wait_until = None
        return []

    def _sweep(self, state: RequestState) -> None:
        new = state.tree.sweep()
        for source in state.sources.values():
            source.nodes = [new.get(node, DEAD) for node in source.nodes]
            source.expanded = {new[node] for node in source.expanded if node in new}
