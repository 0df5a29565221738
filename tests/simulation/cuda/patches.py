"""Puts the simulated devices in the place of `torch.cuda` for a while."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch

from tests.simulation.cuda.calls import Calls
from tests.simulation.cuda.children import shared_with_children, take_violations
from tests.simulation.cuda.errors import Violation
from tests.simulation.cuda.graphs import CUDAGraph, graph
from tests.simulation.cuda.simulation import Simulation
from tests.simulation.cuda.state import activated
from tests.simulation.cuda.streams import Event, Stream, StreamContext

MEMORY = 1 << 34
"""Bytes of each device, of which all are reported as free."""


@contextmanager
def simulated_cuda(num_devices: int = 2, *, check: bool = True, prepare: str = "") -> Iterator[Simulation]:
    """Let `torch.cuda` be simulated devices, in this thread, in those that it starts, and in child processes.

    Each process has devices of its own; violations of children are found at the end.

    Args:
        num_devices: number of devices.
        check: raise the first violation at the end, whether or not it was caught.
        prepare: "module:function", called first in each child process; "" for nothing.
    """
    with shared_with_children(num_devices, prepare):
        simulation = Simulation(num_devices)
        with patched(simulation):
            yield simulation
            with suppress(Violation):  # which is recorded
                for index in range(num_devices):
                    simulation.synchronize(index)
        simulation.violations += take_violations()
    if check and simulation.violations:
        raise simulation.violations[0]


@contextmanager
def patched(simulation: Simulation) -> Iterator[None]:
    """Put a simulation in the place of `torch.cuda`, in this thread and in those that it starts."""
    with ExitStack() as stack:
        stack.enter_context(activated(simulation))
        for name, fake in _members(simulation).items():
            stack.enter_context(mock.patch.object(torch.cuda, name, fake))
        stack.enter_context(mock.patch.object(threading.Thread, "run", _joined(simulation, threading.Thread.run)))
        stack.enter_context(Calls(simulation))
        yield


def _joined(simulation: Simulation, run: Any) -> Any:
    """Return the `run` of threads that take part in the simulation."""

    def joined(thread: threading.Thread) -> None:
        with Calls(simulation):
            run(thread)

    return joined


def _members(simulation: Simulation) -> dict[str, Any]:
    properties = SimpleNamespace(total_memory=MEMORY, name="simulated", major=9, minor=0, multi_processor_count=1)

    def set_device(device: Any) -> None:
        simulation.current_device = simulation.device(device)

    return {
        "_lazy_init": lambda: None,
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "device_count": lambda: simulation.num_devices,
        "current_device": lambda: simulation.current_device.index,
        "set_device": set_device,
        "get_device_name": lambda device=None: "simulated",
        "get_device_capability": lambda device=None: (properties.major, properties.minor),
        "get_device_properties": lambda device=None: properties,
        "mem_get_info": lambda device=None: (MEMORY, MEMORY),
        "memory_reserved": lambda device=None: 0,
        "memory_allocated": lambda device=None: 0,
        "empty_cache": lambda: None,
        "Stream": Stream,
        "Event": Event,
        "stream": StreamContext,
        "current_stream": simulation.current_stream,
        "default_stream": simulation.default_stream,
        "set_stream": simulation.set_stream,
        "synchronize": simulation.synchronize,
        "CUDAGraph": CUDAGraph,
        "graph": graph,
    }
