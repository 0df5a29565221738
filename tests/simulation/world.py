"""`World`: the real coordinator, with everything around it simulated step by step.

A world holds the coordinator, toy workers, consumers and the messages between them. `actions()` lists the actions that
are possible next with threads, processes and an unreliable network; `do(action)` carries one out and checks the
invariants. A chooser of `explorer.py` selects the actions.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any, TypeAlias

from langchain_card.core import messages as m
from langchain_card.core.coordinator import Coordinator
from langchain_card.core.query import DrafterTraits
from langchain_card.core.request import FinishReason, Request, SamplingParams
from langchain_card.core.state import RequestState
from tests.simulation import invariants
from tests.simulation.process import Draft
from tests.simulation.scope import Scope
from tests.simulation.toy import FixedPolicy, ToyDrafter, ToyModel, ToyTarget

Action: TypeAlias = tuple[Any, ...]
FOREVER = 1e18


class World:
    """The whole state of a simulated engine.

    Args:
        scope: its parameters.
    """

    def __init__(self, scope: Scope) -> None:
        self.scope = scope
        self.model = ToyModel(scope.vocab_size, scope.top, seed=scope.seed)
        names = [f"draft{i}" for i in range(1, scope.drafters + 1)]
        self.numbers = {name: i for i, name in enumerate(names, 1)}
        traits = [DrafterTraits(name, paced=True, from_model=True) for name in names]
        last = {"paced": scope.last_paced, "from_model": scope.last_from_model, "reads_target": scope.reads_target}
        traits[-1] = replace(traits[-1], **last)
        policy = FixedPolicy(scope.widths, read=1, late=scope.text > 0, turns=scope.turns)
        self.core = Coordinator(traits, scope.limits, policy)
        self.target: ToyTarget | None = ToyTarget(self.model)
        self.drafts = {name: Draft(ToyDrafter(self.model, name, self.numbers[name], text=scope.text)) for name in names}
        self.windows: tuple[m.Window, ...] | None = None
        self.unread: tuple[m.Window, ...] = ()  # sent to the target, which has not read all text before them
        self.waiting = False  # the target had no work when it last looked, and no event came since
        self.late: list[m.Verdict] = []
        self.restarts: list[str] = []
        self.emitted: dict[int, tuple[int, ...]] = {}
        self.answers = {i: self.answer(i) for i in range(scope.requests)}
        self.stopping: int | None = None  # the request that its consumer stops in the present action
        self.finished: dict[int, FinishReason] = {}
        self.faults = dict(scope.faults)
        self.rounds: dict[int, int] = {}

    def copy(self) -> World:
        """Return an independent copy, with the same script and scope."""
        copied = World.__new__(World)
        copied.__dict__.update(self.__dict__)
        copied.core = self.core.copy()
        copied.target = self.target.copy() if self.target is not None else None
        copied.drafts = {name: draft.copy() for name, draft in self.drafts.items()}
        copied.late, copied.restarts = self.late.copy(), self.restarts.copy()
        copied.emitted, copied.finished = self.emitted.copy(), self.finished.copy()
        copied.rounds, copied.faults = self.rounds.copy(), self.faults.copy()
        return copied

    @property
    def ended(self) -> bool:
        """True if all requests have ended and nothing is under way."""
        return len(self.finished) == self.scope.requests and next(self.plain_actions(), None) is None

    def prompt(self, request_id: int) -> tuple[int, ...]:
        """Return the prompt of a request; prompts differ."""
        return (request_id % self.scope.vocab_size, 1)

    def answer(self, request_id: int) -> tuple[int, ...]:
        """Return the target's own answer, up to the end of text."""
        tokens = self.model.answer(self.prompt(request_id), self.scope.max_tokens)
        return tokens[: tokens.index(self.scope.eos) + 1] if self.scope.eos in tokens else tokens

    # Possible actions.

    def actions(self) -> list[Action]:
        """Return all possible actions, faults included."""
        return [*self.plain_actions(), *self.fault_actions()]

    def plain_actions(self) -> Iterator[Action]:
        """Yield the possible actions that are no faults."""
        if len(self.emitted) < self.scope.requests:
            yield ("submit",)
        if self.target is not None and self.windows is not None:
            yield ("verify",)
        elif self.target is not None and not self.waiting:
            yield ("query",)
        elif self.target is not None and any(s.wait_until is not None for s in self.core.scheduler.running.values()):
            yield ("timer",)
        for name, draft in self.drafts.items():
            if draft.inbox:
                yield ("command", name)
            if draft.may_step and not (self.scope.reads_target and self.windows is not None):  # one thread for both
                yield ("step", name)
            if draft.outbox:
                yield ("proposal", name)
        for worker in self.restarts:
            yield ("restart", worker)
        for state in self._states():
            if state.paused and (not self.scope.one_reader or all(other.paused for other in self._states())):
                yield ("resume", state.request.request_id)
        if self.late:
            yield ("late verdict",)

    def fault_actions(self) -> Iterator[Action]:
        """Yield the possible faults, as often as the scope allows."""
        left = {fault for fault, count in self.faults.items() if count}
        if "kill target" in left and self.target is not None:
            yield ("kill target",)
        if "target out of memory" in left and self.windows:
            yield ("target out of memory",)
        if "read on" in left:
            yield from (("read on", window.request_id) for window in self.windows or ())
        for name, draft in self.drafts.items():
            if "kill" in left and draft.alive:
                yield ("kill", name)
            if "out of memory" in left and draft.may_step:
                yield ("out of memory", name)
            if draft.inbox and isinstance(draft.inbox[0], m.Correct | m.Grow):
                yield from ((fault, "command", name) for fault in ("lose", "repeat") if fault in left)
            if draft.outbox:
                yield from ((fault, "proposal", name) for fault in ("lose", "repeat") if fault in left)
        for state in self._states():
            if "abort" in left:
                yield ("abort", state.request.request_id)
            if "stop" in left and state.output_ids:
                yield ("stop", state.request.request_id)
            if "pause" in left and not state.paused:
                yield ("pause", state.request.request_id)
        if "drain" in left:
            yield ("drain",)

    def _states(self) -> list[RequestState]:
        return [*self.core.scheduler.running.values(), *self.core.scheduler.waiting]

    # Carrying actions out.

    def do(self, action: Action) -> None:
        """Carry an action out and check the invariants.

        Raises:
            AssertionError: an invariant does not hold.
        """
        kind = action[0]
        if kind in self.faults:
            self.faults[kind] -= 1
        getattr(self, "_" + kind.replace(" ", "_"))(*action[1:])
        invariants.check(self)

    def handle(self, event: m.Event) -> None:
        """Hand an event to the coordinator and carry its effects out."""
        self.waiting = False
        for effect in self.core.handle(event):
            match effect:
                case m.Verify(windows):
                    self.windows, self.unread = (*self.unread, *windows), ()
                    for window in windows:
                        invariants.check_window(self, window)
                case m.Emit(request_id, tokens):
                    assert request_id not in self.finished, "tokens after the end"
                    self.emitted[request_id] += tokens
                    self.rounds[request_id] = self.rounds.get(request_id, 0) + 1
                case m.Finish(request_id, reason):
                    invariants.check_end(self, request_id, reason)
                    self.finished[request_id] = reason
                case m.Wait():
                    self.waiting = True
                case m.Restart(worker):
                    self.restarts.append(worker)
                case m.Begin(m.TARGET):
                    assert self.target is not None, "work for a dead target"
                    self.target.begin(effect)
                case m.End(m.TARGET, request_id):
                    assert self.target is not None, "work for a dead target"
                    self.target.end(request_id)
                    self.unread = tuple(window for window in self.unread if window.request_id != request_id)
                case m.Begin() | m.Correct() | m.Grow() | m.End():
                    assert self.drafts[effect.worker].alive, "work for a dead drafter"
                    self.drafts[effect.worker].inbox.append(effect)

    def _submit(self) -> None:
        request_id = len(self.emitted)
        params = SamplingParams(max_tokens=self.scope.max_tokens, schedule=self.scope.schedule)
        begun = self.emitted[request_id] = self.answers[request_id][: self.scope.begun]
        request = Request(request_id, self.prompt(request_id), params, (self.scope.eos,))
        self.handle(m.Submitted(request, 0.0, begun))

    def _query(self) -> None:
        self.handle(m.TargetReady(0.0))

    def _timer(self) -> None:
        self.handle(m.TargetReady(FOREVER))

    def _verify(self, *unread: int) -> None:
        assert self.target is not None and self.windows is not None
        windows = [window for window in self.windows if window.request_id in self.target.kv_lengths]
        self.unread = tuple(window for window in windows if window.request_id in unread)
        self.windows = None
        for verdict in self.target.verify([window for window in windows if window not in self.unread]):
            self.handle(m.Verified(verdict, 0.0))

    def _read_on(self, request_id: int) -> None:
        """Take a pass that reads a part of this request's text and verifies the windows of the others."""
        self._verify(request_id)

    def _late_verdict(self) -> None:
        self.handle(m.Verified(self.late.pop(0), 0.0))

    def _command(self, name: str) -> None:
        self.drafts[name].worker.handle(self.drafts[name].inbox.pop(0))

    def _step(self, name: str) -> None:
        self.drafts[name].worker.step()

    def _proposal(self, name: str) -> None:
        self.handle(m.Proposed(self.drafts[name].outbox.pop(0), 0.0))

    def _lose(self, channel: str, name: str) -> None:
        draft = self.drafts[name]
        (draft.inbox if channel == "command" else draft.outbox).pop(0)

    def _repeat(self, channel: str, name: str) -> None:
        queue: list[Any] = self.drafts[name].inbox if channel == "command" else self.drafts[name].outbox
        queue.append(queue[0])  # delivered now, and again after all other messages

    def _restart(self, worker: str) -> None:
        self.restarts.remove(worker)
        if worker == m.TARGET:
            self.target = ToyTarget(self.model)
        else:
            self.drafts[worker].alive = True
        self.handle(m.WorkerStarted(worker, 0.0))

    def _kill(self, name: str) -> None:
        self.drafts[name].die()
        self.handle(m.WorkerDied(name, 0.0))

    def _kill_target(self) -> None:
        assert self.target is not None
        if self.windows is not None:  # its verdicts may be under way already
            open_ids = self.target.kv_lengths
            self.late += self.target.verify([window for window in self.windows if window.request_id in open_ids])
        self.target, self.windows, self.unread = None, None, ()
        self.handle(m.WorkerDied(m.TARGET, 0.0))

    def _out_of_memory(self, name: str) -> None:
        self.handle(m.OutOfMemory(name, self.drafts[name].run_out_of_memory(), 0.0))

    def _target_out_of_memory(self) -> None:
        assert self.target is not None and self.windows is not None
        windows, self.windows = self.windows, None
        open_ids = self.target.kv_lengths
        self.target.verify([window for window in windows if window.request_id in open_ids])  # it fails at the end
        self.handle(m.OutOfMemory(m.TARGET, tuple(window.request_id for window in windows), 0.0))

    def _abort(self, request_id: int) -> None:
        self.stopping = request_id
        self.handle(m.Stopped(request_id, FinishReason.ABORT, 0.0))
        self.stopping = None

    def _stop(self, request_id: int) -> None:
        self.stopping = request_id
        self.handle(m.Stopped(request_id, FinishReason.STOP, 0.0, len(self.emitted[request_id]) - 1))
        self.stopping = None

    def _pause(self, request_id: int) -> None:
        self.handle(m.Paused(request_id, True, 0.0))

    def _resume(self, request_id: int) -> None:
        self.handle(m.Paused(request_id, False, 0.0))

    def _drain(self) -> None:
        self.handle(m.Draining(0.0))
