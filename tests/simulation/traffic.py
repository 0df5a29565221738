"""Chats with a cluster of simulated replicas through a real relay, and checks of every answer."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import Any

from langchain_card.core.messages import Emit, Reading
from langchain_card.core.request import FinishReason, Request, RequestStats, SamplingParams
from langchain_card.engine.relay.relay import Relay
from langchain_card.errors import EngineError
from langchain_card.limits import Limits
from langchain_card.runtime.kind import Kind
from tests.simulation.cluster import NUM_SEATS, SILENCE_SECONDS, Cluster
from tests.simulation.replicas import EOS, VOCAB, Timeline, answer

KIND = Kind("0", "a machine")
OTHER_WEIGHTS = Kind("1", "a machine")

NUM_TURNS, THINK_SECONDS = 4, 4.0
"""Turns of a chat; mean time from the end of an answer to the next turn."""

MAX_TOKENS, ANSWER_SECONDS = 96, 5.2
"""Tokens of an answer at most; mean time that a turn holds a seat, those included that come no more."""

PAUSING, LEAVING_PAUSED, LEAVING, STOPPING = 0.05, 0.2, 0.03, 0.05
"""Shares of the readers who do not read for a while, of those who leave then, of those who leave at any time, and of
those who want no more after some tokens."""

PATIENCE = 60.0
"""Seconds after the last turn in which all answers must end."""


@dataclass(slots=True)
class Chat:
    """A conversation: its name, the turns that are left, the number of those before, and its text."""

    session: str
    turns: int
    turn: int = 0
    text: tuple[int, ...] = ()


class Reader:
    """A `Consumer` of one answer, which checks it as it comes.

    Args:
        traffic: where it belongs.
        chat: its chat.
        request: the request.
        stops_at: number of tokens after which it wants no more.
    """

    def __init__(self, traffic: Traffic, chat: Chat, request: Request, stops_at: int | None) -> None:
        self.request, self.chat, self._traffic, self._stops_at = request, chat, traffic, stops_at
        self._answers = [tuple(answer(kind, request)) for kind in traffic.kinds]
        self._tokens = list[int]()
        self.has_left = self.has_ended = False

    @property
    def is_stopped(self) -> bool:
        """Whether it has as many tokens as it wants."""
        return self._stops_at is not None and len(self._tokens) >= self._stops_at

    @property
    def counted(self) -> tuple[int, ...]:
        """The tokens that it wants."""
        return tuple(self._tokens[: self._stops_at])

    def watch(self, stats: RequestStats) -> None:
        if self.has_ended:
            self._report("begins after its end")

    def read(self, reading: Reading) -> None:
        """Texts are short here."""

    def push(self, emit: Emit) -> int | None:
        if self.has_ended or self.is_stopped:
            self._report("gets a token after its end")
        self._tokens += emit.token_ids
        if not any(self._tokens == [*written[: len(self._tokens)]] for written in self._answers):
            self._report("gets a text that no replica writes alone")
        if self._traffic.relay._open[self.request.request_id].output_ids != self._tokens:
            self._report("gets a token before it is kept")
        self._traffic.cluster.note_token(self.request.request_id)
        return self._stops_at if self.is_stopped else None

    def finish(self, reason: FinishReason, stats: RequestStats) -> None:
        self._end()
        if reason is FinishReason.ABORT:
            if not self.has_left:
                self._report("is aborted by no client")
        elif self.counted not in [written[: self._stops_at] for written in self._answers]:
            self._report("ends before its text does")
        elif not self.is_stopped:
            expected = FinishReason.STOP if self._tokens[-1] == EOS else FinishReason.LENGTH
            if (reason, stats.output_tokens) != (expected, len(self._tokens)):
                self._report(f"ends with {reason} and statistics of {stats.output_tokens} tokens")
            if not stats.submitted <= stats.started <= stats.first_token <= stats.ended:
                self._report("has times in another order")
        self._traffic.on_end(self, reason.value, stats)

    def fail(self, error: BaseException) -> None:
        self._end()
        caused_deaths = self._traffic.cluster.deaths[self.request.request_id] >= self._traffic.limits.max_failures
        lacks_weights = self._tokens and len(self._answers) > 1 and "is another one now" in str(error)
        if not isinstance(error, EngineError) or not (caused_deaths or lacks_weights):
            self._report(f"fails for no reason ({error})")
        self._traffic.failures.append(error)
        self._traffic.on_end(self, "failed", None)

    def _end(self) -> None:
        if self.has_ended:
            self._report("ends twice")
        self.has_ended = True

    def _report(self, problem: str) -> None:
        self._traffic.problems.append(f"request {self.request.request_id} {problem}")


class Traffic:
    """Clients of a cluster, on one thread and a virtual clock; the same seed gives the same run.

    Chats begin as in a Poisson process. At the start, as many chats are under way as there will be later.

    Args:
        num_replicas: number of replicas.
        seconds: time in which turns begin.
        seed: of all that is drawn.
        load: share of the seats that is taken, on average.
        kinds: kinds of replicas that may write answers; the first one's are there at the start.

    Attributes:
        problems: what went wrong.
        failures: errors that readers got.
        ends: number of requests by their end.
        hits: for each second turn, whether it came where the text before it was read.
        loads: shares of seats that were taken, each second.
    """

    def __init__(
        self, num_replicas: int, seconds: float, seed: int = 0, load: float = 0.7, kinds: tuple[Kind, ...] = (KIND,)
    ) -> None:
        self.problems, self.failures = list[str](), list[BaseException]()
        self.ends, self.hits, self.loads = Counter[str](), list[bool](), list[float]()
        self.kinds, self.timeline, self.limits = kinds, Timeline(), Limits()
        self.cluster = Cluster(kinds[0], num_replicas, self.limits, self.timeline, seed)
        self.relay = Relay(self.cluster, self.limits, self.timeline)
        self._random, self._seed, self._ids = Random(seed), seed, itertools.count()
        self._open: dict[int, Reader] = {}
        self._end = self.timeline.now + seconds
        self._rate = load * NUM_SEATS * num_replicas / ANSWER_SECONDS / NUM_TURNS  # chats per second
        for turns, seconds in ((NUM_TURNS, ANSWER_SECONDS), (NUM_TURNS - 1, THINK_SECONDS)):
            for _ in range(round(self._rate * turns * seconds)):
                thinks = self._random.expovariate(1 / THINK_SECONDS) if turns < NUM_TURNS else self._random.random()
                self.timeline.after(thinks, self.begin_chat, self._random.randint(1, turns))
        self.timeline.after(self._random.expovariate(self._rate), self._arrive)
        self.timeline.after(1.0, self._measure)

    @property
    def num_requests(self) -> int:
        """Number of requests that have ended."""
        return self.ends.total()

    def at(self, seconds: float, act: Callable[..., object], *arguments: Any) -> None:
        """Let something happen so long after the start."""
        self.timeline.after(seconds, act, *arguments)

    def run(self) -> None:
        """Run to the end of all answers, and check that nothing is left of them."""
        self.cluster.start(self.relay._inbox.put)
        while self.timeline.step() and self.timeline.now < self._end + PATIENCE:
            while not self.relay._inbox.empty():
                self.relay._inbox.get()()
        self.problems += self.cluster.problems
        self.problems += [f"request {request_id} does not end" for request_id in self._open]
        if self.relay.num_open or self.relay.num_running:
            self.problems.append(f"the relay keeps {self.relay.num_open} requests")
        if self.cluster.open or any(member.attempts for member in self.cluster.members.values()):
            self.problems.append("seats are not given back")

    # Chats.

    def _arrive(self) -> None:
        self.begin_chat(NUM_TURNS)
        if self.timeline.now < self._end:
            self.timeline.after(self._random.expovariate(self._rate), self._arrive)

    def begin_chat(self, turns: int, *, poisonous: bool = False) -> None:
        """Begin a chat of so many turns, the first of which may kill replicas."""
        self._turn(Chat(f"{self._seed}:{next(self._ids)}", turns), poisonous)

    def _turn(self, chat: Chat, poisonous: bool = False) -> None:
        if self.timeline.now >= self._end:
            return
        random = self._random
        message = random.choices(range(1, VOCAB), k=random.randint(10, 40))
        params = SamplingParams(max_tokens=MAX_TOKENS, seed=random.getrandbits(32), session=chat.session)
        request = Request(next(self._ids), (*chat.text, *message), params, (EOS,))
        reader = Reader(self, chat, request, random.randint(1, 40) if random.random() < STOPPING else None)
        self._open[request.request_id] = reader
        if poisonous:
            self.cluster.poisons.add(request.request_id)
        self.relay.submit(reader)
        if random.random() < PAUSING:
            self.timeline.after(random.uniform(0.0, ANSWER_SECONDS), self._pause, reader, random.uniform(0.1, 3.0))
        if random.random() < LEAVING:
            self.timeline.after(random.uniform(0.0, ANSWER_SECONDS), self._leave, reader)

    def on_end(self, reader: Reader, end: str, stats: RequestStats | None) -> None:
        """Count an end, and begin the next turn after a while."""
        chat = reader.chat
        self.ends[end] += 1
        self._open.pop(reader.request.request_id, None)
        if stats is None or reader.has_left:
            return
        if chat.turn == 1:
            self.hits.append(stats.cached_tokens > 0)
        chat.turn, chat.turns, chat.text = chat.turn + 1, chat.turns - 1, reader.request.prompt_ids + reader.counted
        if chat.turns:
            self.timeline.after(self._random.expovariate(1 / THINK_SECONDS), self._turn, chat)

    # Readers.

    def _pause(self, reader: Reader, seconds: float) -> None:
        if not reader.has_ended:
            self.relay.pause(reader.request.request_id, True)
            self.timeline.after(0.0, self._check_paused, reader)
            leaves = self._random.random() < LEAVING_PAUSED
            self.timeline.after(seconds, self._leave if leaves else self._go_on, reader)

    def _check_paused(self, reader: Reader) -> None:
        """Note a reader that pauses and keeps a seat, unless its answer is complete."""
        request_id = reader.request.request_id
        if request_id not in self.cluster.open or reader.is_stopped or reader.has_left:
            return
        if self.relay._open[request_id].end is None:
            self.problems.append(f"request {request_id} keeps a seat and is not read")

    def _go_on(self, reader: Reader) -> None:
        if not reader.has_ended:
            self._check_paused(reader)
        self.relay.pause(reader.request.request_id, False)

    def _leave(self, reader: Reader) -> None:
        if not reader.has_ended:
            reader.has_left = True
            self.timeline.after(SILENCE_SECONDS + 1.0, self._check_left, reader)
        self.relay.stop(reader.request.request_id)

    def _check_left(self, reader: Reader) -> None:
        if not reader.has_ended:
            self.problems.append(f"request {reader.request.request_id} goes on long after its reader has left")

    def _measure(self) -> None:
        if self.timeline.now < self._end:
            taken = sum(len(member.attempts) for member in self.cluster.up())
            self.loads.append(taken / max(1, self.cluster.num_seats))
            self.timeline.after(1.0, self._measure)
