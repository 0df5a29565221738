"""Every order of what can happen to an answer, on engines that only count: it ends once, with the right tokens."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from langchain_card.core.messages import Emit
from langchain_card.core.request import FinishReason, Request, RequestStats, SamplingParams
from langchain_card.engine.relay.messages import Began, Committed, Ended, EngineLost, RequestFailed, Submit
from langchain_card.engine.relay.open_requests import OpenRequest
from langchain_card.engine.relay.relay import Relay
from langchain_card.errors import EngineError
from langchain_card.limits import Limits
from langchain_card.ports import Health

DEPTH = 6
ANSWER = (11, 12, 13, 14, 15, 16)
STOP_AT = 5
"""Tokens after which the consumer of `stop string` ends the answer."""

DEAD = EngineError("engine", "toy", "died")


class Engine:
    """An attempt at the answer by an engine of the pool."""

    kind = None

    def __init__(self, submit: Submit, reply: Callable[[Any], None]) -> None:
        self.submit, self._reply = submit, reply
        self.written = len(submit.output_ids)
        self.has_begun = self.has_written = self.is_over = self.was_left = False
        self.parting = "left"
        self.stopped: list[int | None] = []

    def stop(self, num_tokens: int | None = None) -> None:
        self.stopped.append(num_tokens)

    def leave(self) -> None:
        self.was_left = True

    def begin(self) -> None:
        self.has_begun = True
        self._reply(Began(0))

    def write(self, count: int) -> None:
        """Write the next tokens of the answer; every engine would write these."""
        tokens = ANSWER[self.written : self.written + count]
        self.written += len(tokens)
        self.has_written = True
        self._reply(Committed(0, tokens, ("",) * len(tokens), (), RequestStats(rounds=1)))

    def end(self) -> None:
        self.is_over = True
        reason = FinishReason.LENGTH if not self.stopped else FinishReason.ABORT
        self._reply(Ended(0, FinishReason.STOP if self.stopped == [STOP_AT] else reason, RequestStats(rounds=1)))

    def lose(self, died: bool) -> None:
        self.is_over = True
        if died and not self.was_left:
            self.parting = "died"
        self._reply(EngineLost(DEAD, died))

    def fail(self) -> None:
        self.is_over = True
        self._reply(RequestFailed(DEAD))


class Pool:
    """Engines without number: each attempt gets a new one."""

    num_seats = 1

    def __init__(self) -> None:
        self.engines = list[Engine]()

    def start(self, post: Callable[[Callable[[], None]], None]) -> None:
        """Nothing is to be started."""

    def submit(self, request: Submit, reply: Callable[[Any], None]) -> Engine:
        assert all(engine.is_over or engine.was_left for engine in self.engines), "two engines write one answer"
        self.engines.append(Engine(request, reply))
        return self.engines[-1]

    def check(self) -> float | None:
        return 0.0

    def announce(self, count: int) -> None:
        """Nothing waits for others."""

    def health(self) -> dict[str, Health]:
        return {}

    def close(self) -> None:
        """Nothing is open."""


class Reader:
    """A consumer that checks each token as it comes."""

    def __init__(self, relay: Relay, stops: bool) -> None:
        self.request = Request(0, (1, 2), SamplingParams(max_tokens=len(ANSWER)), (0,))
        self.relay, self.stops = relay, stops
        self.tokens, self.ends, self.problems = list[int](), list[Any](), list[str]()

    def watch(self, stats: RequestStats) -> None:
        assert not self.ends

    def read(self, reading: Any) -> None:
        """Texts are short here."""

    def push(self, emit: Emit) -> int | None:
        self.tokens += emit.token_ids
        if self.ends:
            self.problems.append("a token after the end")
        if self.tokens != [*ANSWER[: len(self.tokens)]]:
            self.problems.append("tokens are missing, or came twice")
        if self.relay._open[0].output_ids != self.tokens:
            self.problems.append("a token is handed out before it is kept")
        return STOP_AT if self.stops and len(self.tokens) >= STOP_AT else None

    def finish(self, reason: FinishReason, stats: RequestStats) -> None:
        self.ends.append(reason)

    def fail(self, error: BaseException) -> None:
        self.ends.append(error)


class World:
    """A relay with one request; `actions` are what may happen next."""

    def __init__(self, stops: bool) -> None:
        self.pool = Pool()
        self.relay = Relay(self.pool, Limits(max_failures=2))
        self.reader = Reader(self.relay, stops)
        self.deaths, self.paused, self.aborted, self.failed = 0, False, False, False
        self.relay.submit(self.reader)
        self.settle()

    def settle(self) -> None:
        while not self.relay._inbox.empty():
            self.relay._inbox.get()()

    @property
    def engine(self) -> Engine | None:
        last = self.pool.engines[-1]
        return None if last.is_over or last.was_left else last

    def actions(self) -> dict[str, Callable[[], None]]:
        found: dict[str, Callable[[], None]] = {}
        if (engine := self.engine) is not None:
            found |= {"die": self._die, "leave": lambda: engine.lose(False), "fail": self._fail}
            if not engine.has_begun:
                found["begin"] = engine.begin
            elif engine.written < len(ANSWER) and not engine.stopped:
                found |= {"write": lambda: self._write(engine, 1), "write more": lambda: self._write(engine, 3)}
            if engine.stopped or engine.written == len(ANSWER):
                found["end"] = engine.end
        for old in self.pool.engines:
            if old.was_left and not old.is_over:  # its messages are still on their way
                found["old write"] = lambda old=old: old.write(1)  # type: ignore[misc]
                found["old end"] = old.end
                found["old death"] = lambda old=old: old.lose(True)  # type: ignore[misc]
        if not self.reader.ends:
            found["resume" if self.paused else "pause"] = self._turn
            if not self.aborted:
                found["abort"] = self._abort
        return found

    def _write(self, engine: Engine, count: int) -> None:
        self.deaths = 0
        engine.write(count)

    def _die(self) -> None:
        engine = self.engine
        assert engine is not None
        self.deaths += engine.has_begun and not engine.has_written
        engine.lose(True)

    def _fail(self) -> None:
        engine = self.engine
        assert engine is not None
        self.failed = True
        engine.fail()

    def _turn(self) -> None:
        self.paused = not self.paused
        self.relay.pause(0, self.paused)

    def _abort(self) -> None:
        self.aborted = True
        self.relay.stop(0)

    def check(self) -> None:
        assert not self.reader.problems
        for engine in self.pool.engines:
            begun = engine.submit.output_ids
            assert begun == ANSWER[: len(begun)]
        if self.engine is not None and not self.engine.stopped:
            assert [*ANSWER[: self.engine.written]] == self.reader.tokens, "the engine and the reader disagree"
        if self.paused and self.engine is not None:
            is_complete = self.engine.stopped or self.engine.written == len(ANSWER)
            assert is_complete or self.reader.ends, "who does not read keeps a seat"
        if (entry := self.relay._open.get(0)) is not None:
            begun = [engine for engine in self.pool.engines if engine.has_begun]
            assert entry.stats.resumed == Counter(engine.parting for engine in begun[:-1]), "resumptions are miscounted"
        assert len(self.reader.ends) <= 1 and self.relay.num_open == 1 - len(self.reader.ends)
        is_poisonous = any("died of it" in str(end) for end in self.reader.ends)
        assert is_poisonous == (self.deaths == 2 and not self.complete and not self.failed), "deaths are miscounted"

    @property
    def complete(self) -> bool:
        """Whether an answer ended at its engine's death."""
        return any(isinstance(end, FinishReason) for end in self.reader.ends)

    def finish(self) -> str:
        """Let everything go well from here on; return how the request ended."""
        self.relay.drain()
        self.settle()
        for _ in range(20):
            actions = self.actions()
            for name in ("end", "begin", "write"):
                if name in actions:
                    actions[name]()
                    self.settle()
                    break
        assert len(self.reader.ends) == 1, "the request never ends"
        (end,) = self.reader.ends
        if not self.aborted and not self.failed and isinstance(end, FinishReason):
            count = STOP_AT if self.reader.stops else len(ANSWER)
            assert self.reader.tokens[:count] == [*ANSWER[:count]], "the answer is not whole"
            assert end is (FinishReason.STOP if self.reader.stops else FinishReason.LENGTH)
        return str(end)


def explore(stops: bool, depth: int = DEPTH) -> Counter[str]:
    """Carry out all orders of so many actions; return the number of each end."""
    ended = Counter[str]()

    def reach(path: Sequence[str]) -> World:
        world = World(stops)
        for name in path:
            world.actions()[name]()
            world.settle()
        return world

    stack: list[tuple[str, ...]] = [()]
    while stack:
        path = stack.pop()
        world = reach(path)
        world.check()
        names = [*world.actions()]
        if len(path) < depth and names:
            stack += [(*path, name) for name in names]
        else:
            ended[world.finish()] += 1
            assert not world.reader.problems
    return ended


@pytest.mark.parametrize("stops", [False, True])
def test_all_orders(stops: bool) -> None:
    """Four seconds each."""
    ended = explore(stops)
    assert ended.total() >= 10_000
    assert {str(FinishReason.ABORT), str(FinishReason.STOP if stops else FinishReason.LENGTH)} <= {*ended}, ended


def test_planted_token_that_is_handed_out_before_it_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    def push(entry: OpenRequest, emit: Emit, stats: RequestStats) -> None:
        entry.num_tokens = entry.consumer.push(emit)
        entry.output_ids += emit.token_ids

    monkeypatch.setattr(OpenRequest, "push", push)
    with pytest.raises(AssertionError, match="before it is kept"):
        explore(False, 3)


def test_planted_deaths_that_are_not_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(OpenRequest, "deaths", property(lambda entry: 0, lambda entry, count: None))
    with pytest.raises(AssertionError, match="deaths are miscounted"):
        explore(False, 4)


def test_planted_resumptions_that_are_counted_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    after = RequestStats.after

    def doubled(stats: RequestStats, earlier: RequestStats) -> RequestStats:
        return after(dataclasses.replace(stats, resumed=earlier.resumed), earlier)

    monkeypatch.setattr(RequestStats, "after", doubled)
    with pytest.raises(AssertionError, match="resumptions are miscounted"):
        explore(False, 5)


def test_a_request_that_kills_its_engines_after_a_token_fails_at_last() -> None:
    world = World(False)
    world.relay._limits = Limits(max_deaths=2)
    for _ in range(3):
        for act in ("begin", "write", "die"):
            assert not world.reader.ends
            world.actions()[act]()
            world.settle()
    assert "died of it" in str(world.reader.ends[0])


def test_planted_engine_that_is_still_read_after_it_was_left(monkeypatch: pytest.MonkeyPatch) -> None:
    receive = Relay._receive
    monkeypatch.setattr(Relay, "_receive", lambda self, entry, number, reply: receive(self, entry, entry.number, reply))
    with pytest.raises(AssertionError, match=r"came twice|disagree|not whole|keeps a seat|two engines"):
        explore(False, 5)


def test_planted_reader_that_keeps_its_seat(monkeypatch: pytest.MonkeyPatch) -> None:
    def pause(relay: Relay, request_id: int, paused: bool) -> None:
        relay._open[request_id].paused = paused

    monkeypatch.setattr(Relay, "_pause", pause)
    with pytest.raises(AssertionError, match="keeps a seat"):
        explore(False, 3)


def test_stats_are_added(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(stops=False)
    for name in ("begin", "write", "die", "begin", "write"):
        world.actions()[name]()
        world.settle()
    assert dataclasses.asdict(world.relay._open[0].stats)["rounds"] == 2
