"""A drafter's worker as a process of its own: what it holds, its two channels, and its death."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from langchain_card.core import messages as m
from langchain_card.ports import Budget
from langchain_card.testing.toy import ToyDrafter


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
        """An independent copy."""
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
        """One step for a request that has leave."""
        width, self.leave[request_id] = self.leave[request_id][0], self.leave[request_id][1:]
        for proposal in self.drafter.step([Budget(request_id, width)]):
            if not proposal.token_ids:
                self.leave[request_id] = ()
            self.outbox.append(replace(proposal, incarnation=self.begun[request_id].incarnation))

    def die(self) -> None:
        """What was sent may still arrive."""
        self.alive, self.begun, self.leave, self.inbox = False, {}, {}, []
        self.drafter.close()
