"""`ThreadTransport`: a drafter on its own thread, in parallel with the target; and the queues that threads share."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection
from typing import Generic, TypeVar

from langchain_card.core.messages import Begin, Correct, End
from langchain_card.engine.transports.inline import InlineTransport
from langchain_card.ports import DraftCommand, Health, Worker

Message = TypeVar("Message")


class MessageQueue(Generic[Message]):
    """A closable queue of messages in order, read by one thread."""

    def __init__(self) -> None:
        self._messages: list[Message] = []
        self._changed = threading.Condition()
        self._closed = False

    def __len__(self) -> int:
        return len(self._messages)

    def put(self, message: Message) -> None:
        """Append a message."""
        with self._changed:
            self._messages.append(message)
            self._changed.notify()

    def take(self, *, wait: bool) -> Message | None:
        """Return the oldest message; None when there is none (with `wait`: when the queue was closed)."""
        with self._changed:
            while wait and not self._messages and not self._closed:
                self._changed.wait()
            return self._messages.pop(0) if self._messages and not self._closed else None

    @property
    def closed(self) -> bool:
        """State of the queue: True after `close`; `take` then returns None."""
        return self._closed

    def close(self) -> None:
        """Close the queue and wake the reader."""
        with self._changed:
            self._closed = True
            self._changed.notify()


class Mailbox(MessageQueue[DraftCommand]):
    """A queue of commands that drops those that later commands replace.

    A correction is cumulative and revokes granted steps, so it replaces the corrections and grants before it. The end
    of a request replaces everything since its beginning. So a worker that stalls has few commands to catch up on.
    """

    def put(self, message: DraftCommand) -> None:
        """Append a command."""
        with self._changed:
            if isinstance(message, Correct | End):
                self._messages = [
                    c for c in self._messages if c.request_id != message.request_id or isinstance(c, Begin | End)
                ]
            queued = [c for c in self._messages if c.request_id == message.request_id]
            if isinstance(message, End) and queued and isinstance(queued[-1], Begin):
                self._messages.remove(queued[-1])  # the worker need not see the request at all
            else:
                super().put(message)

    def hand(self, apply: Callable[[DraftCommand], None], *, wait: bool) -> bool:
        """Take a command and apply it before anything else is put or dropped; return whether there was one."""
        with self._changed:
            command = self.take(wait=wait)
            if command is not None:
                apply(command)
            return command is not None

    def hand_ends(self, apply: Callable[[DraftCommand], None]) -> None:
        """Apply the queued `End`s. No command of their requests is queued before them, so the order is kept."""
        with self._changed:
            ends = [command for command in self._messages if isinstance(command, End)]
            self._messages = [command for command in self._messages if not isinstance(command, End)]
            for command in ends:
                apply(command)

    def drop(self, request_id: int) -> None:
        """Drop the queued commands of a request; a command that is being applied is finished first."""
        with self._changed:
            self._messages = [command for command in self._messages if command.request_id != request_id]


def work(worker: Worker, mailbox: Mailbox, but: Collection[int] = ()) -> None:
    """Apply commands and take granted steps in turn until the mailbox is closed.

    Args:
        worker: a drafter's worker.
        mailbox: its commands.
        but: ids of requests whose steps are taken on another thread.
    """
    busy = False
    while not mailbox.closed:
        busy = mailbox.hand(worker.handle, wait=not busy) or worker.step(but=but)


class ThreadTransport:
    """A transport that queues commands for a worker thread, which applies them between its steps.

    Requests with any schedule but `parallel` have nothing to overlap, so their steps are taken on the sender's thread.
    That is also faster: each thread that runs torch on several cores keeps its own pool, and with more pooled threads
    than cores every parallel region waits for a sleeping thread (docs/LOG.md, 2026-11-21).

    Args:
        worker: the drafter's worker; may be called from both threads, one at a time.
        name: of the drafter.
        on_death: called when the worker raises; commands are ignored after that.
    """

    ready = True

    def __init__(self, worker: Worker, *, name: str, on_death: Callable[[BaseException], None]) -> None:
        self._worker = worker
        self._inline = InlineTransport(worker, name=name, on_death=on_death)
        self._inline_ids: set[int] = set()
        self._mailbox = Mailbox()
        self._thread = threading.Thread(target=self._run, name=f"card-{name}", daemon=True)
        self._thread.start()

    def wait_ready(self) -> None:
        """Return at once."""

    def send(self, command: DraftCommand) -> None:
        """Queue a command, or apply it at once if its request does not decode in parallel."""
        if self._inline.dead:
            return
        if isinstance(command, Begin) and command.schedule != "parallel":
            self._inline_ids.add(command.request_id)
            self._mailbox.drop(command.request_id)  # queued while it was parallel; a `Begin` replaces them
            self._mailbox.hand_ends(self._inline.send)  # they free the memory that this request takes
        if command.request_id not in self._inline_ids:
            self._mailbox.put(command)
            return
        if isinstance(command, End):
            self._inline_ids.discard(command.request_id)
        self._inline.send(command)

    def work(self) -> None:
        """Take the granted steps of requests that do not decode in parallel."""
        self._inline.work()

    def health(self) -> Health:
        """Return the worker's health."""
        return self._worker.health()

    def kill(self) -> None:
        """Do nothing: a thread cannot be killed. Requests go on at the target's own speed."""

    def close(self) -> None:
        """End the thread after its current step."""
        self._mailbox.close()
        self._thread.join()
        self._inline.close()

    def _run(self) -> None:
        try:
            work(self._worker, self._mailbox, but=self._inline_ids)
        except Exception as error:
            self._inline.fail(error)
