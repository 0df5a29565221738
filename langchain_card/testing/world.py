"""A world in which the real coordinator runs, step by step, with everything around it simulated.

`World` holds the coordinator, toy workers, the messages between them and the consumers. `actions()` says what could
happen next, in any order that threads, processes and a careless network allow; `do(action)` lets it happen and checks
the invariants. Who chooses is an explorer (`testing.explorer`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

from langchain_card.config import Limits, Schedule
from langchain_card.core import messages as m
from langchain_card.core.candidates import DEAD, CandidateTree
from langchain_card.core.coordinator import Coordinator
from langchain_card.core.query import Source
from langchain_card.core.request import FinishReason, Request, RequestState, SamplingParams
from langchain_card.ports import Budget
from langchain_card.testing.toy import FixedPolicy, ToyDrafter, ToyModel, ToyTarget

Action: TypeAlias = tuple[Any, ...]
EOS = 99  # never chosen by a toy model
FOREVER = 1e18


@dataclass(frozen=True)
class Scope:
    """What a world holds and what may go wrong in it.

    Attributes:
        name: of the scope.
        requests: answers to be written.
        max_tokens: of each.
        drafters: at the tree.
        schedule: of every request.
        vocab_size, top: of the toy model.
        limits: bounds.
        widths: draft steps granted with a correction.
        faults: how often each fault may strike: "kill", "kill target", "out of memory", "target out of memory", "lose",
            "repeat", "abort", "pause", "drain".
    """

    name: str
    requests: int = 1
    max_tokens: int = 3
    drafters: int = 1
    schedule: Schedule = "parallel"
    vocab_size: int = 3
    top: float = 0.6
    seed: int = 0
    limits: Limits = field(
        default_factory=lambda: Limits(max_num_seqs=2, max_window=3, max_lead=3, max_tree_nodes=4, max_queue=2)
    )
    widths: tuple[int, ...] = (1,)
    faults: Mapping[str, int] = field(default_factory=dict)


class Draft:
    """A drafter's worker, its process and its two channels."""

    def __init__(self, drafter: ToyDrafter) -> None:
        self.drafter = drafter
        self.alive = True
        self.begun: dict[int, m.Begin] = {}
        self.leave: dict[int, tuple[int, ...]] = {}
        self.inbox: list[Any] = []
        self.outbox: list[m.Proposal] = []

    def copy(self) -> Draft:
        copied = Draft(self.drafter.copy())
        copied.alive, copied.begun, copied.leave = self.alive, self.begun.copy(), self.leave.copy()
        copied.inbox, copied.outbox = self.inbox.copy(), self.outbox.copy()
        return copied

    def handle(self, command: Any) -> None:
        """As `engine.draft_worker` does."""
        match command:
            case m.Begin(_, request):
                self.begun[request.request_id], self.leave[request.request_id] = command, ()
                self.drafter.begin(request, command.output_ids)
            case m.Correct(_, request_id, start, token_ids) if request_id in self.begun:
                self.leave[request_id] = ()
                self.drafter.correct(request_id, start, token_ids)
            case m.Grow(_, request_id, widths) if request_id in self.begun:
                self.leave[request_id] += widths
            case m.End(_, request_id) if request_id in self.begun:
                del self.begun[request_id], self.leave[request_id]
                self.drafter.end(request_id)

    def step(self, request_id: int) -> None:
        width, self.leave[request_id] = self.leave[request_id][0], self.leave[request_id][1:]
        for proposal in self.drafter.step([Budget(request_id, width)]):
            if not proposal.token_ids:
                self.leave[request_id] = ()
            self.outbox.append(replace(proposal, incarnation=self.begun[request_id].incarnation))

    def die(self) -> None:
        """What was sent may still arrive."""
        self.alive, self.begun, self.leave, self.inbox = False, {}, {}, []
        self.drafter.close()


class World:
    """One state of everything.

    Args:
        scope: what is in it.
    """

    def __init__(self, scope: Scope) -> None:
        self.scope = scope
        self.model = ToyModel(scope.vocab_size, scope.top, seed=scope.seed)
        names = [f"draft{i}" for i in range(1, scope.drafters + 1)]
        self.numbers = {name: i for i, name in enumerate(names, 1)}
        sources = [Source(name, paced=True) for name in names]
        self.core = Coordinator(sources, scope.limits, FixedPolicy(scope.widths))  # type: ignore[arg-type]
        self.target: ToyTarget | None = ToyTarget(self.model)
        self.drafts = {name: Draft(ToyDrafter(self.model, name, self.numbers[name])) for name in names}
        self.windows: tuple[m.Window, ...] | None = None
        self.waiting = False  # the target had nothing to do when it looked last, and nothing happened since
        self.late: list[m.Verdict] = []
        self.restarts: list[str] = []
        self.emitted: dict[int, tuple[int, ...]] = {}
        self.answers = {i: self.model.answer(self.prompt(i), scope.max_tokens) for i in range(scope.requests)}
        self.finished: dict[int, FinishReason] = {}
        self.faults = dict(scope.faults)
        self.rounds: dict[int, int] = {}

    def copy(self) -> World:
        """An independent copy; the script and the scope are shared."""
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
        """Whether every request ended and nothing is under way."""
        return len(self.finished) == self.scope.requests and next(self.plain_actions(), None) is None

    def prompt(self, request_id: int) -> tuple[int, ...]:
        """Each request has its own."""
        return (request_id % self.scope.vocab_size, 1)

    # What could happen next.

    def actions(self) -> list[Action]:
        """Everything that could happen now, faults included."""
        return [*self.plain_actions(), *self.fault_actions()]

    def plain_actions(self) -> Iterator[Action]:
        """What happens without faults."""
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
            for request_id, widths in draft.leave.items():
                if widths:
                    yield ("step", name, request_id)
            if draft.outbox:
                yield ("proposal", name)
        for worker in self.restarts:
            yield ("restart", worker)
        for state in self._states():
            if state.paused:
                yield ("resume", state.request.request_id)
        if self.late:
            yield ("late verdict",)

    def fault_actions(self) -> Iterator[Action]:
        """What may go wrong, as often as the scope allows."""
        left = {fault for fault, count in self.faults.items() if count}
        if "kill target" in left and self.target is not None:
            yield ("kill target",)
        if "target out of memory" in left and self.windows:
            yield ("target out of memory",)
        for name, draft in self.drafts.items():
            if "kill" in left and draft.alive:
                yield ("kill", name)
            if "out of memory" in left and any(draft.leave.values()):
                yield ("out of memory", name)
            if draft.inbox and isinstance(draft.inbox[0], m.Correct | m.Grow):
                yield from ((fault, "command", name) for fault in ("lose", "repeat") if fault in left)
            if draft.outbox:
                yield from ((fault, "proposal", name) for fault in ("lose", "repeat") if fault in left)
        for state in self._states():
            if "abort" in left:
                yield ("abort", state.request.request_id)
            if "pause" in left and not state.paused:
                yield ("pause", state.request.request_id)
        if "drain" in left:
            yield ("drain",)

    def _states(self) -> list[RequestState]:
        return [*self.core.scheduler.running.values(), *self.core.scheduler.waiting]

    # Let it happen.

    def do(self, action: Action) -> None:
        """Carries an action out and checks the invariants.

        Raises:
            AssertionError: one does not hold.
        """
        kind = action[0]
        if kind in self.faults:
            self.faults[kind] -= 1
        getattr(self, "_" + kind.replace(" ", "_"))(*action[1:])
        self.check()

    def tell(self, event: m.Event) -> None:
        """Hands an event to the core and carries its effects out."""
        self.waiting = False
        for effect in self.core.handle(event):
            match effect:
                case m.Verify(windows):
                    self.windows = windows
                    for window in windows:
                        self._check_window(window)
                case m.Emit(request_id, tokens):
                    assert request_id not in self.finished, "tokens after the end"
                    self.emitted[request_id] += tokens
                    self.rounds[request_id] = self.rounds.get(request_id, 0) + 1
                case m.Finish(request_id, reason):
                    assert request_id not in self.finished, "ended twice"
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
                case m.Begin() | m.Correct() | m.Grow() | m.End():
                    assert self.drafts[effect.worker].alive, "work for a dead drafter"
                    self.drafts[effect.worker].inbox.append(effect)

    def _submit(self) -> None:
        request_id = len(self.emitted)
        params = SamplingParams(max_tokens=self.scope.max_tokens, schedule=self.scope.schedule)
        self.emitted[request_id] = ()
        self.tell(m.Submitted(Request(request_id, self.prompt(request_id), params, (EOS,)), 0.0))

    def _query(self) -> None:
        self.tell(m.TargetReady(0.0))

    def _timer(self) -> None:
        self.tell(m.TargetReady(FOREVER))

    def _verify(self) -> None:
        assert self.target is not None and self.windows is not None
        windows, self.windows = self.windows, None
        held = self.target.held
        for verdict in self.target.verify([window for window in windows if window.request_id in held]):
            self.tell(m.Verified(verdict, 0.0))

    def _late_verdict(self) -> None:
        self.tell(m.Verified(self.late.pop(0), 0.0))

    def _command(self, name: str) -> None:
        self.drafts[name].handle(self.drafts[name].inbox.pop(0))

    def _step(self, name: str, request_id: int) -> None:
        self.drafts[name].step(request_id)

    def _proposal(self, name: str) -> None:
        self.tell(m.Proposed(self.drafts[name].outbox.pop(0), 0.0))

    def _lose(self, channel: str, name: str) -> None:
        draft = self.drafts[name]
        (draft.inbox if channel == "command" else draft.outbox).pop(0)

    def _repeat(self, channel: str, name: str) -> None:
        queue: list[Any] = self.drafts[name].inbox if channel == "command" else self.drafts[name].outbox
        queue.append(queue[0])  # once now and once behind all that follows

    def _restart(self, worker: str) -> None:
        self.restarts.remove(worker)
        if worker == m.TARGET:
            self.target = ToyTarget(self.model)
        else:
            self.drafts[worker].alive = True
        self.tell(m.WorkerStarted(worker, 0.0))

    def _kill(self, name: str) -> None:
        self.drafts[name].die()
        self.tell(m.WorkerDied(name, 0.0))

    def _kill_target(self) -> None:
        assert self.target is not None
        if self.windows is not None:  # it may have answered just before
            held = self.target.held
            self.late += self.target.verify([window for window in self.windows if window.request_id in held])
        self.target, self.windows = None, None
        self.tell(m.WorkerDied(m.TARGET, 0.0))

    def _out_of_memory(self, name: str) -> None:
        draft = self.drafts[name]
        request_ids = tuple(request_id for request_id, widths in draft.leave.items() if widths)
        draft.leave = {request_id: () for request_id in draft.leave}
        self.tell(m.OutOfMemory(name, request_ids, 0.0))

    def _target_out_of_memory(self) -> None:
        assert self.windows is not None
        windows, self.windows = self.windows, None
        self.tell(m.OutOfMemory(m.TARGET, tuple(window.request_id for window in windows), 0.0))

    def _abort(self, request_id: int) -> None:
        self.tell(m.Stopped(request_id, FinishReason.ABORT, 0.0))

    def _pause(self, request_id: int) -> None:
        self.tell(m.Paused(request_id, True, 0.0))

    def _resume(self, request_id: int) -> None:
        self.tell(m.Paused(request_id, False, 0.0))

    def _drain(self) -> None:
        self.tell(m.Draining(0.0))

    # What must hold after every event.

    def check(self) -> None:
        """The invariants of docs/architecture.md."""
        limits, scheduler = self.core.limits, self.core.scheduler
        for request_id, tokens in self.emitted.items():
            assert tokens == self.answers[request_id][: len(tokens)], "a token is not the target's"
        running, waiting = len(scheduler.running), len(scheduler.waiting)
        assert len(self.emitted) == running + waiting + len(self.finished), "a request was lost"
        assert scheduler.ended == len(self.finished)
        assert running <= limits.max_num_seqs and waiting <= limits.max_queue + limits.max_num_seqs
        for state in self._states():
            assert tuple(state.output_ids) == self.emitted[state.request.request_id], "committed is not what was emitted"
            self._check_tree(state)
        held = set(self.target.held) if self.target is not None else set()
        assert held <= set(scheduler.running), "an ended request holds KV"
        if self.ended:
            assert not held, "an ended request holds KV"
            assert not any(draft.drafter.trees or draft.begun for draft in self.drafts.values()), "a draft holds KV"

    def _check_tree(self, state: RequestState) -> None:
        tree = state.tree
        assert [tree.tokens[node] for node in tree.path[1:]] == state.output_ids, "the tree does not hold the answer"
        assert len(tree) - len(tree.path) <= 2 * self.core.limits.max_tree_nodes, "the tree has no bound"
        for source in state.sources.values():
            assert source.credits <= self.core.limits.max_lead, "more leave than there may be lead"
        prefixes = {tree.root: (*state.request.prompt_ids, *state.output_ids)}
        for node in range(tree.root + 1, len(tree)):
            above = prefixes.get(tree.parents[node])
            if above is not None:
                proposed = self.model.candidates(above, self.numbers[tree.sources[node]])
                assert any(tree.tokens[node] == token for token, _ in proposed), "a candidate under a wrong prefix"
                prefixes[node] = (*above, tree.tokens[node])

    def _check_window(self, window: m.Window) -> None:
        state = self.core.scheduler.running[window.request_id]
        assert window is state.window and len(window.token_ids) <= self.core.limits.max_window
        last = state.output_ids[-1] if state.output_ids else state.request.prompt_ids[-1]
        assert window.token_ids[0] == last, "the window does not start at the last committed token"
        left = state.request.params.max_tokens - len(state.output_ids)
        assert len(window.token_ids) <= left, "more rows than tokens that may follow"


def canonical(tree: CandidateTree) -> dict[int, int]:
    """Number of each node that can still matter: committed ones from -2 downwards, live candidates from 0 upwards."""
    number = {node: -2 - depth for depth, node in enumerate(tree.path)}
    live = (node for node in range(tree.root + 1, len(tree)) if tree.is_alive(node))
    return number | {node: i for i, node in enumerate(live)} | {DEAD: DEAD}
