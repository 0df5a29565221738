"""Kernels: the operations of torch that one call queues on a stream, and what they read and write."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from tests.simulation.cuda.errors import AllocationWhileCapturing
from tests.simulation.cuda.memory import Block, key, poison
from tests.simulation.cuda.streams import Stream

if TYPE_CHECKING:
    from tests.simulation.cuda.simulation import Simulation

WAITING = {
    "_local_scalar_dense", "item", "nonzero", "masked_select", "_unique", "_unique2", "unique_dim", "equal",
    "is_nonzero", "bincount",
}  # fmt: skip
"""Operations whose result the host needs: its value, or its shape."""

INDEXING = {"index", "index_put", "index_put_", "_index_put_impl_"}
EMPTY = {"empty", "empty_like", "empty_strided", "empty_permuted", "new_empty", "new_empty_strided"}


@dataclass(frozen=True, slots=True, eq=False)
class Kernel:
    """An operation, with what it was given and what came out."""

    func: Any
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    results: Any
    reads: Sequence[Tensor]
    writes: Sequence[Tensor]

    @property
    def name(self) -> str:
        """Name of the operation."""
        return str(self.func)

    def run(self) -> None:
        """Compute again, from what its operands hold now."""
        again = self.func(*self.args, **self.kwargs)
        for old, new in zip(tensors(self.results), tensors(again), strict=True):
            if key(old) != key(new):
                old.copy_(new)


class Kernels(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Queues the operations of one call on a stream.

    Args:
        simulation: of the devices.
        stream: of the operations.
        owner: the stream for which memory of results is allocated; None if that is the host's.
    """

    def __init__(self, simulation: Simulation, stream: Stream, owner: Stream | None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._simulation, self._stream, self._owner = simulation, stream, owner
        self._made: list[Block] = []  # temporary memory of the call lives as long as the call

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs, name, simulation = kwargs or {}, func._schema.name.removeprefix("aten::"), self._simulation
        if name in WAITING or (name in INDEXING and any(t.dtype == torch.bool for t in tensors(args[1]))):
            simulation.sync(name, self._stream.clock)
        capture = simulation.capture
        if capture is not None and name == "resize_":
            raise simulation.report(AllocationWhileCapturing("a buffer grows while a graph is captured"))
        operands = [*tensors(args), *tensors(kwargs)]
        writes = _written(func, args, kwargs)
        if capture is not None:
            capture.save(writes)
        results = func(*args, **kwargs)
        known = {key(operand) for operand in operands}
        made = [result for result in tensors(results) if key(result) not in known]
        if self._owner is not None:
            self._made += [simulation.allocate(result, self._owner) for result in made]
        if name in EMPTY:
            for result in made:
                poison(result.untyped_storage())
        elif made or writes:  # else the results are views
            rewritten = {id(tensor) for tensor in writes}
            reads = [operand for operand in operands if id(operand) not in rewritten]
            simulation.queue(Kernel(func, args, kwargs, results, reads, [*writes, *made]), self._stream)
        return results


def _written(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Tensor]:
    """Return the operands that an operation changes."""
    arguments = func._schema.arguments
    changed = {each.name for each in arguments if each.alias_info is not None and each.alias_info.is_write}
    if not changed:
        return []
    named = [*zip((argument.name for argument in arguments), args), *kwargs.items()]  # noqa: B905
    return [tensor for name, value in named if name in changed for tensor in tensors(value)]


def tensors(value: Any) -> list[Tensor]:
    """Return the tensors in nested containers."""
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, dict):
        value = value.values()
    elif not isinstance(value, list | tuple):
        return []
    found: list[Tensor] = []
    for part in value:
        if isinstance(part, Tensor):
            found.append(part)
        elif isinstance(part, list | tuple | dict):
            found += tensors(part)
    return found
