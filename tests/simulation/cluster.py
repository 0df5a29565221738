"""A cluster of simulated replicas, which is the pool of a relay: it places requests, and notices what fails."""

from __future__ import annotations

import functools
import itertools
from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random

from langchain_card.core.request import FinishReason, Request, RequestStats
from langchain_card.engine.relay.messages import Began, Ended, EngineLost, Reply, RequestFailed, Submit
from langchain_card.errors import EngineError
from langchain_card.limits import Limits
from langchain_card.ports import Health
from langchain_card.runtime.kind import Kind
from tests.simulation.replicas import Replica, Timeline
from tests.simulation.ring import Ring

NUM_SEATS, MAX_REMEMBERED = 16, 64
"""Requests that a replica answers at once; sessions that it remembers."""

RATES = (8.0, 12.0)
"""Tokens per second: between these, for each replica another one."""

NUM_FALLBACKS, FIRST_BACKOFF, MOST_BACKOFF = 2, 0.025, 0.5
"""Replicas that are tried after a session's own; seconds until all are tried again, which double (Ray Serve's)."""

LATENCY, NOTICE_SECONDS, SILENCE_SECONDS, LOAD_SECONDS = 0.001, 0.03, 2.0, 2.0
"""Seconds of a message's way, until a death is noticed, and a hang; and until a new replica is up."""

POISON_SECONDS = 0.05
"""Seconds in which a poisonous request kills its replica."""


@dataclass(slots=True, eq=False)
class Member:
    """What the pool knows of a replica.

    Attributes:
        state: "loading", "up", "leaving" (it gets no new requests) or "gone".
        attempts: those that hold a seat.
        failed_at: when it died, or began to hang.
        is_replaced: whether another one is loaded in its place.
    """

    number: int
    replica: Replica
    state: str = "loading"
    attempts: dict[int, PlacedAttempt] = field(default_factory=dict)
    failed_at: float = 0.0
    is_replaced: bool = False


@dataclass(slots=True, eq=False)
class PlacedAttempt:
    """An `Attempt` at a replica, or one that waits for a seat. Messages of one that was left still arrive."""

    cluster: Cluster
    number: int
    submit: Submit
    reply: Callable[[Reply], None]
    member: Member | None = None
    placed_at: float = 0.0
    has_begun: bool = False
    has_written: bool = False
    is_over: bool = False

    @property
    def request_id(self) -> int:
        return self.submit.request.request_id

    @property
    def kind(self) -> Kind | None:
        return None if self.member is None else self.member.replica.kind

    def stop(self, num_tokens: int | None = None) -> None:
        self.cluster.stop(self, num_tokens)

    def leave(self) -> None:
        self.cluster.leave(self)


class Cluster:
    """An `EnginePool` of simulated replicas.

    Args:
        kind: of the replicas.
        num_replicas: number of replicas at the start.
        limits: those of the relay.
        timeline: its clock.
        seed: of all that is drawn.

    Attributes:
        members: all replicas that there were, by number.
        open: the attempt of each request that is not over.
        poisons: ids of requests that kill their replica; killed: how many each has killed.
        resumes: attempts after the first one of a request, by what had ended the one before.
        gaps: seconds from a death, a hang or the end of a drain to the request's next token, by what happened.
        deaths: replicas in a row that died with a request, before they wrote a token of it.
        problems: what a pool may expect of a relay and did not get.
    """

    def __init__(self, kind: Kind, num_replicas: int, limits: Limits, timeline: Timeline, seed: int) -> None:
        self.members: dict[int, Member] = {}
        self.open: dict[int, PlacedAttempt] = {}
        self.poisons, self.killed, self.deaths = set[int](), Counter[int](), Counter[int]()
        self.resumes, self.gaps = Counter[str](), defaultdict[str, list[float]](list)
        self.problems = list[str]()
        self._kind, self._limits, self._timeline = kind, limits, timeline
        self._random, self._ring = Random(seed), Ring(seed)
        self._ids, self._numbers = itertools.count(), itertools.count()
        self._causes: dict[int, str] = {}
        self._since: dict[int, tuple[str, float]] = {}
        for _ in range(num_replicas):
            self._add(0.0)

    # `EnginePool`.

    @property
    def num_seats(self) -> int:
        return NUM_SEATS * len(self.up())

    def start(self, post: Callable[[Callable[[], None]], None]) -> None:
        self._post = post

    def submit(self, request: Submit, reply: Callable[[Reply], None]) -> PlacedAttempt:
        attempt = PlacedAttempt(self, next(self._ids), request, reply)
        if attempt.request_id in self.open:
            self.problems.append(f"two replicas write the answer to request {attempt.request_id}")
        if self.deaths[attempt.request_id] >= self._limits.max_failures:
            self.problems.append(f"request {attempt.request_id} goes on after too many deaths")
        self.open[attempt.request_id] = attempt
        if (cause := self._causes.pop(attempt.request_id, None)) is not None:
            self.resumes[cause] += 1
        self._place(attempt, FIRST_BACKOFF)
        return attempt

    def check(self) -> float | None:
        return None

    def announce(self, count: int) -> None:
        """Requests come one by one."""

    def kind(self) -> Kind:
        return self._kind

    def health(self) -> dict[str, Health]:
        return {}

    def close(self) -> None:
        """Nothing is open."""

    # Attempts.

    def stop(self, attempt: PlacedAttempt, num_tokens: int | None) -> None:
        if attempt.member is not None:
            self._timeline.after(LATENCY, attempt.member.replica.stop, attempt.number, num_tokens)
        else:
            reason = FinishReason.ABORT if num_tokens is None else FinishReason.STOP
            self._reply_later(attempt, Ended(attempt.number, reason, RequestStats()))
            self._release(attempt)

    def leave(self, attempt: PlacedAttempt) -> None:
        if attempt.member is not None:
            self._timeline.after(LATENCY, attempt.member.replica.discard, attempt.number)
        self._since.pop(attempt.request_id, None)
        self._release(attempt, "pause")

    def _place(self, attempt: PlacedAttempt, backoff: float) -> None:
        """Give a request a seat, or try again later, or let it fail if no replica continues its answer."""
        if attempt.is_over:
            return
        kind, request = attempt.submit.kind, attempt.submit.request
        tried = 0
        for number in self._ring.walk(request.params.session):
            member = self.members[number]
            if kind is not None and not member.replica.kind.continues(kind):
                continue
            if len(member.attempts) < NUM_SEATS:
                self._take_seat(attempt, member)
                return
            tried += 1
            if tried > NUM_FALLBACKS:
                break
        if tried or kind is None or self._is_coming(kind):
            self._timeline.after(backoff, self._place, attempt, min(2 * backoff, MOST_BACKOFF))
        else:
            limit = "is another one now than the one that began this answer"
            self._reply_later(attempt, RequestFailed(EngineError("model", kind.answer, limit, "send it again")))
            self._release(attempt)

    def _is_coming(self, kind: Kind) -> bool:
        loading = [member for member in self.members.values() if member.state == "loading"]
        return any(member.replica.kind.continues(kind) for member in loading)

    def _take_seat(self, attempt: PlacedAttempt, member: Member) -> None:
        attempt.member, attempt.placed_at = member, self._timeline.now
        member.attempts[attempt.number] = attempt
        send = functools.partial(self._reply_later, attempt)
        self._timeline.after(LATENCY, member.replica.begin, attempt.number, attempt.submit, send)

    def _reply_later(self, attempt: PlacedAttempt, reply: Reply) -> None:
        self._timeline.after(LATENCY, self._reply, attempt, reply)

    def _reply(self, attempt: PlacedAttempt, reply: Reply) -> None:
        """Hand a reply to the relay, also one of an attempt that is over."""
        if isinstance(reply, Ended):
            self._release(attempt)
        attempt.has_begun |= isinstance(reply, Began)
        self._post(lambda: attempt.reply(reply))

    def _release(self, attempt: PlacedAttempt, cause: str | None = None) -> None:
        if attempt.is_over:
            return
        attempt.is_over = True
        del self.open[attempt.request_id]
        if attempt.member is not None:
            del attempt.member.attempts[attempt.number]
        if cause is not None:
            self._causes[attempt.request_id] = cause

    def note_token(self, request_id: int) -> None:
        """Measure how long a reader waited for a token, if its replica was lost."""
        del self.deaths[request_id]
        if (attempt := self.open.get(request_id)) is not None:
            attempt.has_written = True
        cause, since = self._since.pop(request_id, ("", 0.0))
        if cause:
            self.gaps[cause].append(self._timeline.now - since)

    # Replicas.

    def up(self) -> list[Member]:
        """Return the replicas that take requests."""
        return [member for member in self.members.values() if member.state == "up"]

    def _add(self, seconds: float) -> None:
        """Load a replica; it is up after so many seconds."""
        replica = Replica(self._kind, self._random.uniform(*RATES), MAX_REMEMBERED, self._timeline)
        member = Member(next(self._numbers), replica)
        replica.on_begin = functools.partial(self._poison, member)
        self.members[member.number] = member
        if seconds:
            self._timeline.after(seconds, self._list, member)
        else:
            self._list(member)

    def _list(self, member: Member) -> None:
        member.state = "up"
        self._ring.add(member.number)

    def _lose(self, member: Member, cause: str, died: bool = True) -> None:
        """Notice that a replica is gone; one that was to stay is started again."""
        if member.state == "gone":
            return
        if member.state == "up":
            self._ring.remove(member.number)
            if not member.is_replaced:
                self._add(LOAD_SECONDS)
        member.state = "gone"
        error = EngineError("replica", member.number, f"lost ({cause})")
        for attempt in [*member.attempts.values()]:
            self._release(attempt, cause)
            self.deaths[attempt.request_id] += died and attempt.has_begun and not attempt.has_written
            if attempt.placed_at <= member.failed_at:
                self._since.setdefault(attempt.request_id, (cause, member.failed_at))
            self._post(functools.partial(attempt.reply, EngineLost(error, died)))

    def _poison(self, member: Member, request: Request) -> None:
        if request.request_id in self.poisons:
            self.killed[request.request_id] += 1
            self._timeline.after(POISON_SECONDS, self.kill, member)

    def kill(self, member: Member | None = None) -> None:
        """Let a replica die: this one, or any that is up."""
        if member is None:
            member = self._random.choice(self.up())
        member.replica.die()
        member.failed_at = self._timeline.now
        self._timeline.after(NOTICE_SECONDS, self._lose, member, "death")

    def hang(self, seconds: float) -> None:
        """Let any replica hang. If it is given up before it wakes, it still writes for a moment."""
        member = self._random.choice(self.up())
        if member.replica.hangs:
            return
        member.replica.hang()
        member.failed_at = self._timeline.now
        if seconds > SILENCE_SECONDS:
            self._timeline.after(SILENCE_SECONDS, self._lose, member, "hang")
            self._timeline.after(seconds + 1.0, member.replica.die)
        self._timeline.after(seconds, member.replica.wake)

    def retire(self, member: Member, drain: float, cause: str) -> None:
        """Send a replica no more requests; end it after `drain` seconds."""
        if member.state == "up":
            member.state = "leaving"
            self._ring.remove(member.number)
            self._timeline.after(drain, self._end, member, cause)

    def _end(self, member: Member, cause: str) -> None:
        if member.state == "leaving":
            member.replica.die()
            member.failed_at = self._timeline.now
            self._lose(member, cause, died=False)

    def update(self, kind: Kind, every: float, drain: float) -> None:
        """Replace all replicas one by one, each once another one is up."""
        self._kind = kind
        for place, member in enumerate(self.up()):
            self._timeline.after(place * every, self._replace, member, drain)

    def _replace(self, member: Member, drain: float) -> None:
        if member.state == "up":
            member.is_replaced = True
            self._add(LOAD_SECONDS)
            self._timeline.after(LOAD_SECONDS, self.retire, member, drain, "update")

    def downscale(self, count: int, drain: float) -> None:
        """Retire any `count` replicas."""
        for member in self._random.sample(self.up(), count):
            self.retire(member, drain, "downscale")
