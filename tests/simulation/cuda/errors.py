"""What would be wrong, or refused, on a GPU."""

from __future__ import annotations


class Violation(RuntimeError):
    """A use of CUDA that a GPU refuses, or that computes wrong numbers there at times."""


class MixedDevices(Violation):
    """The operands of a kernel lie on different devices."""


class SyncWhileCapturing(Violation):
    """The host waits for the device while a graph is captured."""


class PageableCopy(Violation):
    """A captured step copies from memory that is not pinned."""


class AllocationWhileCapturing(Violation):
    """A captured step grows a buffer, or allocates pinned memory."""


class MissingWait(Violation):
    """A kernel uses memory that another stream may still write, or writes what another may still read."""


class EarlyFree(Violation):
    """Memory goes back to its stream while another stream may still use it."""


class UseAfterFree(Violation):
    """A replayed graph uses memory that was freed since its capture."""


class EarlyRefill(Violation):
    """Pinned memory was written before the copy from it had ended."""
