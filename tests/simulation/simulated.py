"""Simulated devices and a virtual clock: the real coordinator, and workers that are busy as long as they say.

No time passes: a run of minutes takes milliseconds and gives the same figures everywhere.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from langchain_card.config import Limits
from langchain_card.core import messages as m
from langchain_card.core.coordinator import Coordinator
from langchain_card.core.policy import Policy
from langchain_card.core.query import DrafterTraits
from langchain_card.core.request import Request, RequestStats
from langchain_card.engine.draft_worker import DraftWorker
from langchain_card.ports import Drafter
from tests.simulation.process import Draft
from tests.simulation.toy import ToyDrafter, ToyTarget

HAIR = 1e-9
"""Share of a step by which two ends may differ and still be one instant."""


@dataclass
class Device:
    """Takes one step at a time.

    Attributes:
        slowdown: how much longer a step takes while the other device works, too.
        work: seconds of the step under way, had it the machine to itself; 0 when idle.
        left: of them, those still to be done.
        begun: when it began.
    """

    slowdown: float = 1.0
    work: float = 0.0
    left: float = math.inf
    begun: float = 0.0

    @property
    def busy(self) -> bool:
        """Whether a step is under way."""
        return self.left < math.inf

    def begin(self, work: float, now: float) -> None:
        """Starts a step."""
        self.work, self.left, self.begun = work, work, now

    def advance(self, seconds: float, *, shared: bool) -> bool:
        """Lets time pass; whether the step has ended."""
        self.left -= seconds / (self.slowdown if shared else 1.0)
        return self.left <= HAIR * self.work

    def end(self, now: float) -> float:
        """Takes the step off; how many times longer it took than it would have alone."""
        self.left = math.inf
        return (now - self.begun) / self.work if self.work else 1.0


@dataclass
class Answer:
    """What a simulated request came to, in virtual seconds."""

    token_ids: list[int] = field(default_factory=list)
    stats: RequestStats = field(default_factory=RequestStats)


class Simulation:
    """Requests on two devices with a clock of their own.

    Where a draft step and a target step end at one instant, the draft's comes first.

    Args:
        target: with its step times.
        drafter: with its step times; None for none.
        policy: of the coordinator.
        limits: of the coordinator.
        slowdown: how much longer a step of the (target, draft) takes while both work: two models on one bus.
        beside: drafters whose steps take no time.

    Attributes:
        now: the time.
    """

    def __init__(
        self,
        target: ToyTarget,
        drafter: ToyDrafter | None,
        policy: Policy,
        limits: Limits,
        slowdown: tuple[float, float] = (1.0, 1.0),
        beside: Sequence[Drafter] = (),
    ) -> None:
        self.now = 0.0
        every = [*beside, *([drafter] if drafter is not None else [])]
        traits = [DrafterTraits(each.name, paced=each is drafter, from_model=each is drafter) for each in every]
        self._core = Coordinator(traits, limits, policy)
        self._target, self._draft = target, Draft(drafter) if drafter is not None else None
        self._beside = {each.name: DraftWorker(each, self._publish, lambda _: None) for each in beside}
        self._target_device, self._draft_device = map(Device, slowdown)
        self._verdicts: list[m.Verdict] = []
        self._drafted: list[m.Proposal] = []
        self._arrived: list[m.Proposal] = []
        self._look_at = 0.0
        self._answers: dict[int, Answer] = {}
        self._open: set[int] = set()

    def run(self, requests: Sequence[Request]) -> list[Answer]:
        """Submits all at once and lets time pass until all are answered."""
        for request in requests:
            self._answers[request.request_id] = Answer()
            self._open.add(request.request_id)
            self._handle(m.Submitted(request, self.now))
        self._look_at = self.now
        while self._open:
            self._use_target()
            self._use_draft()
            self._pass_time()
        return [self._answers[request.request_id] for request in requests]

    def _use_target(self) -> None:
        if self._target_device.busy or self.now < self._look_at:
            return
        self._take_in()
        self._look_at = math.inf
        self._handle(m.TargetReady(self.now))

    def _use_draft(self) -> None:
        if self._draft is None or self._draft_device.busy:
            return
        while self._draft.inbox:
            self._draft.worker.handle(self._draft.inbox.pop(0))
        if self._draft.may_step:
            self._draft.worker.step()
            self._drafted = self._draft.outbox[:]
            self._draft.outbox.clear()
            self._draft_device.begin(sum(proposal.elapsed for proposal in self._drafted), self.now)

    def _pass_time(self) -> None:
        """Up to the next end of a step, or until the target wants to look again."""
        target, draft = self._target_device, self._draft_device
        shared = target.busy and draft.busy
        ends = [device.left * (device.slowdown if shared else 1.0) for device in (target, draft)]
        seconds = min(*ends, math.inf if target.busy else max(0.0, self._look_at - self.now))
        assert seconds < math.inf or not self._open, "nothing will ever happen again"
        self.now += seconds if self._open else 0.0
        ended = [device.busy and device.advance(seconds, shared=shared) for device in (target, draft)]
        if ended[1]:
            longer = draft.end(self.now)
            self._arrived += [replace(p, elapsed=p.elapsed * longer) for p in self._drafted]
            self._look_at = self.now
        if ended[0]:
            longer = target.end(self.now)
            self._take_in()
            for verdict in self._verdicts:
                self._handle(m.Verified(replace(verdict, elapsed=verdict.elapsed * longer), self.now))
            self._look_at = self.now

    def _publish(self, proposal: m.Proposal) -> None:
        self._arrived.append(proposal)

    def _take_in(self) -> None:
        for worker in self._beside.values():
            worker.work(self._open)
        for proposal in self._arrived:
            self._handle(m.Proposed(proposal, self.now))
        self._arrived.clear()

    def _handle(self, event: m.Event) -> None:
        for effect in self._core.handle(event):
            match effect:
                case m.Verify(windows):
                    self._verdicts = self._target.verify(windows)
                    self._target_device.begin(sum(verdict.elapsed for verdict in self._verdicts), self.now)
                case m.Wait(until):
                    self._look_at = until
                case m.Begin(m.TARGET):
                    self._target.begin(effect)
                case m.End(m.TARGET, request_id):
                    self._target.end(request_id)
                case m.Begin() | m.Correct() | m.Grow() | m.End() if effect.worker in self._beside:
                    self._beside[effect.worker].handle(effect)
                case m.Begin() | m.Correct() | m.Grow() | m.End():
                    assert self._draft is not None
                    self._draft.inbox.append(effect)
                case m.Emit(request_id, token_ids):
                    self._answers[request_id].token_ids += token_ids
                case m.Finish(request_id, _, stats):
                    self._answers[request_id].stats = stats
                    self._open.discard(request_id)


def simulate(
    request: Request, target: ToyTarget, drafter: ToyDrafter, policy: Policy, limits: Limits
) -> tuple[list[int], RequestStats]:
    """One answer on two devices of their own; tokens and statistics."""
    (answer,) = Simulation(target, drafter, policy, limits).run([request])
    return answer.token_ids, answer.stats
