"""All seams in one place: what a plug-in implements, what the engine asks of it, and what engines are made of.

`AcceptanceRule`, which the core calls, is written down beside the exact rule in `core/walk.py`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

from typing_extensions import Self

from langchain_card.config import Limits
from langchain_card.core.messages import Begin, Correct, Effect, Emit, End, Event, Grow, Proposal, Verdict, Window
from langchain_card.core.request import FinishReason, Request, RequestStats
from langchain_card.core.walk import AcceptanceRule as AcceptanceRule
from langchain_card.errors import InvalidInputError

if TYPE_CHECKING:
    from torch import Tensor


class Clock(Protocol):
    """Where time comes from."""

    def __call__(self) -> float:
        """Seconds; only differences matter."""


@dataclass(frozen=True, slots=True)
class Budget:
    """Leave to take one step for a request.

    Attributes:
        request_id: whose tree to grow.
        width: nodes to expand at most, apart from those that a level below has guessed.
        min_chance: chance of being reached below which a node is not expanded.
        ahead: tokens assumed to follow the answer: what follows them is asked for, and the proposal's root stands for
            the last of them. A drafter that works below another one is asked so.
        whole: whether the proposal is to stand for itself, in an epoch of its own, with what was said before as well.
    """

    request_id: int
    width: int = 1
    min_chance: float = 0.0
    ahead: tuple[int, ...] = ()
    whole: bool = False


class Observer(Protocol):
    """Sees the protocol at work, as a trace does. Called on the target's thread, which waits for it."""

    def __call__(self, event: Event, effects: Sequence[Effect]) -> None:
        """An event, and the effects that are carried out next."""


class Drafter(Protocol):
    """Proposes candidates. Called by one thread at a time; several requests may be open.

    Under the exact rule candidates change the speed alone, whoever proposes them. A lossy rule may put them into the
    answer: it works with drafters only whose class says `trusted = True`, that they propose what a model or the text
    itself says and never what somebody else would like to read.

    Attributes:
        name: the `source` of its proposals; unique in an engine.
        paced: True when a step costs device time, so that steps are granted one by one where devices are shared, and
            taken on a thread of its own where they are not.
        trusted: optional, of the class, False by default: whether a lossy rule may work with it.
        of_grammars: optional, of the class, False by default: whether it is asked for requests with a grammar only.
        looks_ahead: optional, of the class, False by default: whether it obeys `Budget.ahead` and `Budget.whole`, so
            that it may work below another one.
    """

    name: str
    paced: bool

    def begin(self, request: Request, output_ids: Sequence[int]) -> None:
        """A request starts, or goes on with the answer so far; nothing need be computed yet."""

    def correct(self, request_id: int, start: int, token_ids: Sequence[int]) -> None:
        """The answer's tokens from `start` on are `token_ids`; may repeat what was said before."""

    def step(self, budgets: Sequence[Budget]) -> list[Proposal]:
        """One step for each request named: one proposal each, without nodes where nothing can be added."""

    def end(self, request_id: int) -> None:
        """The request holds nothing here from now on; unknown ids are ignored."""

    def close(self) -> None:
        """Frees everything."""


class Steering(Protocol):
    """Changes what the target says, before anything else sees it: the target of its answers is the steered one.

    Penalties, grammars, temperature and reported log-probabilities all take the steered logits, so that speculation
    stays exact with respect to them; a lossy rule of acceptance is refused beside it. Called by one thread
    at a time, once a pass.
    """

    def __call__(self, logits: Tensor, texts: Sequence[Sequence[int]]) -> Tensor:
        """Steers rows of any requests.

        It must be a function of each row alone, of its logits and its text, or answers depend on the schedule and on
        what else is decoded. What it raises, or another shape, ends the requests that make it do so, alone.

        Args:
            logits: [rows, vocabulary] of the target, on its device and in its dtype; not to be written to.
            texts: [rows] the tokens before the one that is to be chosen: prompt, answer and the candidates between.
                They are views; what is kept of them must be copied.

        Returns:
            [rows, vocabulary], on the same device, of a floating-point type.
        """


class Constraint(Protocol):
    """A grammar and what was said so far: what may come next. Called by one thread at a time; forks are independent.

    There is no rollback: a fork costs microseconds, and each node of a tree has its own.
    """

    def fork(self) -> Self:
        """An independent copy."""

    def accept(self, token_id: int) -> bool:
        """Says a token, if it may come next and does not end the text; else nothing changes."""

    def allowed(self) -> bytes:
        """Bit `i % 8` of byte `i // 8`: whether token i may come next. All are 0 where the grammar failed."""

    def forced(self) -> list[int]:
        """Tokens of the text that must come next, as the tokenizer would write it; others may spell it, too."""

    def closing(self, most: int) -> tuple[int, ...] | None:
        """Tokens that end the text, end of text left out: at most `most` if so few were found; None if no end was.

        The same for the same tokens said and the same questions asked on the way, by forks or not.
        """


def _unconstrained(grammar: str) -> Constraint:
    raise InvalidInputError("grammar", grammar, "is not known here", "work without: candidates cost speed at worst")


@dataclass(frozen=True)
class Setting:
    """Where a plug-in works: the first argument of its factory.

    Attributes:
        vocab_size: token ids are below it.
        max_len: positions of a sequence, prompt and answer together.
        num_seqs: requests open at once.
        eos_ids: tokens that end an answer.
        tokenizer: the target's, of transformers.
        constrain: what a grammar (`SamplingParams.grammar`) allows, before the answer; it raises in a process of the
            drafter's own (`draft_transport="process"`).
        limits: of the engine.
    """

    vocab_size: int = 2**31
    max_len: int = 2**31
    num_seqs: int = 1
    eos_ids: tuple[int, ...] = ()
    tokenizer: Any = None
    constrain: Callable[[str], Constraint] = _unconstrained
    limits: Limits = field(default_factory=Limits)


class Target(Protocol):
    """Verifies windows and owns the sequences' KV. Called by one thread."""

    def begin(self, begin: Begin) -> None:
        """Opens a sequence; nothing need be computed yet."""

    def verify(self, windows: Sequence[Window]) -> list[Verdict]:
        """The target's own token after every row of every window.

        Raises:
            MemoryError, torch.OutOfMemoryError: not enough memory; the same sequences may be verified again.
        """

    def end(self, request_id: int) -> None:
        """Frees a sequence; unknown ids are ignored."""


@dataclass(frozen=True, slots=True)
class Health:
    """Of a worker.

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
        """Whether it is there and does not hang."""
        return self.state == "up" and self.busy <= self.budget


DraftCommand: TypeAlias = Begin | Correct | Grow | End


class Worker(Protocol):
    """A drafter's side of a transport."""

    def handle(self, command: DraftCommand) -> None:
        """Applies one command."""

    def work(self, request_ids: Collection[int]) -> None:
        """Takes all steps that these requests have leave for, those of one step together, and no other's."""

    def step(self, but: Collection[int] = ()) -> bool:
        """One step for every request that has leave, but these; False when none has."""

    def health(self) -> Health:
        """Whether its step takes no longer than it should; asked from any thread."""

    def close(self) -> None:
        """Frees the drafter."""


class Transport(Protocol):
    """Carries commands to a drafter's worker and proposals back, in order.

    A `Correct`, `Grow` or proposal may be lost or come twice; `Begin` and `End` must arrive.
    """

    @property
    def ready(self) -> bool:
        """Whether the worker is there; one that takes its time is reported to the driver when it is."""

    def wait_ready(self) -> None:
        """Returns when the worker is there.

        Raises:
            CARDError: why it never will be.
        """

    def send(self, command: DraftCommand) -> None:
        """Hands a command over."""

    def work(self) -> None:
        """Takes the steps that are granted where nothing is to overlap, on the caller's thread."""

    def health(self) -> Health:
        """Of the worker; asked from any thread."""

    def kill(self) -> None:
        """Ends a worker that hangs, where that can be done: it is reported dead, then."""

    def close(self) -> None:
        """Stops the worker and waits for it."""


class Consumer(Protocol):
    """Takes one answer. Called by one thread at a time; the last call is `finish` or `fail`."""

    request: Request

    def watch(self, stats: RequestStats) -> None:
        """The first call for a request that starts; `stats` goes on being written."""

    def push(self, emit: Emit) -> int | None:
        """Takes committed tokens; the number of tokens that count when a stop string was met, else None."""

    def finish(self, reason: FinishReason, stats: RequestStats) -> None:
        """The request ended."""

    def fail(self, error: BaseException) -> None:
        """It could not be served."""


class Backend(Protocol):
    """Decodes requests: here, or in a process that may die and is started again. Usable from any thread."""

    @property
    def num_open(self) -> int:
        """Requests that wait or run."""

    @property
    def num_running(self) -> int:
        """Requests that hold KV on the target."""

    def submit(self, consumer: Consumer, output_ids: Sequence[int] = ()) -> None:
        """Takes a request, perhaps with the beginning of its answer."""

    def stop(self, request_id: int, num_tokens: int | None = None) -> None:
        """Ends a request after so many tokens; None where nobody wants it any more."""

    def pause(self, request_id: int, paused: bool) -> None:
        """Holds a request that nobody reads, or lets it go on."""

    def announce(self, count: int) -> None:
        """So many requests are about to come: they shall share their first pass."""

    def drain(self) -> None:
        """Takes no more requests, and writes all answers to their end, read or not."""

    def health(self) -> dict[str, Health]:
        """Of the workers, by name."""

    def close(self) -> None:
        """Ends all requests and frees everything."""
