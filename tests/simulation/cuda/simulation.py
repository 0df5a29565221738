"""The simulation of CUDA devices: their streams, their memory, what the host knows, and what went wrong."""

from __future__ import annotations

import json
import threading
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor

from tests.simulation.cuda.errors import MissingWait, SyncWhileCapturing, Violation
from tests.simulation.cuda.memory import Block, Transfers, key
from tests.simulation.cuda.streams import Clock, Stream

if TYPE_CHECKING:
    from tests.simulation.cuda.graphs import Capture
    from tests.simulation.cuda.kernels import Kernel

Error = TypeVar("Error", bound=Violation)


class _Thread(threading.local):
    """What each thread has of its own."""

    def __init__(self) -> None:
        self.device = torch.device("cuda", 0)
        self.streams: dict[torch.device, Stream] = {}
        self.capture: Capture | None = None


class Simulation:
    """CUDA devices that compute on the CPU.

    Args:
        num_devices: number of devices.
        log: file that takes violations, for a parent process.

    Attributes:
        violations: what went wrong, in order.
        syncs: for each time that the host waited for a device, why.
        host: what the host knows to have happened. Threads of the host share it: what orders them is not seen.
        blocks: memory of the devices that is in use, by its key.
        transfers: asynchronous copies from and to pinned memory.
    """

    def __init__(self, num_devices: int, log: Path | None = None) -> None:
        self.num_devices, self.is_active = num_devices, True
        self.violations: list[Violation] = []
        self._log = log
        self.syncs: list[str] = []
        self.host = Clock()
        self.blocks: dict[int, weakref.ref[Block]] = {}
        self.transfers = Transfers()
        self.lock = threading.RLock()
        self._thread = _Thread()
        self._streams: weakref.WeakSet[Stream] = weakref.WeakSet()
        self._defaults: dict[torch.device, Stream] = {}

    # Devices and streams of the calling thread.

    def device(self, name: torch.device | str | int | None) -> torch.device:
        """Return a device with its index; the current one by default."""
        if isinstance(name, int):
            return torch.device("cuda", name)
        found = self.current_device if name is None else torch.device(name)
        if found.type == "cuda" and found.index is None:
            return self.current_device
        return found

    @property
    def current_device(self) -> torch.device:
        """The calling thread's device."""
        return self._thread.device

    @current_device.setter
    def current_device(self, device: torch.device) -> None:
        self._thread.device = device

    def current_stream(self, device: torch.device | str | int | None = None) -> Stream:
        """Return the stream of a device on which the calling thread queues its work."""
        found = self.device(device)
        return self._thread.streams.get(found) or self.default_stream(found)

    def default_stream(self, device: torch.device | str | int | None = None) -> Stream:
        """Return the stream of a device that all threads begin with."""
        found = self.device(device)
        with self.lock:
            if found not in self._defaults:
                self._defaults[found] = Stream(found)
            return self._defaults[found]

    def set_stream(self, stream: Stream) -> None:
        """Queue the calling thread's work on a stream; its device becomes the current one, as in torch."""
        self._thread.streams[stream.device], self.current_device = stream, stream.device

    @property
    def capture(self) -> Capture | None:
        """What the calling thread captures."""
        return self._thread.capture

    @capture.setter
    def capture(self, capture: Capture | None) -> None:
        self._thread.capture = capture

    # What happens.

    def report(self, violation: Error) -> Error:
        """Record a violation and return it, to be raised."""
        self.violations.append(violation)
        if self._log is not None:
            with self._log.open("a") as log:
                log.write(json.dumps([type(violation).__name__, str(violation)]) + "\n")
        return violation

    def sync(self, reason: str, clock: Clock) -> None:
        """Let the host wait for what has happened before a point.

        Raises:
            SyncWhileCapturing: the calling thread captures a graph.
        """
        if self.capture is not None:
            raise self.report(SyncWhileCapturing(f"{reason} while a graph is captured"))
        with self.lock:
            self.syncs.append(reason)
            self.host.merge(clock)
            self.settle()

    def synchronize(self, device: torch.device | str | int | None = None) -> None:
        """Let the host wait for all streams of a device."""
        found, clock = self.device(device), Clock()
        for stream in [*self._streams]:
            if stream.device == found:
                clock.merge(stream.clock)
        self.sync("synchronize", clock)

    def settle(self) -> None:
        """End the copies that the host knows to have ended."""
        try:
            self.transfers.settle(self)
        except Violation as violation:
            raise self.report(violation) from None

    def allocate(self, host: Tensor, stream: Stream) -> Block:
        """Return the memory of a tensor, which is new unless it is known."""
        known = self.blocks.get(key(host))
        block = None if known is None else known()
        if block is None:
            block = Block(self, host, stream)
            self.blocks[key(host)] = weakref.ref(block)
            if self.capture is not None:
                self.capture.own(host)
        return block

    def queue(self, kernel: Kernel, stream: Stream) -> None:
        """Queue a kernel that was computed, or record it."""
        if self.capture is not None and stream is self.capture.stream:
            self.capture.record(kernel)
        else:
            self.access(stream, kernel.reads, kernel.writes, kernel.name)

    def access(self, stream: Stream, reads: Sequence[Tensor], writes: Sequence[Tensor], what: str) -> None:
        """Let a kernel of a stream use memory.

        Raises:
            MissingWait: another stream may still use it.
        """
        with self.lock:
            point = stream.launch()
            changed = {key(host) for host in writes}
            try:
                for number in {key(host) for host in reads} - changed:
                    if (block := self._block(number)) is not None:
                        block.read(stream, point, what)
                for number in changed:
                    if (block := self._block(number)) is not None:
                        block.write(stream, point, what)
            except MissingWait as violation:
                raise self.report(violation) from None

    def note(self, stream: Stream) -> None:
        """Count a stream among those that `synchronize` waits for."""
        self._streams.add(stream)

    def call(self, func: Any, args: Sequence[Any], kwargs: Any) -> Any:
        """Carry out a call of torch that involves a device."""
        from tests.simulation.cuda.calls import call

        return call(self, func, args, kwargs)

    def _block(self, number: int) -> Block | None:
        found = self.blocks.get(number)
        return None if found is None else found()

    @contextmanager
    def counted(self) -> Iterator[list[str]]:
        """Yield a list that holds the syncs of the block after its end."""
        before, found = len(self.syncs), list[str]()
        yield found
        found += self.syncs[before:]
