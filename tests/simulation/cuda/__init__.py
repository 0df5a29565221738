"""CUDA devices simulated on the CPU: real numbers, and every missing wait, mixed device and early free an error."""

from __future__ import annotations

from tests.simulation.cuda.errors import (
    AllocationWhileCapturing,
    EarlyFree,
    EarlyRefill,
    MissingWait,
    MixedDevices,
    PageableCopy,
    SyncWhileCapturing,
    UseAfterFree,
    Violation,
)
from tests.simulation.cuda.patches import simulated_cuda
from tests.simulation.cuda.simulation import Simulation

__all__ = [
    "AllocationWhileCapturing",
    "EarlyFree",
    "EarlyRefill",
    "MissingWait",
    "MixedDevices",
    "PageableCopy",
    "Simulation",
    "SyncWhileCapturing",
    "UseAfterFree",
    "Violation",
    "simulated_cuda",
]
