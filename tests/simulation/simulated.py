"""`Simulation`: the real coordinator with simulated devices and a virtual clock.

A step takes the virtual seconds that its worker reports. Minutes of virtual time take milliseconds, and give the same
figures everywhere.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from langchain_card.core import messages as m
from langchain_card.core.coordinator import Coordinator
from langchain_card.core.policy import Policy
from langchain_card.core.query import DrafterTraits
from langchain_card.core.request import Request, RequestStats
from langchain_card.engine.draft_worker import DraftWorker
from langchain_card.limits import Limits
from langchain_card.ports import Drafter
from tests.simulation.process import Draft
from tests.simulation.toy import ToyDrafter, ToyTarget

HAIR = 1e-9
"""Share of a step by which its end may be early because of rounding; the step counts as ended."""


@dataclass
class Device:
    """A device that takes one step at a time.

    Attributes:
        slowdown: factor by which a step takes longer while the other device works, too.
        work: seconds that the step under way takes while the other device is idle.
        left: the part of `work` still to be done; infinite when idle.
        begun: time when the step began.
    """

    slowdown: float = 1.0
    work: float = 0.0
    left: float = math.inf
    begun: float = 0.0

    @property
    def busy(self) -> bool:
        """True while a step is under way."""
        return self.left < math.inf

    def begin(self, work: float, now: float) -> None:
        """Begin a step."""
        self.work, self.left, self.begun = work, work, now

    def advance(self, seconds: float, *, shared: bool) -> bool:
        """Let time pass; return True if the step has ended."""
        self.left -= seconds / (self.slowdown if shared else 1.0)
        return self.left <= HAIR * self.work

    def end(self, now: float) -> float:
        """End the step; return the factor by which it took longer than with the other device idle."""
        self.left = math.inf
        return (now - self.begun) / self.work if self.work else 1.0


@dataclass
class SimulatedAnswer:
    """The answer of a simulated request; its statistics are in virtual seconds."""

    token_ids: list[int] = field(default_factory=list)
    stats: RequestStats = field(default_factory=RequestStats)


class Simulation:
    """Requests on two simulated devices with a virtual clock.

    If a draft step and a target step end at the same time, the draft step comes first.

    Args:
        target: the target; its step times are used.
        drafter: the paced drafter, if any; its step times are used.
        policy: of the coordinator.
        limits: of the coordinator.
        slowdown: factors by which a step of (target, draft) takes longer while both work, as on one memory bus.
        beside: drafters whose steps take no time.

    Attributes:
        now: the virtual time.
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
        drafters = [*beside, *([drafter] if drafter is not None else [])]
        traits = [DrafterTraits(each.name, paced=each is drafter, from_model=each is drafter) for each in drafters]
        self._core = Coordinator(traits, limits, policy)
        self._target, self._draft = target, Draft(drafter) if drafter is not None else None
        self._beside = {each.name: DraftWorker(each, self._publish, lambda _: None) for each in beside}
        self._target_device, self._draft_device = map(Device, slowdown)
        self._verdicts: list[m.Verdict] = []
        self._drafted: list[m.Proposal] = []
        self._arrived: list[m.Proposal] = []
        self._look_at = 0.0
        self._answers: dict[int, SimulatedAnswer] = {}
        self._open: set[int] = set()

    def run(self, requests: Sequence[Request]) -> list[SimulatedAnswer]:
        """Submit all requests at once, and let time pass until all are answered."""
        for request in requests:
            self._answers[request.request_id] = SimulatedAnswer()
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
        """Let time pass up to the next end of a step, or until the target is to look for work again."""
        target, draft = self._target_device, self._draft_device
        shared = target.busy and draft.busy
        ends = [device.left * (device.slowdown if shared else 1.0) for device in (target, draft)]
        seconds = min(*ends, math.inf if target.busy else max(0.0, self._look_at - self.now))
        assert seconds < math.inf or not self._open, "requests are open, but no event will follow"
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
    """Simulate one request on two devices; return the tokens and statistics of its answer."""
    (answer,) = Simulation(target, drafter, policy, limits).run([request])
    return answer.token_ids, answer.stats
