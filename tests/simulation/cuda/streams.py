"""Streams and events, with vector clocks: what has happened before what."""

from __future__ import annotations

import itertools
from types import TracebackType
from typing import NamedTuple

import torch

from tests.simulation.cuda import state


class Point(NamedTuple):
    """A kernel: its stream, and its number there."""

    stream: int
    number: int


class Clock(dict[int, int]):
    """By stream, the number of its last kernel that has happened before."""

    def merge(self, other: Clock) -> None:
        """Add what has happened before another point."""
        for stream, number in other.items():
            self[stream] = max(number, self.get(stream, 0))

    def covers(self, point: Point) -> bool:
        """Return whether a kernel has happened before."""
        return self.get(point.stream, 0) >= point.number


class Stream:
    """Work of one device in order.

    Args:
        device: the stream's device; the current one by default.

    Attributes:
        clock: what has happened before the stream's next kernel.
    """

    _ids = itertools.count(1)

    def __init__(self, device: torch.device | str | int | None = None, priority: int = 0) -> None:
        self.device, self.priority = state.active().device(device), priority
        self.id, self.clock = next(self._ids), Clock()
        state.active().note(self)

    @property
    def cuda_stream(self) -> int:
        """The handle, another one for each stream."""
        return self.id

    @property
    def last(self) -> Point:
        """The last kernel."""
        return Point(self.id, self.clock.get(self.id, 0))

    def launch(self) -> Point:
        """Queue a kernel; what the host has waited for has happened before it."""
        simulation = state.active()
        self.clock.merge(simulation.host)
        self.clock[self.id] = self.clock.get(self.id, 0) + 1
        return self.last

    def wait_stream(self, other: Stream) -> None:
        """Let later kernels wait for all that is queued on another stream."""
        self.clock.merge(other.clock)

    def wait_event(self, event: Event) -> None:
        """Let later kernels wait for an event."""
        self.clock.merge(event.clock)

    def record_event(self, event: Event | None = None) -> Event:
        """Record an event, or a new one."""
        event = event or Event()
        event.record(self)
        return event

    def synchronize(self) -> None:
        """Wait on the host for all that is queued."""
        state.active().sync("stream.synchronize", self.clock)

    def query(self) -> bool:
        """Return whether the host knows that all has been done."""
        return all(state.active().host.get(stream, 0) >= number for stream, number in self.clock.items())


class Event:
    """A point of a stream."""

    def __init__(self, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False) -> None:
        self.clock = Clock()
        self.device: torch.device | None = None

    def record(self, stream: Stream | None = None) -> None:
        """Record what is queued; on the current stream of the current device by default."""
        stream = stream or state.active().current_stream()
        self.device = self.device or stream.device
        if self.device != stream.device:
            raise RuntimeError(f"an event of {self.device} cannot be recorded on {stream.device}")
        self.clock = Clock(stream.clock)

    def wait(self, stream: Stream | None = None) -> None:
        """Let a stream wait; the current one by default."""
        (stream or state.active().current_stream()).wait_event(self)

    def query(self) -> bool:
        """Return whether the host knows that the event has happened."""
        return all(state.active().host.get(stream, 0) >= number for stream, number in self.clock.items())

    def synchronize(self) -> None:
        """Wait on the host; free where the host knows already that the event has happened."""
        if not self.query() or state.active().capture is not None:
            state.active().sync("event.synchronize", self.clock)


class StreamContext:
    """A block whose work is queued on a stream; the streams and the current device are restored after it."""

    def __init__(self, stream: Stream | None) -> None:
        self._stream = stream

    def __enter__(self) -> None:
        simulation = state.active()
        self._device = simulation.current_device
        if self._stream is not None:
            self._before = simulation.current_stream(self._stream.device)
            simulation.set_stream(self._stream)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self._stream is not None:
            state.active().set_stream(self._before)
        state.active().current_device = self._device
