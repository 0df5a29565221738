"""`Draft`: a drafter as in a process of its own, with the real worker, two channels, and a way to die."""

from __future__ import annotations

from langchain_card.core.messages import Proposal
from langchain_card.engine.draft_worker import DraftWorker
from langchain_card.ports import DraftCommand
from tests.simulation.toy import ToyDrafter


class Draft:
    """A drafter's worker and the channels to and from it.

    Attributes:
        drafter: a toy.
        worker: a worker of the engine, around the drafter.
        alive: False while the process is dead.
        inbox: commands under way.
        outbox: proposals under way.
    """

    def __init__(self, drafter: ToyDrafter) -> None:
        self.drafter = drafter
        self.alive = True
        self.inbox: list[DraftCommand] = []
        self.outbox: list[Proposal] = []
        self._short: tuple[int, ...] = ()
        self.worker = DraftWorker(drafter, self.outbox.append, self._note)

    def copy(self) -> Draft:
        """Return an independent copy."""
        copied = Draft(self.drafter.copy())
        copied.alive = self.alive
        copied.worker.begun |= self.worker.begun
        copied.worker.granted |= self.worker.granted
        copied.worker.min_chance |= self.worker.min_chance
        copied.worker.max_read |= self.worker.max_read
        copied.worker.applied |= self.worker.applied
        copied.inbox += self.inbox
        copied.outbox += self.outbox
        return copied

    @property
    def may_step(self) -> bool:
        """True if a request has steps granted."""
        return any(self.worker.granted.values())

    def run_out_of_memory(self) -> tuple[int, ...]:
        """Take a step that runs out of memory; return the requests that it was for."""
        self.drafter.out_of_memory = True
        self.worker.step()
        self.drafter.out_of_memory = False
        return self._short

    def die(self) -> None:
        """Die; proposals in the outbox may still arrive."""
        self.alive = False
        self.inbox.clear()
        self.worker.close()

    def _note(self, request_ids: tuple[int, ...]) -> None:
        self._short = request_ids
