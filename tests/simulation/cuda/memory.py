"""Memory of devices: who has used it, and what happens to it when it is freed; copies from and to pinned memory."""

from __future__ import annotations

import weakref
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from tests.simulation.cuda.errors import EarlyFree, EarlyRefill, MissingWait
from tests.simulation.cuda.streams import Point, Stream

if TYPE_CHECKING:
    from tests.simulation.cuda.simulation import Simulation

POISON = 0xFF
"""Byte of memory without a value: NaN in every type of floats, -1 in integers."""


def key(tensor: Tensor) -> int:
    """Return what identifies the memory of a host's tensor while it is alive."""
    return int(tensor.untyped_storage()._cdata)


def poison(storage: torch.UntypedStorage) -> None:
    """Write what memory without a value holds."""
    storage.fill_(POISON)  # type: ignore[attr-defined]


@dataclass(slots=True)
class Uses:
    """Which kernels have used a piece of memory.

    Attributes:
        owner: the stream that gets the memory back when it is freed.
        written: the last kernel that wrote it.
        read: by stream, the last kernel that has read it since.
        kept: streams of `record_stream`.
    """

    owner: Stream
    written: Point | None = None
    read: dict[int, Point] = field(default_factory=dict)
    kept: set[int] = field(default_factory=set)

    @property
    def points(self) -> list[Point]:
        """The kernels that may still run."""
        return [*self.read.values(), *([] if self.written is None else [self.written])]


class Block:
    """A piece of a device's memory, which lives as long as a tensor on the device refers to it.

    Args:
        simulation: whose memory it is.
        host: a tensor of the host that holds the numbers.
        stream: whose work had it allocated.

    Attributes:
        storage: the numbers.
        uses: which kernels have used it.
    """

    def __init__(self, simulation: Simulation, host: Tensor, stream: Stream) -> None:
        self.storage, self.uses = host.untyped_storage(), Uses(stream)
        weakref.finalize(self, _free, simulation, key(host), self.storage, self.uses).atexit = False

    def read(self, stream: Stream, point: Point, what: str) -> None:
        """Note that a kernel reads this.

        Raises:
            MissingWait: the kernel does not wait for the last write.
        """
        written = self.uses.written
        if written is not None and not stream.clock.covers(written):
            raise MissingWait(f"{what} on stream {stream.id} reads what stream {written.stream} may still write")
        self.uses.read[stream.id] = point

    def write(self, stream: Stream, point: Point, what: str) -> None:
        """Note that a kernel writes this.

        Raises:
            MissingWait: the kernel does not wait for the last reads, or for the last write.
        """
        late = [other for other in self.uses.points if not stream.clock.covers(other)]
        if late:
            raise MissingWait(f"{what} on stream {stream.id} writes what stream {late[0].stream} may still use")
        self.uses.written, self.uses.read = point, {}


def _free(simulation: Simulation, number: int, storage: torch.UntypedStorage, uses: Uses) -> None:
    """Overwrite freed memory; report uses that the next owner of the memory does not wait for."""
    if not simulation.is_active:
        return
    simulation.blocks.pop(number, None)
    poison(storage)
    for point in uses.points:
        known = uses.owner.clock.covers(point) or simulation.host.covers(point)
        if not known and point.stream not in uses.kept:
            text = (
                f"{storage.nbytes()} bytes of stream {uses.owner.id} were freed while stream {point.stream} used them"
            )
            simulation.report(EarlyFree(text))


@dataclass(slots=True, eq=False)
class Transfer:
    """An asynchronous copy that involves memory of the host.

    Attributes:
        point: the copy's place in its stream.
        host: memory of the host.
        numbers: what a copy to the device was to read, or what a copy to the host writes.
        to_device: whether the host's memory is read.
    """

    point: Point
    host: Tensor
    numbers: Tensor
    to_device: bool

    def check(self) -> None:
        """Raise `EarlyRefill` if the host has written what the device was to read."""
        if self.to_device and not torch.equal(_bytes(self.host), _bytes(self.numbers)):
            raise EarlyRefill(f"pinned memory {tuple(self.host.shape)} was written before the copy from it had ended")

    def end(self) -> None:
        """Complete the copy."""
        self.check()
        if not self.to_device:
            self.host.copy_(self.numbers)


@dataclass(slots=True)
class Transfers:
    """The asynchronous copies that the host does not know to have ended.

    Attributes:
        pinned: storages of pinned memory, by key.
    """

    pinned: dict[int, torch.UntypedStorage] = field(default_factory=dict)
    _open: list[Transfer] = field(default_factory=list)

    def is_pinned(self, host: Tensor) -> bool:
        """Return whether a tensor of the host lies in pinned memory."""
        return key(host) in self.pinned

    def to_device(self, point: Point, host: Tensor) -> None:
        """Begin a copy from pinned memory."""
        for other in self._open:
            if key(other.host) == key(host):
                other.check()
        self._open.append(Transfer(point, host, host.clone(), to_device=True))

    def to_host(self, point: Point, host: Tensor, numbers: Tensor) -> None:
        """Begin a copy to the host, which finds poison there until it waits."""
        poison(host.untyped_storage())
        self._open.append(Transfer(point, host, numbers, to_device=False))

    def settle(self, simulation: Simulation) -> None:
        """End the copies that the host has waited for."""
        ended = [transfer for transfer in self._open if simulation.host.covers(transfer.point)]
        self._open = [transfer for transfer in self._open if transfer not in ended]
        for transfer in ended:
            transfer.end()


def _bytes(host: Tensor) -> Tensor:
    return host.contiguous().reshape(-1).view(torch.uint8)
