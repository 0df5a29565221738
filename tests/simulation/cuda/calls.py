"""Calls of torch that involve a device: which device computes, what is copied, and where the host waits."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from tests.simulation.cuda import state
from tests.simulation.cuda.errors import AllocationWhileCapturing, MixedDevices, PageableCopy
from tests.simulation.cuda.kernels import Kernels, tensors
from tests.simulation.cuda.memory import key
from tests.simulation.cuda.streams import Stream
from tests.simulation.cuda.tensors import DeviceTensor, place

if TYPE_CHECKING:
    from tests.simulation.cuda.simulation import Simulation

CPU = torch.device("cpu")

Handler = Callable[["Simulation", Any, tuple[Any, ...], dict[str, Any]], Any]


class Calls(TorchFunctionMode):
    """Hands a thread's calls of torch to the simulation."""

    def __init__(self, simulation: Simulation) -> None:
        super().__init__()
        self._simulation = simulation

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        return call(self._simulation, func, args, kwargs or {})


def call(simulation: Simulation, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Carry out a call of torch: on the host alone, or on a device."""
    with torch._C.DisableTorchFunctionSubclass():
        given = dict(kwargs)
        if given.pop("pin_memory", False) or func is Tensor.pin_memory:
            return _pin(simulation, func, tuple(args), given)
        handler = HANDLERS.get(func, _compute)
        if any(map(_is_remote, tensors([args, given]))) or _device_of(given.get("device")).type == "cuda":
            return handler(simulation, func, tuple(args), given)
        if func in MOVES and _parsed(args, given)[0].type == "cuda":
            return handler(simulation, func, tuple(args), given)
        if func is Tensor.copy_ or func is Tensor.is_pinned:
            return handler(simulation, func, tuple(args), given)
        return func(*args, **kwargs)


def _is_remote(value: Any) -> bool:
    return isinstance(value, DeviceTensor)


def _device_of(name: Any) -> torch.device:
    if name is None:
        return CPU
    return torch.device("cuda", name) if isinstance(name, int) else torch.device(name)


def _compute(simulation: Simulation, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Compute on the device of the operands, or on that of the keyword."""
    operands = tensors([args, kwargs])
    wanted = kwargs.get("device")
    kwargs |= {} if wanted is None else {"device": CPU}
    device = _common_device(simulation, func, operands)
    to = simulation.device(wanted) if wanted is not None and _device_of(wanted).type == "cuda" else device
    if wanted is not None and to != device and _device_of(wanted).type == "cpu":
        return func(*_on_host(args), **_on_host(kwargs))
    if func in FROM_HOST:
        _check_pageable(simulation, func)
        simulation.sync(getattr(func, "__name__", str(func)), simulation.current_stream(to).clock)
    return _run(simulation, func, args, kwargs, to)


def _run(
    simulation: Simulation, func: Any, args: Any, kwargs: Any, device: torch.device, stream: Stream | None = None
) -> Any:
    """Run a call's kernels, on a device's current stream or another, and return what came out as tensors there."""
    owner = simulation.current_stream(device)
    remotes = [tensor for tensor in tensors([args, kwargs]) if isinstance(tensor, DeviceTensor)]
    hosts = {id(remote): remote.host for remote in remotes}
    known = {id(hosts[id(remote)]): remote for remote in remotes}

    def placed(host: Tensor) -> Tensor:
        same = known.get(id(host))
        if same is None:
            return place(host, device, simulation.allocate(host, owner))
        if same.shape != host.shape:
            raise NotImplementedError("a tensor changes its own shape, which is not simulated")
        return same

    with Kernels(simulation, stream or owner, owner):
        return _each(func(*_mapped(args, hosts), **_mapped(kwargs, hosts)), placed)


def _mapped(value: Any, hosts: Mapping[int, Tensor]) -> Any:
    return _each(value, lambda tensor: hosts.get(id(tensor), tensor))


def _on_host(value: Any) -> Any:
    return _each(value, lambda tensor: tensor.host if isinstance(tensor, DeviceTensor) else tensor)


def _each(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """Change the tensors in nested containers."""
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(_each(part, change) for part in value))
    if isinstance(value, tuple) and type(value) is not tuple and not isinstance(value, torch.Size):
        return type(value)([_each(part, change) for part in value])  # torch.return_types
    if isinstance(value, tuple) and not isinstance(value, torch.Size):
        return tuple(_each(part, change) for part in value)
    if isinstance(value, list):
        return [_each(part, change) for part in value]
    if isinstance(value, dict):
        return {name: _each(part, change) for name, part in value.items()}
    return value


def _common_device(simulation: Simulation, func: Any, operands: Sequence[Tensor]) -> torch.device:
    """Return the device of all operands.

    Raises:
        MixedDevices: they lie on several, or some of the host's are more than one number.
    """
    devices = {operand.place for operand in operands if isinstance(operand, DeviceTensor)}
    local = [operand for operand in operands if not _is_remote(operand) and operand.dim()]
    if len(devices) > 1 or (devices and local):
        found = sorted(map(str, [*devices, *[CPU][: len(local)]]))
        raise simulation.report(MixedDevices(f"{getattr(func, '__name__', func)} of tensors on {' and '.join(found)}"))
    return next(iter(devices), CPU)


# Copies.


def _move(simulation: Simulation, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Copy to a device or to the host: `to`, `cpu`, `cuda`."""
    tensor, copy = args[0], kwargs.pop("copy", False)
    device, dtype, non_blocking = _parsed(args, kwargs)
    own = tensor.place if _is_remote(tensor) else CPU
    device = own if device.type == "meta" else simulation.device(device)
    options: dict[str, Any] = {"dtype": dtype or tensor.dtype, "copy": copy}
    if device == own:
        return _run(simulation, Tensor.to, (tensor,), options, device)
    if own == CPU:
        _begin_upload(simulation, tensor, non_blocking, device)
        result = _run(simulation, Tensor.to, (tensor,), {**options, "copy": True}, device)
        _end_upload(simulation, tensor, non_blocking, device)
        return result
    if device == CPU:
        with Kernels(simulation, simulation.current_stream(own), None):
            result = tensor.host.to(**{**options, "copy": True})
        _end_download(simulation, result, result, False, own)
        return result
    with _Crossing(simulation, own, device):
        return _run(simulation, Tensor.to, (tensor,), {**options, "copy": True}, device, simulation.current_stream(own))


def _copy(simulation: Simulation, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Copy into a tensor: `copy_`."""
    into, tensor, *rest = args
    non_blocking = kwargs.get("non_blocking", rest[0] if rest else False)
    there, own = (each.place if _is_remote(each) else CPU for each in (into, tensor))
    if there == own:
        return _run(simulation, func, (into, tensor), {}, own) if own != CPU else func(into, tensor)
    if own == CPU:
        _begin_upload(simulation, tensor, non_blocking, there)
        _run(simulation, func, (into, tensor), {}, there)
        _end_upload(simulation, tensor, non_blocking, there)
    elif there == CPU:
        with Kernels(simulation, simulation.current_stream(own), None):
            result = tensor.host.to(into.dtype, copy=True)
        _end_download(simulation, into, result.expand_as(into), non_blocking, own)
    else:
        with _Crossing(simulation, own, there):
            _run(simulation, func, (into, tensor), {}, there, simulation.current_stream(own))
    return into


class _Crossing:
    """A copy from one device to another: each one's current stream waits for the other's, as in torch."""

    def __init__(self, simulation: Simulation, source: torch.device, target: torch.device) -> None:
        self._source, self._target = simulation.current_stream(source), simulation.current_stream(target)

    def __enter__(self) -> None:
        if (simulation := state.active()).capture is not None:
            raise simulation.report(MixedDevices("a captured step uses another device"))
        self._source.wait_stream(self._target)

    def __exit__(self, *_: object) -> None:
        self._target.wait_stream(self._source)


def _begin_upload(simulation: Simulation, tensor: Tensor, non_blocking: bool, device: torch.device) -> None:
    if simulation.transfers.is_pinned(tensor):
        return
    _check_pageable(simulation, "a copy")
    if tensor.dim() or not non_blocking:
        simulation.sync("a copy from pageable memory", simulation.current_stream(device).clock)


def _end_upload(simulation: Simulation, tensor: Tensor, non_blocking: bool, device: torch.device) -> None:
    stream = simulation.current_stream(device)
    if not simulation.transfers.is_pinned(tensor) or simulation.capture is not None:
        return
    if non_blocking:
        simulation.transfers.to_device(stream.last, tensor)
    else:
        simulation.sync("a copy to the device", stream.clock)


def _end_download(
    simulation: Simulation, into: Tensor, result: Tensor, non_blocking: bool, device: torch.device
) -> None:
    stream = simulation.current_stream(device)
    if non_blocking and simulation.transfers.is_pinned(into):
        simulation.transfers.to_host(stream.last, into, result)
        return
    simulation.sync("a copy to the host", stream.clock)
    if into is not result:
        into.copy_(result)


def _check_pageable(simulation: Simulation, what: Any) -> None:
    if simulation.capture is not None:
        raise simulation.report(PageableCopy(f"{getattr(what, '__name__', what)} from pageable memory while capturing"))


def _parsed(args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[torch.device, torch.dtype | None, bool]:
    """Return the device (of type meta for none), type and `non_blocking` of the arguments of `to`, `cpu` or `cuda`."""
    device: torch.device | None = None
    dtype: torch.dtype | None = None
    flags = list[bool]()
    for value in [*args[1:], *(kwargs.get(name) for name in ("device", "dtype", "other"))]:
        if isinstance(value, DeviceTensor):
            device, dtype = value.place, value.dtype
        elif isinstance(value, Tensor):
            device, dtype = value.device, value.dtype
        elif isinstance(value, torch.dtype):
            dtype = value
        elif isinstance(value, bool):
            flags.append(value)
        elif isinstance(value, str | torch.device | int):
            device = _device_of(value)
    return device or torch.device("meta"), dtype, bool(kwargs.get("non_blocking", flags[0] if flags else False))


# Where the host needs numbers.


def _read(simulation: Simulation, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return numbers to the host: `tolist`, `item`, `bool` and the like."""
    stream = simulation.current_stream(args[0].place)
    simulation.access(stream, [args[0].host], [], func.__name__)
    simulation.sync(func.__name__.strip("_"), stream.clock)
    return func(*_on_host(args), **kwargs)


def _refuse(simulation: Simulation, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    raise TypeError("can't convert cuda device type tensor to numpy. Use Tensor.cpu() first")


def _index(simulation: Simulation, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Read or write a part: `tensor[index]`. An index on the host is copied to the device."""
    tensor, index, *values = args
    for part in index if isinstance(index, tuple) else (index,):
        if isinstance(part, list | np.ndarray) or (isinstance(part, Tensor) and not _is_remote(part) and part.dim()):
            _check_pageable(simulation, "an index")
            simulation.sync("an index from the host", simulation.current_stream(tensor.place).clock)
    remote = [operand for operand in tensors([tensor, index, values]) if _is_remote(operand)]
    device = _common_device(simulation, func, [*remote, *tensors(values)])
    return _run(simulation, func, args, kwargs, device)


# What says something about a tensor, and computes nothing.


def _pin(simulation: Simulation, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    if simulation.capture is not None:
        raise simulation.report(AllocationWhileCapturing("pinned memory is allocated while a graph is captured"))
    made: Tensor = args[0].clone() if func is Tensor.pin_memory else func(*args, **kwargs)
    simulation.transfers.pinned[key(made)] = made.untyped_storage()
    return made


def _is_pinned(simulation: Simulation, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    return not _is_remote(args[0]) and simulation.transfers.is_pinned(args[0])


def _iterate(simulation: Simulation, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[Any]:
    return iter(_run(simulation, Tensor.unbind, (args[0], 0), {}, args[0].place))


def _histogram(simulation: Simulation, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Count integers, which torch does on CUDA only."""

    def count(numbers: Tensor, *others: Any, **named: Any) -> Tensor:
        return torch.histc(numbers.double(), *others, **named).to(numbers.dtype)

    return _run(simulation, count, args, kwargs, args[0].place)


def _assign(simulation: Simulation, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    raise NotImplementedError("the memory of a tensor is replaced (`.data = ...`), which is not simulated")


MOVES = {Tensor.to, Tensor.cuda, Tensor.cpu}
FROM_HOST = {torch.tensor, torch.as_tensor, torch.from_numpy, Tensor.new_tensor}
READS = (
    Tensor.tolist, Tensor.item, Tensor.__bool__, Tensor.__int__, Tensor.__float__, Tensor.__index__, Tensor.__contains__
)  # fmt: skip
HANDLERS: dict[Any, Handler] = {
    Tensor.to: _move,
    Tensor.cpu: lambda simulation, func, args, kwargs: _move(simulation, func, (*args, "cpu"), kwargs),
    Tensor.cuda: lambda simulation, func, args, kwargs: _move(simulation, func, (*args, "cuda")[:2], kwargs),
    Tensor.copy_: _copy,
    **dict.fromkeys(READS, _read),
    Tensor.numpy: _refuse,
    Tensor.__array__: _refuse,
    Tensor.__getitem__: _index,
    Tensor.__setitem__: _index,
    Tensor.is_pinned: _is_pinned,
    torch.histc: _histogram,
    Tensor.__iter__: _iterate,
    Tensor.data.__set__: _assign,  # type: ignore[attr-defined]
    Tensor.__hash__: lambda simulation, func, args, kwargs: id(args[0]),
}
