"""The seams: the interfaces that plug-ins implement, and those between the parts of an engine.

Two more are re-exported from the core, which calls them: `AcceptanceRule` (core/walk.py) and `Policy` (core/policy.py).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

from typing_extensions import Self

from langchain_card.core.messages import (
    Begin,
    Correct,
    Effect,
    Emit,
    End,
    Event,
    Grow,
    Proposal,
    Reading,
    Verdict,
    Window,
)
from langchain_card.core.policy import Policy as Policy
from langchain_card.core.request import FinishReason, Request, RequestStats
from langchain_card.core.walk import AcceptanceRule as AcceptanceRule
from langchain_card.errors import InvalidInputError
from langchain_card.limits import Limits

if TYPE_CHECKING:
    from torch import Tensor

    from langchain_card.runtime.heads import TargetView
    from langchain_card.runtime.kind import Kind


class Clock(Protocol):
    """A source of time."""

    def __call__(self) -> float:
        """Return seconds; only differences matter."""


@dataclass(frozen=True, slots=True)
class Budget:
    """One draft step for one request.

    Attributes:
        request_id: the request.
        width: nodes to expand at most, apart from those that a lower level has guessed.
        min_chance: nodes that the target reaches with a smaller chance are not expanded.
        ahead: tokens assumed to follow the answer. The proposal continues after them: its root stands for the last.
            Set for a drafter that works below another one.
        whole: whether the proposal must be complete: in an epoch of its own, with the nodes of earlier ones repeated.
        max_read: tokens of the text to read before drafting, at most; None for all. A drafter that has to read more
            reads so many and proposes nothing (`Proposal.read`, `Proposal.unread`).
    """

    request_id: int
    width: int = 1
    min_chance: float = 0.0
    ahead: tuple[int, ...] = ()
    whole: bool = False
    max_read: int | None = None


class Observer(Protocol):
    """Observes the protocol, as a trace does. Called on the target's thread, which waits for it."""

    def __call__(self, event: Event, effects: Sequence[Effect]) -> None:
        """Take an event, and the effects that are carried out next."""


class Drafter(Protocol):
    """Proposes candidates. Called by one thread at a time; several requests may be open.

    Under the exact rule, candidates change the speed alone. A lossy rule may put them into the answer: it works only
    with drafters whose class sets `trusted = True`, which propose the output of a model or of the text itself.

    Attributes of the class:
        name: the `source` of its proposals; unique in an engine.
        paced: True when a step costs device time. Under `sequential` such steps are granted one by one, where they pay;
            under `parallel` they run on a thread of their own. Other drafters run in every round.
        from_model: optional, False by default: whether its scores are a language model's. Such scores replace the ones
            of other drafters, its candidates get twice the room in the cache, and a token that it did not list among
            the children of a node that it expanded counts as unlikely.
        trusted: optional, False by default: whether a lossy rule may work with it.
        of_grammars: optional, False by default: whether it works for requests with a grammar only.
        reads_target: optional, False by default: whether it reads states of the target (`Setting.target`). Its steps
            are then taken on the target's thread, one by one under every schedule.
        looks_ahead: optional, False by default: whether it obeys `Budget.ahead` and `Budget.whole`, so that it may work
            below another drafter.
    """

    name: str
    paced: bool

    def begin(self, request: Request, output_ids: Sequence[int]) -> None:
        """Open a request, which starts or goes on with the answer so far; nothing need be computed yet."""

    def correct(self, request_id: int, start: int, token_ids: Sequence[int]) -> None:
        """Apply the answer's tokens from `start` on; some may be known already."""

    def step(self, budgets: Sequence[Budget]) -> list[Proposal]:
        """Take one step for each request; return a proposal for each, without nodes where nothing can be added."""

    def end(self, request_id: int) -> None:
        """Free everything that a request holds; unknown ids are ignored."""

    def close(self) -> None:
        """Free everything."""


class Steering(Protocol):
    """Changes the target's logits before anything else reads them.

    Penalties, grammars, temperature and reported log-probabilities all take the steered logits, so speculation stays
    exact with respect to them. A lossy acceptance rule is refused beside it. Called by one thread at a time, once a
    pass.
    """

    def __call__(self, logits: Tensor, texts: Sequence[Sequence[int]]) -> Tensor:
        """Steer rows of any requests.

        The result for a row must depend on the logits and the text of that row alone; otherwise answers depend on the
        schedule and on other requests. An exception, or a result of another shape, ends the requests that cause it.

        Args:
            logits: [rows, vocabulary] of the target, on its device and in its dtype; must not be written to.
            texts: [rows] the tokens before the one to be chosen: prompt, answer and the candidates in between. They are
                views: copy what you keep.

        Returns:
            [rows, vocabulary], on the same device, of a floating-point type.
        """


class Constraint(Protocol):
    """A grammar and the text so far: which tokens may come next. Called by one thread at a time; forks are independent.

    There is no rollback: a fork costs microseconds, and each node of a tree has its own.
    """

    @property
    def failed(self) -> bool:
        """Whether the grammar reached a limit, so that nothing is known of what may follow."""

    def fork(self) -> Self:
        """Return an independent copy."""

    def accept(self, token_id: int) -> bool:
        """Append a token and return True, if it may come next and does not end the text; else change nothing."""

    def fitting(self, token_ids: Sequence[int]) -> int:
        """Return how many of these tokens may come next, one after the other; an end of text may be the last."""

    def allowed(self) -> bytes:
        """Return a bit mask: bit `i % 8` of byte `i // 8` is set if token i may come next. All 0 after a failure."""

    def forced(self) -> list[int]:
        """Return the text that must come next, as the tokenizer writes it; other tokens may spell it, too.

        An end of text is the last of them where nothing else may follow.
        """

    def closing(self, most: int) -> tuple[int, ...] | None:
        """Return tokens that complete the text, without end of text: at most `most` if possible; None if unknown.

        The result is the same for the same tokens and the same calls before it, made on forks or not.
        """


def _unconstrained(grammar: str) -> Constraint:
    raise InvalidInputError("grammar", grammar, "is not known here", "work without: candidates cost speed at worst")


@dataclass(frozen=True)
class Setting:
    """The engine that a plug-in works in: the first argument of its factory.

    Attributes:
        vocab_size: token ids are below it.
        max_len: positions of a sequence, prompt and answer together.
        num_seqs: requests open at once.
        eos_ids: tokens that end an answer.
        tokenizer: the target's, of transformers.
        constrain: opens a grammar (`SamplingParams.grammar`) at the start of an answer. Given to a drafter, it never
            raises: a grammar that fails is logged, and allows everything.
        limits: the engine's.
        target: the target, for drafters whose class sets `reads_target`; None in another process.
    """

    vocab_size: int = 2**31
    max_len: int = 2**31
    num_seqs: int = 1
    eos_ids: tuple[int, ...] = ()
    tokenizer: Any = None
    constrain: Callable[[str], Constraint] = _unconstrained
    limits: Limits = field(default_factory=Limits)
    target: TargetView | None = None


class Target(Protocol):
    """Verifies windows and owns the sequences' KV. Called by one thread."""

    def begin(self, begin: Begin) -> None:
        """Open a sequence; nothing need be computed yet."""

    def verify(self, windows: Sequence[Window]) -> Sequence[Verdict | Reading]:
        """Return the target's own token after every row of every window, or how far its text has been read.

        Raises:
            MemoryError, torch.OutOfMemoryError: not enough memory; the same sequences may be verified again.
        """

    def end(self, request_id: int) -> None:
        """Free a sequence; unknown ids are ignored."""


@dataclass(frozen=True, slots=True)
class Health:
    """The health of a worker.

    Attributes:
        state: "up"; or "loading", "down" (it starts again) or "given up".
        busy: seconds since its step began; 0 while it waits for work.
        budget: seconds that this step may take.
    """

    state: str = "up"
    busy: float = 0.0
    budget: float = math.inf

    @property
    def ok(self) -> bool:
        """True when it is up and does not hang."""
        return self.state == "up" and self.busy <= self.budget


DraftCommand: TypeAlias = Begin | Correct | Grow | End


class Worker(Protocol):
    """The drafter's side of a transport."""

    def handle(self, command: DraftCommand) -> None:
        """Apply one command."""

    def work(self, request_ids: Collection[int]) -> None:
        """Take all steps that are granted to these requests, one step of all of them at a time."""

    def step(self, but: Collection[int] = ()) -> bool:
        """Take one step for every request that has steps granted, except those in `but`; return False when none has."""

    def health(self) -> Health:
        """Return the health of the worker; may be called from any thread."""

    def close(self) -> None:
        """Free the drafter."""


class Transport(Protocol):
    """Carries commands to a drafter's worker, and proposals back, in order.

    A `Correct`, `Grow` or proposal may be lost or come twice; `Begin` and `End` must arrive.
    """

    @property
    def ready(self) -> bool:
        """True when the worker is up; a worker that starts slowly is reported to the driver when it is up."""

    def wait_ready(self) -> None:
        """Block until the worker is up.

        Raises:
            CARDError: it could not start.
        """

    def send(self, command: DraftCommand) -> None:
        """Send a command to the worker."""

    def work(self) -> None:
        """Take the granted steps of requests whose schedule does not overlap, on the caller's thread."""

    def health(self) -> Health:
        """Return the health of the worker; may be called from any thread."""

    def kill(self) -> None:
        """End a worker that hangs, if that is possible; it is then reported dead."""

    def close(self) -> None:
        """Stop the worker and wait for it."""


class Consumer(Protocol):
    """Receives one answer. Called by one thread at a time; the last call is `finish` or `fail`."""

    request: Request

    def watch(self, stats: RequestStats) -> None:
        """Note that the request has started; `stats` is updated while it runs."""

    def read(self, reading: Reading) -> None:
        """Note how much of a long text was read."""

    def push(self, emit: Emit) -> int | None:
        """Take committed tokens; return the number of tokens that count if a stop string was met, else None."""

    def finish(self, reason: FinishReason, stats: RequestStats) -> None:
        """Note that the request has ended."""

    def fail(self, error: BaseException) -> None:
        """Note that the request could not be served."""


class Backend(Protocol):
    """Decodes requests, in this process or in one that is started again if it dies. Usable from any thread."""

    @property
    def num_open(self) -> int:
        """Requests that wait or run."""

    @property
    def num_running(self) -> int:
        """Requests that hold KV on the target."""

    @property
    def num_seats(self) -> int:
        """Requests that run at once."""

    def submit(self, consumer: Consumer, output_ids: Sequence[int] = ()) -> None:
        """Submit a request, perhaps with the beginning of its answer."""

    def stop(self, request_id: int, num_tokens: int | None = None) -> None:
        """End a request after so many tokens; None discards it."""

    def pause(self, request_id: int, paused: bool) -> None:
        """Pause a request whose consumer does not read, or let it go on."""

    def announce(self, count: int) -> None:
        """Announce requests that are about to come, so that they share their first pass."""

    def drain(self) -> None:
        """Accept no more requests, and write all answers to their end, even if they are not read."""

    def health(self) -> dict[str, Health]:
        """Return the health of the workers, by name."""

    def kind(self) -> Kind:
        """Return what the text of an answer depends on. The first call may take as long as some passes.

        Raises:
            EngineError: it is not known.
        """

    def close(self) -> None:
        """End all requests and free everything."""
