"""The device of a draft beside a target on the only GPU: that GPU, or the CPU, whichever makes answers faster.

On the GPU, the steps of a draft are short, and draft and target take turns. On the CPU they are long, and take nothing
from the target, so that the two overlap. Which is faster depends on both models and on the machine: it is measured.
"""

from __future__ import annotations

import contextlib
import logging
import statistics
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

import torch

from langchain_card.config import EngineConfig
from langchain_card.core.costs import CostModel, Speed
from langchain_card.core.schedules import seconds_by_model
from langchain_card.engine.drafter_hosts import SCRATCH, needs_process
from langchain_card.errors import CARDError
from langchain_card.models.budget import check_budget
from langchain_card.models.files import Progress
from langchain_card.models.loader import ModelSpec, Pair, acquire_model, find_drafts, release_model
from langchain_card.runtime.families import decoder_layers
from langchain_card.runtime.runner import ModelRunner
from langchain_card.runtime.step_timer import CONTEXT, StepTimer, memory_bandwidth
from langchain_card.runtime.threads import ThreadPlan, use_threads

log = logging.getLogger(__name__)

ROWS = (1, 8, 16)
"""Rows of the target's passes that are measured."""

REPEATS = 5
"""Steps of each kind, of which the median counts."""

HITS = 0.8
"""Share of tokens that are expected to be the draft's first guess."""

GAIN = 1.1
"""Least speed-up over a draft on the GPU for which the draft goes to the CPU."""

BYTES = 4.5 / 8
"""Bytes of a number of a draft in blocks of 4 bits."""


@dataclass(frozen=True, slots=True)
class PlacementTimes:
    """Measured steps of a pair whose draft may lie on two devices.

    Attributes:
        target: seconds of a pass, by rows.
        on_gpu, on_cpu: seconds of a draft step.
        max_lead: longest chain of candidates.
    """

    target: Mapping[int, float]
    on_gpu: float
    on_cpu: float
    max_lead: int

    @property
    def together(self) -> float:
        """Expected seconds per token with both models on the GPU, in turns."""
        return self._expected(self.on_gpu, parallel=False)

    @property
    def apart(self) -> float:
        """Expected seconds per token with the draft on the CPU, at work while the target is."""
        return self._expected(self.on_cpu, parallel=True)

    @property
    def gain(self) -> float:
        """Expected speed-up of the draft on the CPU over that on the GPU, for one answer at a time."""
        return self.together / self.apart

    def __str__(self) -> str:
        return (
            f"a token is expected to take {1e3 * self.together:.1f} ms with both models on the GPU, and "
            f"{1e3 * self.apart:.1f} ms with the draft on the CPU"
        )

    def _expected(self, step: float, *, parallel: bool) -> float:
        costs = CostModel(Speed(), Speed())
        for _ in range(REPEATS):
            for rows, seconds in self.target.items():
                costs.target.observe(rows, seconds)
            costs.draft.observe(1, step)
        return seconds_by_model(costs, 1, HITS, self.max_lead, parallel=parallel)


def may_choose(config: EngineConfig, pair: Pair) -> bool:
    """Return whether the draft's device is open: it is "auto", and one GPU would hold both models.

    With a lossy acceptance rule it is not: the answer would depend on it.
    """
    one_gpu = [device.type for device in pair.target.devices] == ["cuda"]
    return config.draft_device == "auto" and pair.share_device and one_gpu and not config.stack and not config.lossy


def place_draft(
    config: EngineConfig, pair: Pair, resources: contextlib.ExitStack, progress: Progress
) -> tuple[EngineConfig, Pair]:
    """Return the configuration with the draft's device filled in, and its models.

    Args:
        config: of the engine.
        pair: its models.
        resources: keeps the models that this process has loaded and goes on to use.
        progress: receives reports.
    """
    if not may_choose(config, pair):
        return config, pair
    progress.update("measure where the draft runs best", 0, 0)
    with contextlib.ExitStack() as models:
        chosen, _ = compare(config, pair, models, progress)
        assert chosen.draft is not None
        for spec in (chosen.target, *([] if needs_process(config, chosen) else [chosen.draft])):
            acquire_model(spec)
            resources.callback(release_model, spec)
    return replace(config, draft_device=str(chosen.draft.device)), chosen


def compare(
    config: EngineConfig, pair: Pair, models: contextlib.ExitStack, progress: Progress
) -> tuple[Pair, PlacementTimes]:
    """Return the pair with its draft on the faster device, and the times by which it was chosen.

    The draft's weights for the CPU are made and read only where its memory may be fast enough. Otherwise a step on the
    CPU counts as long as reading them would take.

    Args:
        config: of the engine, for which `may_choose` is true.
        pair: its models.
        models: keeps what is loaded.
        progress: receives reports.
    """
    assert pair.draft is not None
    (target, _), (on_gpu, model) = (
        _steps(config, spec, rows, models) for spec, rows in ((pair.target, ROWS), (pair.draft, (1,)))
    )
    numbers = sum(parameter.numel() for parameter in decoder_layers(model).parameters())
    reading = numbers * BYTES / memory_bandwidth(1 << 28)
    times = PlacementTimes(target, on_gpu[1], reading, config.limits.max_lead)
    if times.gain > GAIN:
        try:
            on_cpu = _with_draft_on_cpu(config, pair, progress)
            times = replace(times, on_cpu=_step_on_cpu(config, on_cpu.draft, models))
        except CARDError as error:
            log.info("the draft stays on %s, because it does not run on the CPU: %s", pair.draft.device, error)
        else:
            pair = on_cpu if times.gain > GAIN else pair
    log.info("draft_device: %s", times)
    return pair, times


def _with_draft_on_cpu(config: EngineConfig, pair: Pair, progress: Progress) -> Pair:
    """Return a pair with its draft on the CPU; raises if it does not run or fit there."""
    ((_, draft),) = find_drafts(config, pair.target, torch.device("cpu"), progress)
    found = replace(pair, draft=draft)
    check_budget(found, config.limits.max_num_seqs, config.limits.max_window, SCRATCH)
    return found


def _step_on_cpu(config: EngineConfig, draft: ModelSpec | None, models: contextlib.ExitStack) -> float:
    """Return the seconds of a draft's step on the CPU, with all cores."""
    assert draft is not None
    threads, in_torch = ThreadPlan(target_on_cpu=False, draft_on_cpu=True), draft.form == "float"
    with ThreadPoolExecutor(1) as thread:  # numbers of threads are set for the calling one
        thread.submit(use_threads, threads.draft("parallel"), in_torch=in_torch).result()
        steps, _ = thread.submit(_steps, config, draft, (1,), models).result()
    return steps[1]


def _steps(
    config: EngineConfig, spec: ModelSpec, sizes: tuple[int, ...], models: contextlib.ExitStack
) -> tuple[dict[int, float], Any]:
    """Return the median seconds of a model's steps by their rows, and the model."""
    model = acquire_model(spec)
    models.callback(release_model, spec)
    execution = config.execution_on(spec.device.type)
    runner = ModelRunner(
        model, max_len=2 * CONTEXT, num_scratch=max(ROWS), execution=execution, integer_kv=spec.integer_kv
    )
    timer = StepTimer(runner)
    for rows in sizes:
        timer.seconds(rows)  # cold
    return {rows: statistics.median(timer.seconds(rows) for _ in range(REPEATS)) for rows in sizes}, model
