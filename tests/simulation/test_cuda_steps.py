"""Steps of a model on simulated devices, eager and captured: the CPU's logits, few syncs, and planted faults.

A capture of this model's four steps takes half a second, the other tests less; the first imports torch's compiler.
"""

from __future__ import annotations

import gc
import logging
import random
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor

from langchain_card.config import EngineConfig
from langchain_card.core.request import SamplingParams
from langchain_card.models import loader
from langchain_card.models.loader import load_model, resolve
from langchain_card.runtime import sampling
from langchain_card.runtime.grid_attention import Bucket, MaskedPlan, StepInputs
from langchain_card.runtime.guide import Guide
from langchain_card.runtime.rows import Rows
from langchain_card.runtime.runner import ModelRunner
from langchain_card.runtime.sampling import Sampler, choose, gumbel_noise
from langchain_card.runtime.transfer import to_device
from tests.simulation import cuda
from tests.simulation.cuda import Violation, simulated_cuda
from tests.simulation.cuda.state import active
from tests.support import tiny

pytestmark = pytest.mark.usefixtures("one_thread")

DEVICES = ("cuda:0", "cuda:1", "cuda:0,cuda:1")
Plan = Callable[..., MaskedPlan]
plan: Plan = MaskedPlan.of


class OnlyEven:
    """A grammar of even tokens."""

    def fork(self) -> OnlyEven:
        return self

    def accept(self, token_id: int) -> bool:
        return True

    def allowed(self) -> bytes:
        return b"\x55" * 25

    def closing(self, max_tokens: int) -> None:
        return None


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return tiny.make_target("mistral", tmp_path_factory.mktemp("model"))  # with a sliding window


@pytest.fixture(scope="module")
def wanted(model: str) -> list[Tensor]:
    return play(runner(model, "cpu"))


def runner(model: str, device: str, execution: str = "eager", width: int | None = None) -> ModelRunner:
    spec = resolve(EngineConfig(model, None, dtype="float64", max_model_len=256, device=device)).target
    return ModelRunner(load_model(spec), max_len=256, num_scratch=4, num_seqs=2, execution=execution, width=width)


def play(runner: ModelRunner, rounds: int = 6, read: Callable[[Tensor], Any] = Tensor.cpu) -> list[Any]:
    """Read two texts, then verify random chains of one or both sequences and keep a part of each."""
    rng, caches, found = random.Random(4), [runner.open(), runner.open()], []
    runner.step(
        [Rows(cache, [rng.randrange(256) for _ in range(n)], 0) for cache, n in zip(caches, (70, 9), strict=True)]
    )
    for _ in range(rounds):
        batch = []
        for cache in rng.sample(caches, rng.randint(1, 2)):
            slots = rng.sample(range(4), rng.randint(1, 4))
            paths = [tuple(slots[: i + 1]) for i in range(len(slots))]
            batch.append(Rows(cache, [rng.randrange(256) for _ in slots], cache.length, paths))
        found.append(read(runner.step(batch)))
        for rows in batch:
            kept = rng.randint(1, len(rows.token_ids))
            assert rows.paths is not None
            rows.cache.keep(rows.paths[kept - 1], rows.token_ids[:kept])
    return found


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("execution", ["eager", "graphs"])
def test_logits_are_those_of_a_cpu(model: str, wanted: list[Tensor], device: str, execution: str) -> None:
    with simulated_cuda():
        made = runner(model, device, execution)
        assert len(made._grids._captured) == (4 if execution == "graphs" and "," not in device else 0)
        torch.testing.assert_close(play(made), wanted, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("execution", ["eager", "graphs"])
def test_a_runner_of_a_thread_with_streams_of_its_own(
    model: str, wanted: list[Tensor], device: str, execution: str
) -> None:
    """Another thread runs it, and waits for weights and KV that were written on those streams."""
    with simulated_cuda(), ThreadPoolExecutor(1) as thread:
        for index in (1, 0):
            torch.cuda.set_stream(torch.cuda.Stream(index))
        found = thread.submit(play, runner(model, device, execution)).result()
        torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)


def test_a_first_device_that_has_no_layer(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Inputs of steps lie on the second device, and their copies end there."""
    place = loader.device_map
    monkeypatch.setattr(
        loader, "device_map", lambda spec: {name: spec.devices[".layers." in name] for name in place(spec)}
    )
    with simulated_cuda():
        made = runner(model, "cuda:0,cuda:1")
        assert made.device.index == 0 and {layer.device.index for layer in made.pool.kv.layers} == {1}
        for _ in made.follow(made.open(), [*range(40)]):
            pass


@pytest.mark.parametrize("execution", ["eager", "graphs"])
def test_a_greedy_round_reads_its_tokens_and_waits_for_nothing_else(model: str, execution: str) -> None:
    """Whatever the number of sequences, with what they keep."""

    def read(logits: Tensor) -> list[str]:
        choose([logits[:1], logits[1:]] if len(logits) > 1 else [logits])
        return [*simulation.syncs]

    with simulated_cuda() as simulation:
        made = runner(model, "cuda:0", execution)
        rounds = play(made, rounds=2, read=read)
        before = len(rounds[-1])
        made.pool.forget()
        rounds = play(made, rounds=8, read=read)
    assert rounds[-1][before:] == ["tolist"] * 8


@pytest.mark.parametrize("execution", ["eager", "graphs"])
def test_a_caller_keeps_its_stream(model: str, wanted: list[Tensor], execution: str) -> None:
    """Several threads may use a runner in turn: its steps are in order, and each thread's own work is in order."""
    found: list[list[Tensor]] = []

    def use() -> None:
        own = torch.cuda.Stream()
        with torch.cuda.stream(own):
            with made.on_stream():
                made.pool.forget()
                found.append(play(made, read=Tensor.exp))
            assert torch.cuda.current_stream() == own

    with simulated_cuda():
        made = runner(model, "cuda:0", execution)
        for _ in range(2):
            use()
            thread = threading.Thread(target=use)
            thread.start()
            thread.join()
        assert torch.cuda.current_stream() == torch.cuda.default_stream()
        torch.cuda.synchronize()
        for each in found:
            torch.testing.assert_close([logits.cpu() for logits in each], [*map(Tensor.exp, wanted)])


def test_a_failed_step_leaves_nothing_that_is_still_read(model: str) -> None:
    """Its caller frees the weights at once."""
    with simulated_cuda():
        made = runner(model, "cuda:0")
        with pytest.raises(torch.OutOfMemoryError, match="planted"), made.on_stream():
            made.step([Rows(made.open(), [1, 2, 3], 0)])
            raise torch.OutOfMemoryError("planted")
        del made
        gc.collect()


def test_processors_read_nothing_from_the_device() -> None:
    """Penalties, bias, a grammar's mask, bans, truncation and noise of a window: one read back, of the tokens."""
    params = SamplingParams(
        temperature=0.9, top_k=40, top_p=0.9, min_p=0.01, seed=3, repetition_penalty=1.2, presence_penalty=0.1,
        logit_bias=((7, 1.5),), banned_ids=(3, 5),
    )  # fmt: skip
    logits, paths = torch.randn(3, 200, generator=torch.Generator().manual_seed(0)), [(), (9,), (9, 11)]

    def tokens(device: str) -> list[int]:
        guide = Guide(OnlyEven(), (0,))
        there = to_device(logits, torch.device(device))
        return choose([Sampler(params, [1, 2, 2], guide).scores(there, paths)])

    wanted = tokens("cpu")
    with simulated_cuda() as simulation:
        assert tokens("cuda:1") == wanted
        assert simulation.syncs == ["tolist"]


def test_noise_needs_no_sync_and_is_not_freed_while_it_is_read() -> None:
    """Each stream has noise of its own, the same numbers."""
    wanted = gumbel_noise(7, 3, 50, torch.device("cpu"))
    with simulated_cuda() as simulation:
        device, streams = torch.device("cuda", 0), [torch.cuda.Stream(), torch.cuda.Stream()]
        used = []
        for stream in streams:
            with torch.cuda.stream(stream):
                used.append(torch.ones(50, device=device, dtype=torch.float64) * gumbel_noise(7, 3, 50, device))
        sampling._noise.cache_clear()
        assert not simulation.syncs
        torch.cuda.synchronize()
        torch.testing.assert_close([row.cpu() for row in used], [wanted, wanted], rtol=0, atol=0)


def test_memory_runs_out_during_one_capture(
    model: str, wanted: list[Tensor], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The largest step runs eagerly, all others from their graphs."""

    def scarce(inputs: StepInputs, pool: Any, bucket: Bucket, window: int | None) -> MaskedPlan:
        if bucket.seqs * bucket.width == 32 and not made:
            raise torch.OutOfMemoryError("planted")
        return plan(inputs, pool, bucket, window)

    monkeypatch.setattr(MaskedPlan, "of", staticmethod(scarce))
    made: list[ModelRunner] = []
    with simulated_cuda(), caplog.at_level(logging.WARNING):
        made.append(runner(model, "cuda:0", "graphs"))
        assert len(made[0]._grids._captured) == 3 and "planted" in caplog.text
        torch.testing.assert_close(play(made[0]), wanted, rtol=1e-12, atol=1e-12)


def test_texts_longer_than_a_grid_answer_in_the_order_of_the_batch(model: str) -> None:
    """Replays of one captured step: what the first has computed is gone after the second."""
    texts = [[5] * 11, [*range(7)], [9] * 3]

    def last(runner: ModelRunner, order: Sequence[int]) -> list[float]:
        runner.pool.forget()
        caches = {n: runner.open() for n in order}
        logits = runner.step([Rows(caches[n], texts[n], 0, ask=True) for n in order])
        return logits[:, 0].tolist()

    with simulated_cuda():
        grid, free = runner(model, "cuda:0", "graphs", width=4), runner(model, "cuda:0")
        for order in ((0, 1), (1, 0), (2, 0), (0, 2)):
            assert last(grid, order) == pytest.approx(last(free, order), rel=1e-12)


@pytest.mark.parametrize("max_len", [256, 250])
def test_rows_see_a_number_of_keys_that_fast_kernels_take(model: str, max_len: int) -> None:
    spec = resolve(EngineConfig(model, None, dtype="float64", max_model_len=max_len)).target
    made = ModelRunner(load_model(spec), max_len=max_len, num_scratch=5, num_seqs=1, execution="eager")
    assert (made.pool.num_scratch % 8, made.pool.max_len % 8) == (0, 0) and made.pool.max_len >= max_len


# Planted faults.


def baked(inputs: StepInputs, pool: Any, bucket: Any, window: Any) -> MaskedPlan:
    """The host's own number decides what a captured step computes."""
    made, first = plan(inputs, pool, bucket, window), int(inputs._numbers[2].min())
    seen = {device: each._replace(places=each.places.clamp(min=first)) for device, each in made.seen.items()}
    return MaskedPlan(made.pool, made.bucket, seen)


def item(inputs: StepInputs, *rest: Any) -> MaskedPlan:
    inputs.numbers.sum().item()
    return plan(inputs, *rest)


def nonzero(inputs: StepInputs, *rest: Any) -> MaskedPlan:
    inputs.numbers.nonzero()
    return plan(inputs, *rest)


def pageable(inputs: StepInputs, *rest: Any) -> MaskedPlan:
    inputs.numbers.add_(torch.zeros(inputs.numbers.shape, dtype=torch.int64).to("cuda:0"))
    return plan(inputs, *rest)


def growing(inputs: StepInputs, *rest: Any) -> MaskedPlan:
    if active().capture is not None:
        inputs.no_mask.resize_(1, 1, 1, 9)
    return plan(inputs, *rest)


def elsewhere(inputs: StepInputs, *rest: Any) -> MaskedPlan:
    made = plan(inputs, *rest)
    seen = {device: each._replace(places=each.places.to("cuda:1")) for device, each in made.seen.items()}
    return MaskedPlan(made.pool, made.bucket, seen)


@pytest.mark.parametrize(
    ("fault", "kind"),
    [
        (item, cuda.SyncWhileCapturing),
        (nonzero, cuda.SyncWhileCapturing),
        (pageable, cuda.PageableCopy),
        (growing, cuda.AllocationWhileCapturing),
        (elsewhere, cuda.MixedDevices),
    ],
)
def test_a_fault_in_a_captured_step(
    model: str, fault: Plan, kind: type[Violation], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(MaskedPlan, "of", staticmethod(fault))
    with pytest.raises(kind), simulated_cuda():
        runner(model, "cuda:0", "graphs")


def test_a_number_of_the_host_in_a_captured_step(
    model: str, wanted: list[Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(MaskedPlan, "of", staticmethod(baked))
    with simulated_cuda():
        found = play(runner(model, "cuda:0", "graphs"))
        with pytest.raises(AssertionError, match="not close"):
            torch.testing.assert_close(found, wanted, rtol=1e-3, atol=1e-3)


def test_a_buffer_that_is_allocated_again_after_its_capture(model: str) -> None:
    with simulated_cuda(check=False):
        made = runner(model, "cuda:0", "graphs")
        for captured in made._grids._captured.values():
            captured.inputs.trees = torch.zeros_like(captured.inputs.trees)
        with pytest.raises(cuda.UseAfterFree):
            play(made)


def test_inputs_that_are_refilled_before_their_copy_has_ended(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with simulated_cuda(check=False) as simulation:
        made = runner(model, "cuda:0", "graphs", width=4)
        made.prefill(made.open(), [*range(40)])
        assert not simulation.violations
        monkeypatch.setattr(torch.cuda.Event, "synchronize", lambda event: None)
        with pytest.raises(cuda.EarlyRefill):
            made.prefill(made.open(), [*range(100, 140)])


def test_a_copy_of_kept_rows_on_another_stream(model: str) -> None:
    with simulated_cuda(check=False):
        made = runner(model, "cuda:0")
        cache = made.open()
        made.step([Rows(cache, [3, 5], 0, [(2,), (2, 1)])])
        with pytest.raises(cuda.MissingWait), torch.cuda.stream(torch.cuda.Stream()):
            cache.keep((2, 1), (3, 5))


def test_noise_that_streams_share(monkeypatch: pytest.MonkeyPatch) -> None:
    noise = sampling._noise
    monkeypatch.setattr(sampling, "_noise", lambda *key: noise(*key[:-1], 0))
    with simulated_cuda(check=False) as simulation:
        device = torch.device("cuda", 0)
        gumbel_noise(7, 3, 50, device)
        torch.cuda.synchronize()
        with torch.cuda.stream(torch.cuda.Stream()):
            gumbel_noise(7, 3, 50, device).exp()
        noise.cache_clear()
        assert [type(violation) for violation in simulation.violations] == [cuda.EarlyFree]


def test_logits_that_are_read_after_the_next_run(model: str) -> None:
    """A captured step's logits are a view, valid until the next."""
    with simulated_cuda():
        made = runner(model, "cuda:0", "graphs")
        cache = made.open()
        kept = [made.step([Rows(cache, [token], 0, [(0,)])]) for token in (3, 5)]
        copied = [made.step([Rows(cache, [token], 0, [(0,)])]).clone() for token in (3, 5)]
        assert torch.equal(kept[0], kept[1]) and not torch.equal(copied[0], copied[1])
