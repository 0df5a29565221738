"""A drafter that costs microseconds runs where its command is sent."""

from __future__ import annotations

from langchain_card.ports import DraftCommand, Worker


class InlineTransport:
    """Carries out each command at once, on the sender's thread.

    Args:
        worker: the drafter's worker.
    """

    def __init__(self, worker: Worker) -> None:
        self._worker = worker

    def send(self, command: DraftCommand) -> None:
        """Applies the command and takes the steps that it grants."""
        self._worker.handle(command)
        while self._worker.step():
            pass

    def close(self) -> None:
        """Frees the drafter."""
        self._worker.close()
