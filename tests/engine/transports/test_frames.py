"""What two processes say to each other: every message there and back, bounds, and nothing else gets through."""

from __future__ import annotations

import contextlib
import math
import random
import socket
import struct
from collections.abc import Callable
from dataclasses import fields
from typing import Any

import pytest
import torch

from langchain_card import errors
from langchain_card.config import EngineConfig
from langchain_card.core import messages as m
from langchain_card.core.request import FinishReason, Request, RequestStats, SamplingParams
from langchain_card.engine.isolated import messages as f
from langchain_card.engine.transports import frames
from langchain_card.engine.transports.frames import (
    DOWN,
    UP,
    Direction,
    Exhausted,
    Failed,
    Logged,
    Ready,
    Start,
    Wire,
    WorkerHeartbeat,
)
from langchain_card.errors import CARDError, DeviceError, EngineError
from langchain_card.limits import Limits, Pins
from langchain_card.ports import Health
from langchain_card.runtime.kind import Kind


class Draw:
    """Random values of the kinds that fields have."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)

    def int(self) -> int:
        return self.random.choice([0, 1, self.random.getrandbits(8), self.random.getrandbits(20), 2**31, 2**63 - 1])

    def ints(self) -> tuple[int, ...]:
        return tuple(self.int() for _ in range(self.random.choice([0, 1, 5, 300])))

    def float(self) -> float:
        return self.random.choice([0.0, -0.0, -float("inf"), 1e-300, self.random.gauss(0, 1), -self.random.random()])

    def floats(self) -> tuple[float, ...]:
        return tuple(self.float() for _ in range(self.random.choice([0, 1, 300])))

    def text(self) -> str:
        return "".join(self.random.choices("aB0 \n\0é漢🙂", k=self.random.choice([0, 1, 40])))

    def params(self) -> SamplingParams:
        return SamplingParams(
            max_tokens=self.int(),
            temperature=self.float(),
            seed=self.int(),
            stop=(self.text(), self.text()),
            schedule=self.random.choice(["auto", "plain", "sequential", "parallel"]),
            top_k=self.int(),
            top_p=self.float(),
            logit_bias=tuple((self.int(), self.float()) for _ in range(3)),
            banned_ids=self.ints(),
            logprobs=self.random.choice([None, 5]),
            tenant=self.text(),
        )

    def request(self) -> Request:
        labels = tuple(self.ints() for _ in range(self.random.choice([0, 1, 5])))
        return Request(self.int(), self.ints(), self.params(), self.ints(), labels)

    def proposal(self) -> m.Proposal:
        numbers = [self.int() for _ in range(9)]
        return m.Proposal(
            self.text(), *numbers[:5], self.ints(), self.ints(), self.floats(), self.ints(), *numbers[5:8],
            self.float(), self.float(), numbers[8],
        )  # fmt: skip

    def argument(self) -> frames.Argument:
        return self.random.choice([None, True, self.text(), self.int(), self.float()])


MESSAGES: dict[tuple[Direction, str], Callable[[Draw], Any]] = {
    (DOWN, "Start"): lambda d: Start(d.text(), {d.text(): d.argument() for _ in range(4)}),
    (DOWN, "Begin"): lambda d: m.Begin(d.text(), d.request(), d.text(), d.ints(), d.int()),
    (DOWN, "Correct"): lambda d: m.Correct(d.text(), d.int(), d.int(), d.ints()),
    (DOWN, "Grow"): lambda d: m.Grow(d.text(), d.int(), d.ints(), d.float()),
    (DOWN, "End"): lambda d: m.End(d.text(), d.int()),
    (UP, "Ready"): lambda d: Ready(),
    (UP, "Proposal"): lambda d: d.proposal(),
    (UP, "Exhausted"): lambda d: Exhausted(d.ints()),
    (UP, "WorkerHeartbeat"): lambda d: WorkerHeartbeat(d.float(), d.float()),
    (UP, "Logged"): lambda d: Logged(d.text(), d.int(), d.text()),
    (UP, "Failed"): lambda d: Failed(d.text(), d.text(), d.text(), d.argument(), d.text()),
}


def test_every_kind_is_drawn() -> None:
    assert {kind for way, kind in MESSAGES if way is DOWN} == set(DOWN._decoders)
    assert {kind for way, kind in MESSAGES if way is UP} == set(UP._decoders)


@pytest.mark.parametrize(("way", "kind"), MESSAGES, ids=[kind for _, kind in MESSAGES])
def test_every_message_arrives_as_it_was(way: Direction, kind: str) -> None:
    for seed in range(200):
        message = MESSAGES[way, kind](Draw(seed))
        assert type(message).__name__ == kind
        frame = way.encode(message)
        got = way.decode(frame[4:])
        assert type(got) is type(message) and got == message and repr(got) == repr(message)


@pytest.mark.parametrize(("way", "kind"), MESSAGES, ids=[kind for _, kind in MESSAGES])
def test_damaged_frames_never_do_more_than_make_no_sense(way: Direction, kind: str) -> None:
    """Cut, changed and random bytes are another message of this direction, or an `EngineError`."""
    refused = 0
    for seed in range(300):
        draw = Draw(seed)
        body = bytearray(way.encode(MESSAGES[way, kind](draw))[4:])
        for _ in range(draw.random.choice([1, 1, 3])):
            body[draw.random.randrange(len(body))] = draw.random.getrandbits(8)
        for damaged in (body, body[: draw.random.randrange(len(body))], draw.random.randbytes(40)):
            with contextlib.suppress(EngineError):
                assert type(way.decode(bytes(damaged))).__name__ in way._decoders
                continue
            refused += 1
    assert refused > 500


def test_nothing_travels_the_wrong_way() -> None:
    for way, other in ((DOWN, UP), (UP, DOWN)):
        for own, kind in MESSAGES:
            message = MESSAGES[own, kind](Draw(0))
            if own is other:
                with pytest.raises(EngineError, match=f"frame = '{kind}': is none of"):
                    way.encode(message)
                with pytest.raises(EngineError, match=f"frame = '{kind}': is none of"):
                    way.decode(other.encode(message)[4:])


@pytest.mark.parametrize("value", [torch.tensor(3), b"\x80\x04.", object()], ids=["tensor", "bytes", "object"])
def test_only_numbers_and_strings_travel(value: Any) -> None:
    """msgspec knows bytes, the receiver does not take them."""
    with pytest.raises((TypeError, EngineError)):
        DOWN.decode(DOWN.encode(m.Correct("toy", 0, 0, (value,)))[4:])


def wires() -> tuple[Wire, Wire]:
    """The parent's end and the process's."""
    up, down = socket.socketpair()
    return Wire(up, sends=DOWN, takes=UP), Wire(down, sends=UP, takes=DOWN)


def test_messages_arrive_in_order_until_the_other_end_is_gone() -> None:
    parent, process = wires()
    sent = [m.Correct("toy", 0, 0, tuple(range(n))) for n in range(100)]
    for message in sent:
        parent.send(message)
    parent._socket.sendall(DOWN.encode(m.End("toy", 0))[:-1])
    parent.shutdown()
    assert [process.receive() for _ in sent] == sent
    assert process.receive() is None, "half a frame is no message"
    with pytest.raises(OSError, match="Broken pipe"):
        process.send(Ready())
    parent.close()
    process.close()


def test_messages_of_an_engine_in_a_process() -> None:
    params = SamplingParams(stop=("x",), logit_bias=((1, 2.0),), grammar="start: /a/")
    request = Request(3, (1, 2), params, (0,), labels=((4, 5), (4,)))
    stats = RequestStats(
        rounds=2, verified_by_source={"model": 5}, accepted_by_source={"model": 3}, closed=True,
        passes_by_accepted={0: 1, 3: 1}, label_logprobs=(-0.5, -math.inf), resumed={"died": 1},
    )  # fmt: skip
    several = [field.name for field in fields(stats) if isinstance(getattr(stats, field.name), dict | tuple)]
    assert len(several) == 5 and all(getattr(stats, name) for name in several), "each is sent with some numbers"
    logprobs = (m.TokenLogprob(-0.5, ((1, -0.5), (2, -1.0))),)
    said: dict[Direction, list[Any]] = {
        f.TO_ENGINE: [
            f.LoadEngine(EngineConfig("a", None, limits=Limits(max_num_seqs=3), pins=Pins(window=4), isolate=True)),
            f.Submit(request, (5, 6)), f.Stop(3), f.Stop(3, 2), f.Announce(4),
        ],
        f.FROM_ENGINE: [
            f.LoadStep("load a"), f.Loaded(Limits(), "auto", Kind("a", "b")),
            f.Began(3), m.Reading(3, 512, 900), Logged("a", 20, "b"),
            f.Committed(3, (7,), ("model",), logprobs, stats),
            f.Ended(3, FinishReason.LENGTH, stats), f.NotServed(3, Failed("EngineError", "no")),
            Failed("KeyError", "x"),
            f.EngineHeartbeat({"target": Health("up", 1.5, 20.0), "model": Health("given up")}),
        ],
    }  # fmt: skip
    for way, messages in said.items():
        assert {type(message).__name__ for message in messages} == set(way._decoders)
        assert [way.decode(way.encode(message)[4:]) for message in messages] == messages


def test_frames_have_a_bound_both_ways() -> None:
    parent, process = wires()
    long = tuple(range(2**20))
    with pytest.raises(EngineError, match=r"frame = '.* bytes': at most 4,194,304 may be sent"):
        process.send(Exhausted(long))
    process._socket.sendall(struct.pack(">I", frames.MAX_REPORT_BYTES + 1))
    with pytest.raises(EngineError, match="'4,194,305 bytes': at most 4,194,304"):
        parent.receive()  # and does not wait for so many
    parent.close()
    process.close()
    longest = Request(0, (2**31 - 1,) * 10_000_000, SamplingParams())
    assert len(DOWN.encode(m.Begin("toy", longest, "parallel"))) < frames.MAX_COMMAND_BYTES


def test_errors_travel() -> None:
    ours = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, CARDError)]
    assert len(ours) > 10
    for kind in ours:
        error = kind("draft_device", "cuda:7", "has no room for it", "use a smaller draft")
        again = UP.decode(UP.encode(Failed.of(error))[4:]).error("draft process")
        assert type(again) is kind and str(again) == str(error)
    odd = Failed.of(DeviceError("folder", ("a", "b"), "holds no weights")).error("draft process")
    assert odd.value == "('a', 'b')"
    other = Failed.of(ZeroDivisionError("by zero")).error("draft process")
    assert type(other) is EngineError and "draft process = 'ZeroDivisionError': by zero" in str(other)
    assert type(Failed("annotations", "x").error("draft process")) is EngineError, "a name that is no class"
