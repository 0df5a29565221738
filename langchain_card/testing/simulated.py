"""Simulated devices and a virtual clock: the real coordinator, and workers that are busy as long as they say.

No time passes: a run of minutes takes milliseconds and gives the same figures everywhere.
"""

from __future__ import annotations

import math
from typing import Any

from langchain_card.config import Limits
from langchain_card.core import messages as m
from langchain_card.core.controller import Policy
from langchain_card.core.coordinator import Coordinator
from langchain_card.core.query import Source
from langchain_card.core.request import Request, RequestStats
from langchain_card.testing.process import Draft
from langchain_card.testing.toy import ToyDrafter, ToyTarget


class SimulatedDraft:
    """A draft device: takes commands between two steps, and publishes when a step has ended.

    Args:
        drafter: with its step times.
    """

    def __init__(self, drafter: ToyDrafter) -> None:
        self.draft = Draft(drafter)
        self.commands: list[tuple[float, Any]] = []
        self.published: list[tuple[float, m.Proposal]] = []
        self.time = 0.0

    def run_until(self, now: float) -> None:
        """Does everything that begins before `now`."""
        while True:
            while self.commands and self.commands[0][0] <= self.time:
                self.draft.worker.handle(self.commands.pop(0)[1])
            if self.draft.may_step and self.time <= now:
                self.draft.worker.step()
                proposal = self.draft.outbox.pop()
                self.time += proposal.elapsed
                self.published.append((self.time, proposal))
            elif self.commands and self.commands[0][0] <= now:
                self.time = max(self.time, self.commands[0][0])
            else:
                return

    def next_event(self) -> float:
        """When the next proposal arrives, if the draft goes on."""
        return self.published[0][0] if self.published else math.inf


def simulate(
    request: Request, target: ToyTarget, drafter: ToyDrafter, policy: Policy, limits: Limits
) -> tuple[list[int], RequestStats]:
    """One answer on two devices with a clock of its own.

    Args:
        request: what to write.
        target: with its step times.
        drafter: with its step times.
        policy: of the coordinator.
        limits: of the coordinator.

    Returns:
        Tokens and statistics, in virtual seconds.
    """
    core = Coordinator([Source(drafter.name, paced=True)], limits, policy)
    draft, now, tokens = SimulatedDraft(drafter), 0.0, list[int]()
    events: list[m.Event] = [m.Submitted(request, now)]
    while True:
        draft.run_until(now)
        while draft.published and draft.published[0][0] <= now:
            events.append(m.Proposed(draft.published.pop(0)[1], now))
        for event in (*events, m.TargetReady(now)):
            for effect in core.handle(event):
                match effect:
                    case m.Verify(windows):
                        verdicts = target.verify(windows)
                        now += verdicts[0].elapsed
                        events = [m.Verified(verdict, now) for verdict in verdicts]
                    case m.Wait(until):
                        draft.run_until(min(until, now + 1e6))
                        now, events = min(until, max(now, draft.next_event())), []
                    case m.Begin(m.TARGET):
                        target.begin(effect)
                    case m.Begin() | m.Correct() | m.Grow() | m.End() if effect.worker != m.TARGET:
                        draft.commands.append((now, effect))
                    case m.Emit():
                        tokens += effect.token_ids
                    case m.Finish():
                        return tokens, effect.stats
