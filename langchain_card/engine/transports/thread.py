"""A drafter on a thread of its own, for requests that decode in parallel with it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection
from typing import Generic, TypeVar

from langchain_card.core.messages import Begin, Correct, End
from langchain_card.engine.transports.inline import InlineTransport
from langchain_card.ports import DraftCommand, Health, Worker

Message = TypeVar("Message")


class MessageQueue(Generic[Message]):
    """Messages in order, for one thread, until it is closed."""

    def __init__(self) -> None:
        self._messages: list[Message] = []
        self._changed = threading.Condition()
        self._closed = False

    def __len__(self) -> int:
        return len(self._messages)

    def put(self, message: Message) -> None:
        """Appends a message."""
        with self._changed:
            self._messages.append(message)
            self._changed.notify()

    def take(self, *, wait: bool) -> Message | None:
        """The oldest message; None when there is none (`wait`: and the queue was closed)."""
        with self._changed:
            while wait and not self._messages and not self._closed:
                self._changed.wait()
            return self._messages.pop(0) if self._messages and not self._closed else None

    @property
    def closed(self) -> bool:
        """Whether nothing more is taken."""
        return self._closed

    def close(self) -> None:
        """Wakes the thread for the last time."""
        with self._changed:
            self._closed = True
            self._changed.notify()


class Mailbox(MessageQueue[DraftCommand]):
    """Commands in order, without those that later ones have made needless.

    A correction is cumulative and takes back all leave, so it stands for the corrections and the leave before it; the
    end of a request stands for everything since its beginning. So a worker that stalls has few commands to catch up on,
    and they hold each token once.
    """

    def put(self, message: DraftCommand) -> None:
        """Appends a command."""
        with self._changed:
            if isinstance(message, Correct | End):
                self._messages = [
                    c for c in self._messages if c.request_id != message.request_id or isinstance(c, Begin | End)
                ]
            own = [c for c in self._messages if c.request_id == message.request_id]
            if isinstance(message, End) and own and isinstance(own[-1], Begin):
                self._messages.remove(own[-1])  # the worker never hears of it
            else:
                super().put(message)

    def hand(self, apply: Callable[[DraftCommand], None], *, wait: bool) -> bool:
        """Takes a command and applies it before anything else is put or dropped; whether there was one."""
        with self._changed:
            command = self.take(wait=wait)
            if command is not None:
                apply(command)
            return command is not None

    def hand_ends(self, apply: Callable[[DraftCommand], None]) -> None:
        """Applies the ends that wait. Nothing of their requests stands before them, so the order stays."""
        with self._changed:
            ends = [command for command in self._messages if isinstance(command, End)]
            self._messages = [command for command in self._messages if not isinstance(command, End)]
            for command in ends:
                apply(command)

    def drop(self, request_id: int) -> None:
        """Forgets a request's commands; none of them is half applied after that."""
        with self._changed:
            self._messages = [command for command in self._messages if command.request_id != request_id]


def work(worker: Worker, mailbox: Mailbox, but: Collection[int] = ()) -> None:
    """Steps while it has leave, and reads commands between two steps, until the mailbox is closed.

    Args:
        worker: a drafter's.
        mailbox: its commands.
        but: requests whose steps are taken elsewhere.
    """
    busy = False
    while not mailbox.closed:
        busy = mailbox.hand(worker.handle, wait=not busy) or worker.step(but=but)


class ThreadTransport:
    """Queues commands for a worker thread, which steps while it has leave and reads commands between two steps.

    Requests under any other schedule than `parallel` have nothing to overlap: their steps are taken on the sender's
    thread. That is not only simpler: every thread that runs torch on several cores keeps a pool of its own, and with
    more pooled threads than cores each parallel region waits for a sleeping thread (30 to 100 % per step on two cores).

    Args:
        worker: the drafter's worker; may be called from both threads, one at a time.
        name: of the drafter.
        on_death: called when the worker raised; it takes no commands from then on.
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
        """It is."""

    def send(self, command: DraftCommand) -> None:
        """Hands the command over, or applies it at once."""
        if self._inline.dead:
            return
        if isinstance(command, Begin) and command.schedule != "parallel":
            self._inline_ids.add(command.request_id)
            self._mailbox.drop(command.request_id)  # of its parallel life; a beginning ends that, too
            self._mailbox.hand_ends(self._inline.send)  # they free the room that this one takes
        if command.request_id not in self._inline_ids:
            self._mailbox.put(command)
            return
        if isinstance(command, End):
            self._inline_ids.discard(command.request_id)
        self._inline.send(command)

    def work(self) -> None:
        """Takes the steps of requests that do not decode in parallel."""
        self._inline.work()

    def health(self) -> Health:
        """Of the worker."""
        return self._worker.health()

    def kill(self) -> None:
        """Nothing: no thread can be ended from outside. Requests go on at the target's own speed."""

    def close(self) -> None:
        """Ends the thread after its current step."""
        self._mailbox.close()
        self._thread.join()
        self._inline.close()

    def _run(self) -> None:
        try:
            work(self._worker, self._mailbox, but=self._inline_ids)
        except Exception as error:
            self._inline.fail(error)
