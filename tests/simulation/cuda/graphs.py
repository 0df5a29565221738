"""Graphs: kernels that are recorded once and run again over what the same memory holds."""

from __future__ import annotations

import weakref
from types import TracebackType
from typing import Any

import torch
from torch import Tensor

from tests.simulation.cuda import state
from tests.simulation.cuda.errors import UseAfterFree
from tests.simulation.cuda.kernels import Kernel
from tests.simulation.cuda.memory import Block, key, poison
from tests.simulation.cuda.streams import Stream, StreamContext


class Pool:
    """Memory that graphs share: a replay overwrites what the others have computed."""

    def __init__(self) -> None:
        self._last: weakref.ref[CUDAGraph] | None = None

    def lend(self, graph: CUDAGraph) -> None:
        """Give the memory to a graph that is about to run."""
        last = None if self._last is None else self._last()
        if last is not None and last is not graph:
            for storage in last.own.values():
                poison(storage)
        self._last = weakref.ref(graph)


class CUDAGraph:
    """The kernels of a captured step.

    Attributes:
        kernels: in order, with the numbers that the host gave them.
        own: memory that was allocated for the graph, by its key.
    """

    def __init__(self) -> None:
        self.kernels: list[Kernel] = []
        self.own: dict[int, torch.UntypedStorage] = {}
        self._outside: dict[int, weakref.ref[Block]] = {}
        self._pool = Pool()

    def pool(self) -> Pool:
        """Return the memory of the graph, for others."""
        return self._pool

    def replay(self) -> None:
        """Run the kernels on the current stream.

        Raises:
            UseAfterFree: memory that the step uses was freed.
            MissingWait: another stream may still use it.
        """
        simulation = state.active()
        blocks = {number: block() for number, block in self._outside.items()}
        if None in blocks.values():
            raise simulation.report(UseAfterFree("a graph uses memory that was freed after its capture"))
        self._pool.lend(self)
        reads = [tensor for kernel in self.kernels for tensor in kernel.reads]
        writes = [tensor for kernel in self.kernels for tensor in kernel.writes]
        simulation.access(simulation.current_stream(), reads, writes, "a graph")
        with torch.inference_mode():
            for kernel in self.kernels:
                kernel.run()


class Capture:
    """What a thread records instead of running it.

    Args:
        graph: takes the kernels.
        stream: whose work is recorded.
    """

    def __init__(self, graph: CUDAGraph, stream: Stream) -> None:
        self.graph, self.stream = graph, stream
        self._saved: dict[int, tuple[torch.UntypedStorage, torch.UntypedStorage]] = {}

    def own(self, host: Tensor) -> None:
        """Note memory that was allocated for the graph."""
        self.graph.own[key(host)] = host.untyped_storage()

    def save(self, hosts: list[Tensor]) -> None:
        """Keep what memory outside the graph holds before it is written."""
        for host in hosts:
            if key(host) not in self._saved and key(host) not in self.graph.own:
                self._saved[key(host)] = host.untyped_storage(), host.untyped_storage().clone()  # type: ignore[no-untyped-call]

    def record(self, kernel: Kernel) -> None:
        """Append a kernel."""
        self.graph.kernels.append(kernel)
        for host in (*kernel.reads, *kernel.writes):
            block = state.active().blocks.get(key(host))
            if key(host) not in self.graph.own and block is not None:
                self.graph._outside[key(host)] = block

    def end(self) -> None:
        """Undo what was computed: a captured step has not run yet."""
        for storage, before in self._saved.values():
            storage.copy_(before)
        for storage in self.graph.own.values():
            poison(storage)


class graph:
    """A block whose work on a stream is captured (`torch.cuda.graph`)."""

    def __init__(
        self, cuda_graph: CUDAGraph, pool: Pool | None = None, stream: Stream | None = None, **options: Any
    ) -> None:
        self._graph, self._stream = cuda_graph, stream or Stream()
        cuda_graph._pool = pool or cuda_graph._pool
        self._context = StreamContext(self._stream)

    def __enter__(self) -> None:
        simulation = state.active()
        simulation.synchronize()
        self._context.__enter__()
        simulation.capture = Capture(self._graph, self._stream)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        simulation = state.active()
        capture, simulation.capture = simulation.capture, None
        assert capture is not None
        capture.end()
        self._context.__exit__(kind, error, at)
