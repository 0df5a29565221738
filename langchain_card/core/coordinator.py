"""Query and correct: the protocol, as one pure state machine.

```
TargetReady ─► query: pick the likeliest subtree of the cache ─► Verify
Verified    ─► walk: commit what the target chose ─► Emit, and Correct the drafters at work
Proposed    ─► grow the cache
```

The other events may happen at any time: requests come and go, consumers fall behind, workers die and come back.
`handle(event)` changes the state and returns the effects to carry out. There is no clock, no thread and no randomness:
the same object runs in production, under a virtual clock and in an explorer of interleavings. (CARD, arXiv 2508.04462.)
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from langchain_card.core import messages as m
from langchain_card.core.lifecycle import Lifecycle
from langchain_card.core.pass_timing import Passes
from langchain_card.core.policy import Policy, TextStats
from langchain_card.core.proposals import Intake
from langchain_card.core.query import DrafterTraits, Query
from langchain_card.core.request import FinishReason, Request
from langchain_card.core.scheduler import Scheduler
from langchain_card.core.state import RequestState
from langchain_card.core.walk import AcceptanceRule, ExactRule, committed, cut, damaged_logits
from langchain_card.core.workers import Workers
from langchain_card.errors import EngineError
from langchain_card.limits import Limits


class Coordinator:
    """The only writer of request state.

    Args:
        drafters: traits of the drafters.
        limits: bounds.
        policy: decides what depends on measurements.
        vocab_size: the target's; proposals with other token ids are refused.
        chains: verify no more than one candidate after each row.
        rule: decides which rows of a window are committed; the exact rule by default.
    """

    def __init__(
        self,
        drafters: Sequence[DrafterTraits],
        limits: Limits,
        policy: Policy,
        vocab_size: int = 2**31,
        *,
        chains: bool = False,
        rule: AcceptanceRule | None = None,
    ) -> None:
        self.drafters = {drafter.name: drafter for drafter in drafters}
        self.limits = limits
        self.policy = policy
        self.vocab_size = vocab_size
        self.rule: AcceptanceRule = rule or ExactRule()
        self.query = Query(self.drafters, limits, policy, chains=chains)
        self.scheduler = Scheduler(limits)
        self.workers = Workers((m.TARGET, *self.drafters), limits)
        self.draining = False
        self.stale = 0  # proposals and verdicts that came too late or twice
        self._next_step_id = 0
        self._passes = Passes(policy)
        self.intake = Intake(self.drafters, limits, policy, self._passes, vocab_size)
        self._connect()

    def _connect(self) -> None:
        shared = self.drafters, self.scheduler, self.workers, self.query, self.intake, self.policy
        self.lifecycle = Lifecycle(*shared)

    def copy(self) -> Coordinator:
        """Return an independent copy that shares the policy."""
        drafters, chains = tuple(self.drafters.values()), self.query.chains
        rule = self.rule.copy()
        copied = Coordinator(drafters, self.limits, self.policy, self.vocab_size, chains=chains, rule=rule)
        copied.scheduler, copied.workers = self.scheduler.copy(), self.workers.copy()
        copied._connect()
        copied.draining, copied.stale, copied._next_step_id = self.draining, self.stale, self._next_step_id
        return copied

    def handle(self, event: m.Event) -> list[m.Effect]:
        """Handle one event; return the effects to carry out, in order."""
        match event:
            case m.TargetReady(now):
                return self._query(now)
            case m.Verified(verdict, now):
                return self._commit(verdict, now)
            case m.Proposed(proposal, now):
                return self._receive(proposal, now)
            case m.Submitted(request, now, output_ids):
                return self._submit(request, output_ids, now)
            case m.Stopped(request_id, reason, now, num_tokens):
                return self._stop(request_id, reason, now, num_tokens)
            case m.Paused(request_id, paused, now):
                return self._pause(request_id, paused, now)
            case m.WorkerStarted(worker):
                return self._on_started(worker)
            case m.WorkerDied(worker, now, reason):
                return self._on_died(worker, now, reason)
            case m.OutOfMemory(worker, request_ids, now):
                return self._on_out_of_memory(worker, request_ids, now)
            case m.Draining():
                self.draining = True
                # All answers are written to their end, even if not read.
                self.scheduler.pause(self.scheduler.all(), paused=False)
                return []
            case m.Interrupted():
                self._passes.interrupt()
                return []

    # Query: choose what the target verifies next.

    def _query(self, now: float) -> list[m.Effect]:
        effects: list[m.Effect] = []
        if m.TARGET not in self.workers:
            return [m.Wait(math.inf)]
        while (paused := self.scheduler.in_the_way()) is not None:
            effects += self.lifecycle.release(paused, now)
            self.scheduler.put_back(paused)
        effects += self.lifecycle.admit(now)
        ready, until, drafting = [], math.inf, False
        states = [*self.scheduler.verifiable()]
        effects += self.query.draft_first(states, [*map(self.scheduler.load, states)], now)
        for state in states:
            if state.wait_until is not None and now < state.wait_until:
                until, drafting = min(until, state.wait_until), drafting or state.schedule != "parallel"
            else:
                ready.append(state)
        if drafting:  # where nothing overlaps, all draft together and are verified together
            ready = [state for state in ready if state.schedule == "parallel"]
        if ready or self.scheduler.is_reading:
            return [*effects, self._verify(ready, now)]
        if until == math.inf:
            self._passes.interrupt()  # idle
        return [*effects, m.Wait(until)]

    def _verify(self, states: Sequence[RequestState], now: float) -> m.Verify:
        drafting = any(map(self.query.drafts, states))
        loads = [self.scheduler.load(state, drafting=drafting) for state in states]
        windows = self.query.open_windows(states, loads, self._next_step_id, now)
        self._next_step_id += len(windows)
        texts = [state.text for state in states]
        self._passes.begin(windows, texts, loads[0] if len(set(loads)) == 1 else None)
        return m.Verify(tuple(windows))

    # Correct: commit what the target decided.

    def _commit(self, verdict: m.Verdict, now: float) -> list[m.Effect]:
        state = self.scheduler.running.get(verdict.request_id)
        if state is None or state.window is None or state.window.step_id != verdict.step_id:
            self.stale += 1
            return []
        window, state.window, state.wait_until, state.failures = state.window, None, None, 0
        if state.request.labels:
            return self._weigh(state, verdict, now)
        try:
            rows, tokens, state.stats.lossy = committed(self.rule, window, verdict, state.request)
        except EngineError as error:
            return self._finish(state, FinishReason.ERROR, now, error)
        tokens, reason = cut(tokens, state.request, len(state.output_ids))
        sources = [self._advance(state, token) for token in tokens[:-1]]
        self.intake.absorb(state)
        sources.append(self._advance(state, tokens[-1]))
        hit = bool(sources[-1])
        accepted = sources[: len(rows) - 1]
        state.kept_rows = tuple(rows[: len(tokens)])
        state.output_ids += tokens
        self.scheduler.note_length(state)
        self._passes.add(verdict, len(tokens), now)
        state.stats.add_round(verdict, len(tokens), window.sources, accepted, hit, now)
        state.stats.rescued += sum(verdict.target_ids[row] != token for row, token in zip(rows, tokens))  # noqa: B905
        logprobs = tuple(verdict.logprobs[row] for row in state.kept_rows) if verdict.logprobs else ()
        by = (*accepted, "")[: len(tokens)]
        self._observe_text(state.text, window, len(tokens))
        effects: list[m.Effect] = [m.Emit(state.request.request_id, tuple(tokens), by, logprobs, hit)]
        if reason is not None:
            reason = FinishReason.LENGTH if state.stats.closed else reason
            return effects + self._finish(state, reason, now)
        if len(state.tree) > len(state.tree.path) + self.limits.max_tree_nodes:
            new = state.tree.sweep()
            for drafter in state.drafters.values():
                drafter.renumber(new)
        for name in state.drafters:
            effects += self.lifecycle.correct(state, name, hit=hit)
        return effects

    def _weigh(self, state: RequestState, verdict: m.Verdict, now: float) -> list[m.Effect]:
        """End a request that asks only how likely its labels are."""
        self._passes.add(verdict, 1, now)
        state.stats.add_round(verdict, 0, (), (), hit=False, now=now)
        state.stats.label_logprobs = verdict.label_logprobs
        damaged = any(map(math.isnan, verdict.label_logprobs))
        reason = FinishReason.ERROR if damaged else FinishReason.STOP
        return self._finish(state, reason, now, damaged_logits() if damaged else None)

    def _observe_text(self, text: TextStats, window: m.Window, tokens: int) -> None:
        """Learn how many tokens a pass brought, and how many where its candidates cost no device time."""
        text.pace.add(tokens)
        if not any(self.drafters[source].paced for source in window.sources if source in self.drafters):
            text.free_pace.add(tokens)
            text.free_rows.add(len(window.token_ids))

    def _advance(self, state: RequestState, token: int) -> str:
        """Commit one token; return the drafter that had proposed it, or ""."""
        drafted = any(state.tree.root in drafter.expanded for drafter in state.drafters.values())
        tree, first = state.tree, state.tree.first_child()
        for child in tree.children(tree.root):
            source, stated = tree.origins[child]
            taken, unlisted = tree.tokens[child] == token, tree.is_unlisted(child)
            self.policy.observe_candidate(source, stated, taken=taken, unlisted=unlisted)
        hit = tree.advance(token)
        if drafted:
            self.policy.observe_token(state.text, hit=hit, first=hit and tree.root == first)
        return state.tree.sources[state.tree.root] if hit else ""

    def _receive(self, proposal: m.Proposal, now: float) -> list[m.Effect]:
        state = self.scheduler.running.get(proposal.request_id)
        drafter = state.drafters.get(proposal.source) if state is not None else None
        if state is None or drafter is None:
            self.stale += 1
        else:
            self.stale += not self.intake.receive(state, drafter, proposal, self.scheduler.load(state), now)
        return []

    # Requests come and go.

    def _submit(self, request: Request, output_ids: Sequence[int], now: float) -> list[m.Effect]:
        state = RequestState.waiting(request, self.policy.new_text(), now, output_ids)
        refusal = self._refusal()
        self.scheduler.enqueue(state)
        return self._fail(state, now, refusal) if refusal else []

    def _refusal(self) -> str:
        if self.draining:
            return "the engine takes no more requests: it is draining"
        if self.scheduler.is_full:
            return f"max_queue = {self.limits.max_queue} requests wait already"
        return "the target died too often" if self.workers.given_up(m.TARGET) else ""

    def _stop(self, request_id: int, reason: FinishReason, now: float, num_tokens: int | None) -> list[m.Effect]:
        state = self.scheduler.find(request_id)
        if state is None:
            return []
        if num_tokens is not None:
            del state.output_ids[num_tokens:]
            state.stats.output_tokens = len(state.output_ids)
        return self._finish(state, reason, now)

    def _fail(self, state: RequestState, now: float, limit: str) -> list[m.Effect]:
        error = EngineError("request", state.request.request_id, limit, "the log may say more")
        return self._finish(state, FinishReason.ERROR, now, error)

    def _finish(
        self, state: RequestState, reason: FinishReason, now: float, error: EngineError | None = None
    ) -> list[m.Effect]:
        state.stats.ended = now
        if reason in (FinishReason.STOP, FinishReason.LENGTH) and not state.request.labels:
            self.policy.observe_answer(len(state.output_ids))
        effects = self.lifecycle.release(state, now) if self.scheduler.end(state) else []
        return [*effects, m.Finish(state.request.request_id, reason, state.stats, error)]

    def _pause(self, request_id: int, paused: bool, now: float) -> list[m.Effect]:
        state = self.scheduler.find(request_id)
        if state is not None:
            self.scheduler.pause([state], paused=paused and not self.draining)
            state.wait(now, None)
        return []

    # Workers fail and come back.

    def _on_started(self, worker: str) -> list[m.Effect]:
        """Let a drafter join the running requests; a target that came back begins with those that wait."""
        if not self.workers.started(worker) or worker == m.TARGET:
            return []
        return [e for state in self.scheduler.running.values() for e in self.lifecycle.begin_drafting(worker, state)]

    def _on_died(self, worker: str, now: float, reason: str) -> list[m.Effect]:
        """Handle a death: a drafter's costs only speed; a target's sends all running requests back to the queue."""
        if self.workers.given_up(worker):
            return []
        for state in self.scheduler.running.values():
            state.failures += worker == m.TARGET and state.window is not None
        culprits = [s for s in self.scheduler.running.values() if s.failures >= self.limits.max_failures]
        restart_at = self.workers.died(worker, now, self.limits.max_failures if culprits else 0)
        effects: list[m.Effect] = [] if restart_at is None else [m.Restart(worker, restart_at)]
        if worker != m.TARGET:
            for state in self.scheduler.running.values():
                state.drafters.pop(worker, None)
                state.wait_until = None
            return effects
        for state in reversed(list(self.scheduler.running.values())):
            effects += self.lifecycle.release(state, now)
            self.scheduler.put_back(state)
        for state in culprits if restart_at is not None else list(self.scheduler.waiting):
            effects += self._fail(state, now, f"the target failed with it ({reason})")
        return effects

    def _on_out_of_memory(self, worker: str, request_ids: Sequence[int], now: float) -> list[m.Effect]:
        """Do without a drafter that ran out of memory; on the target, run fewer requests, or fail the only one."""
        effects: list[m.Effect] = []
        if worker != m.TARGET:
            states = [state for i in request_ids if (state := self.scheduler.running.get(i)) is not None]
            left = [state for state in states if state.drafters.pop(worker, None) is not None]
            for state in left:
                state.wait_until = None
            return [m.End(worker, state.request.request_id) for state in left]
        states = [state for state in self.scheduler.running.values() if state.window is not None]
        for state in states:
            state.window, state.wait_until = None, None
            self.intake.absorb(state)
        if len(self.scheduler.running) > 1:
            youngest = list(self.scheduler.running.values())[-1]
            effects += self.lifecycle.release(youngest, now)
            self.scheduler.put_back(youngest)
            self.scheduler.capacity = len(self.scheduler.running)
            return effects
        for state in states:
            state.failures += 1
            if state.failures >= self.limits.max_failures:
                effects += self._fail(state, now, "the target ran out of memory")
        return effects
