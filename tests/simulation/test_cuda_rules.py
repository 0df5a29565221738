"""The simulated devices: what they compute, and what they refuse. Milliseconds each."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.simulation import cuda
from tests.simulation.cuda import Simulation, Violation, simulated_cuda

FIRST, SECOND = (torch.device("cuda", index) for index in range(2))


@pytest.fixture
def devices() -> Iterator[Simulation]:
    """Two devices; each test checks the violations itself."""
    with simulated_cuda(check=False) as simulation:
        yield simulation


def captured(step: Callable[[], Any], pool: Any = None) -> tuple[Any, Any]:
    """Capture a step; return its graph and its result."""
    stream, recorded = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.inference_mode(), torch.cuda.graph(recorded, pool=pool, stream=stream):
        result = step()
    return recorded, result


def kinds(simulation: Simulation) -> list[type[Violation]]:
    return [type(violation) for violation in simulation.violations]


def test_tensors_have_a_device_and_compute(devices: Simulation) -> None:
    there = torch.arange(6, device="cuda:1").view(2, 3)
    assert there.device == SECOND and there.is_cuda and not there.is_cpu
    values, places = (there.float() @ there.float().T).max(dim=-1)
    assert values.device == places.device == SECOND
    assert (values.tolist(), places.cpu().tolist()) == ([14.0, 50.0], [1, 1])
    assert devices.syncs == ["tolist", "a copy to the host"] and not devices.violations
    with pytest.raises(TypeError, match="cuda device type"):
        there.numpy()


@pytest.mark.parametrize(
    ("read", "reason"),
    [
        (lambda x: x[0].item(), "item"),
        (lambda x: bool(x.sum() > 0), "bool"),
        (lambda x: x.nonzero(), "nonzero"),
        (lambda x: x[x > 1], "index"),
        (lambda x: x[[0, 1]], "an index from the host"),
        (lambda x: x.tolist(), "tolist"),
        (lambda x: x + torch.tensor([1, 1, 1], device="cuda"), "tensor"),
        (lambda x: x.copy_(torch.ones(3)), "a copy from pageable memory"),
    ],
)
def test_what_makes_the_host_wait_is_counted(devices: Simulation, read: Callable[[Tensor], Any], reason: str) -> None:
    numbers = torch.arange(3, device="cuda")
    with devices.counted() as syncs:
        read(numbers)
    assert syncs == [reason]


def test_operands_of_two_devices(devices: Simulation) -> None:
    here, there = torch.ones(3, device="cuda:0"), torch.ones(3, device="cuda:1")
    for other in (there, torch.ones(3)):
        with pytest.raises(cuda.MixedDevices):
            here + other
    assert (here + torch.tensor(2.0)).tolist() == [3.0] * 3, "one number of the host may take part"
    assert (here + there.to("cuda:0")).tolist() == [2.0] * 3


def test_work_on_another_stream_waits(devices: Simulation) -> None:
    side, numbers = torch.cuda.Stream(), torch.ones(3, device="cuda")
    with pytest.raises(cuda.MissingWait, match="may still write"), torch.cuda.stream(side):
        numbers.sum()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        total = numbers.sum()
    with pytest.raises(cuda.MissingWait, match="may still use"):
        numbers.zero_()
    event = torch.cuda.Event()
    event.record(side)
    event.synchronize()
    numbers.zero_()
    assert total.item() == 3.0 and kinds(devices) == [cuda.MissingWait] * 2


@pytest.mark.parametrize("mended", [False, True])
def test_memory_that_is_freed_while_another_stream_uses_it(devices: Simulation, mended: bool) -> None:
    side, numbers = torch.cuda.Stream(), torch.ones(3, device="cuda")
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        total = numbers.sum()
    if mended:
        numbers.record_stream(side)
    del numbers
    assert kinds(devices) == [cuda.EarlyFree] * (not mended) and total.device == FIRST


def test_pinned_memory_is_left_alone_until_its_copy_has_ended(devices: Simulation) -> None:
    pinned, there, event = torch.zeros(3, pin_memory=True), torch.empty(3, device="cuda"), torch.cuda.Event()
    for number in (1, 2):
        event.synchronize()
        pinned.numpy()[:] = number
        there.copy_(pinned, non_blocking=True)
        event.record()
    pinned.numpy()[:] = 3
    with pytest.raises(cuda.EarlyRefill):
        there.copy_(pinned, non_blocking=True)


def test_a_copy_to_pinned_memory_is_there_when_the_host_has_waited(devices: Simulation) -> None:
    pinned, there = torch.zeros(3, pin_memory=True), torch.ones(3, device="cuda")
    pinned.copy_(there, non_blocking=True)
    assert pinned.isnan().all()
    torch.cuda.current_stream().synchronize()
    assert pinned.tolist() == [1.0] * 3


def test_new_memory_holds_nothing(devices: Simulation) -> None:
    assert torch.empty(3, device="cuda").isnan().all()


def test_a_replay_reads_the_same_memory_again(devices: Simulation) -> None:
    """And a capture computes nothing; a number of the host stays what it was."""
    numbers, factor = torch.ones(3, device="cuda"), 2
    recorded, result = captured(lambda: numbers.add_(1) * factor)
    factor = 5
    assert numbers.tolist() == [1.0] * 3 and result.isnan().all()
    for wanted in (4.0, 6.0):
        recorded.replay()
        assert result.tolist() == [wanted] * 3
    numbers.zero_()
    recorded.replay()
    assert result.tolist() == [2.0] * 3 and factor == 5 and not devices.violations


@pytest.mark.parametrize(
    ("step", "kind"),
    [
        (lambda x: x.sum().item(), cuda.SyncWhileCapturing),
        (lambda x: x.nonzero(), cuda.SyncWhileCapturing),
        (lambda x: torch.cuda.current_stream().synchronize(), cuda.SyncWhileCapturing),
        (lambda x: x + torch.tensor([1.0, 2.0, 3.0], device="cuda"), cuda.PageableCopy),
        (lambda x: x[[0, 2]], cuda.PageableCopy),
        (lambda x: x.copy_(torch.ones(3), non_blocking=True), cuda.PageableCopy),
        (lambda x: x.resize_(300), cuda.AllocationWhileCapturing),
        (lambda x: torch.zeros(3, pin_memory=True), cuda.AllocationWhileCapturing),
    ],
)
def test_what_a_captured_step_must_not_do(
    devices: Simulation, step: Callable[[Tensor], Any], kind: type[Violation]
) -> None:
    numbers = torch.ones(3, device="cuda")
    with pytest.raises(kind):
        captured(lambda: step(numbers))


def test_a_buffer_that_grew_after_the_capture(devices: Simulation) -> None:
    kept = {"buffer": torch.zeros(3, device="cuda")}

    def step() -> None:
        kept["buffer"].add_(1)

    recorded, _ = captured(step)
    recorded.replay()
    kept["buffer"] = torch.cat([kept["buffer"], kept["buffer"]])
    with pytest.raises(cuda.UseAfterFree):
        recorded.replay()


def test_graphs_that_share_memory_overwrite_each_other(devices: Simulation) -> None:
    numbers = torch.ones(3, device="cuda")
    first, result = captured(lambda: numbers + 1)
    second, _ = captured(lambda: numbers + 2, pool=first.pool())
    first.replay()
    assert result.tolist() == [2.0] * 3
    second.replay()
    assert result.isnan().all()


def test_a_replay_waits_as_a_kernel_does(devices: Simulation) -> None:
    numbers, side = torch.ones(3, device="cuda"), torch.cuda.Stream()
    recorded, _ = captured(lambda: numbers * 2)
    numbers.zero_()
    with pytest.raises(cuda.MissingWait), torch.cuda.stream(side):
        recorded.replay()


def test_a_violation_that_somebody_caught_is_raised_at_the_end() -> None:
    with pytest.raises(cuda.MixedDevices), simulated_cuda(), pytest.raises(cuda.MixedDevices):
        torch.ones(3, device="cuda:0") + torch.ones(3, device="cuda:1")
