"""The findings of `langchain-card doctor` about a machine and a pair, in plain sentences."""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import psutil
import torch

from langchain_card import plugins
from langchain_card.bench import machine
from langchain_card.bench.method import PeakMemory
from langchain_card.bench.prompts import user_prompt
from langchain_card.bench.step_times import Device, interpolate
from langchain_card.config import EngineConfig, Schedule
from langchain_card.core.controller import Controller
from langchain_card.core.policy import Load
from langchain_card.core.request import RequestStats, SamplingParams
from langchain_card.drafters.head import HeadDrafter
from langchain_card.engine.draft_placement import compare, may_choose
from langchain_card.engine.drafter_hosts import SCRATCH
from langchain_card.engine.driver import Driver
from langchain_card.engine.engine import Engine
from langchain_card.engine.kinds import hash_model
from langchain_card.errors import EngineError
from langchain_card.heads.folder import describe, find_head
from langchain_card.models.budget import ModelNeeds, check_needs, disk_bytes, free_bytes, needs_of, total_bytes
from langchain_card.models.files import Silent
from langchain_card.models.loader import ModelSpec, Pair
from langchain_card.runtime.threads import num_cores

_GIB = 1 << 30
_FIELDS = ("model", "draft_model", "device", "draft_device", "dtype", "kv_dtype", "quantization", "max_model_len")
_PROMPT = "Write a Python function that adds two numbers."
EXTRAS = {"structured": "llguidance", "server": "fastapi", "langserve": "langserve", "bench": "matplotlib"}
"""A package of each extra, by which the extra is detected."""

TRIED: tuple[Schedule, ...] = ("plain", "sequential", "parallel")
"""Schedules that are measured."""

ALIKE, FAR = 1.05, 1.2
"""Ratio of two figures below which they count as equal, and above which they contradict each other."""

GOOD_RATIO = 2.0
"""Draft steps per target pass below which a draft can gain little."""

BUSY = 0.25
"""Load per core above which measured times are unreliable."""


def about_machine() -> Iterator[str]:
    """Describe processor, memory, GPUs, versions, missing extras, and load."""
    facts = machine.describe()
    yield f"{facts['processor']}, {facts['cores']} cores, {facts['memory']} of memory, {facts['system']}."
    yield "GPUs: " + (", ".join(facts["gpus"]) or "none that CUDA finds") + "."
    yield (
        "Versions: "
        + ", ".join(f"{name} {facts[name]}" for name in ("langchain-card", "python", *machine.PACKAGES))
        + "."
    )
    absent = [extra for extra, package in EXTRAS.items() if importlib.util.find_spec(package) is None]
    if absent:
        yield f"Extras that are not installed: {', '.join(absent)} (docs/install.md tells how)."
    yield from about_load()


def about_load() -> Iterator[str]:
    """Warn if other programs use the cores."""
    load = os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0
    if load > BUSY * num_cores():
        yield (
            f"Other programs are at work (load {load:.1f} on {num_cores()} cores): steps may take several times as "
            "long, and measured times are unreliable."
        )


def about_kernels(pair: Pair) -> Iterator[str]:
    """Describe number formats and kernels."""
    for role, spec in _models(pair):
        form = machine.number_format(spec)
        yield f"The {role}, {spec.name}, runs in {form} on {', '.join(map(str, spec.devices))}."
        if spec.others:
            yield "Its layers are spread, so that steps run without CUDA graphs: several times slower if it is small."
        if tokens := machine.proposed_tokens(spec):
            yield f"It proposes the most frequent {tokens}."
    if pair.target.form != "float":
        from langchain_card.runtime.cpu.vectors import instructions

        kind = instructions()
        slower = "" if kind == "avx512vnni" else ", which is slower than AVX-512 VNNI"
        yield f"Its integer products use {kind}{slower}; a row's result does not depend on its neighbours."
    elif pair.target.device.type == "cpu" and pair.target.dtype == torch.float32:
        yield "On a CPU, blocks of 8 or 4 bits are several times as fast: quantization='int8' or 'int4'."


def about_head(config: EngineConfig, pair: Pair) -> Iterator[str]:
    """Describe the head that drafts, if one does.

    Raises:
        InvalidInputError: there is none, or it is one of another target.
    """
    for spec in config.modelless_drafters:
        if plugins.name_of(spec) == HeadDrafter.name:
            file = str(plugins.find("drafters", spec).options.get("file", ""))
            folder = find_head(file, functools.partial(hash_model, pair.target))
            head = describe(folder)
            yield f"The head, {folder}, has {head['weights']:,} weights of the kind {head['kind']}."
            if "answers" in head:
                yield (
                    f"It learned from {head['answers']:,} tokens of the target's answers. On others, a pass that "
                    f"checks its candidates yields {head['accepted_length']:.2f} tokens."
                )


def about_vocabulary(pair: Pair) -> Iterator[str]:
    """Describe how much of its vocabulary the draft shares with the target."""
    if pair.draft is None:
        return
    if pair.vocabulary is None:
        yield "Draft and target have one vocabulary."
        return
    shared, share = pair.vocabulary.num_shared, pair.vocabulary.coverage
    yield f"The draft has a vocabulary of its own: it can propose the {shared:,} tokens that both have ({share:.0%})."


def about_memory(pair: Pair, config: EngineConfig) -> Iterator[str]:
    """Describe the memory that weights and sequences need, and what is free."""
    limits = config.limits
    for role, spec in _models(pair):
        needs = ModelNeeds(role, spec, limits.max_window)
        weights = "is loaded" if not needs.weights else f"takes {needs.weights / _GIB:.1f} GiB"
        kv = f"{needs.kv(pair.max_len) / _GIB:.2f} GiB for each sequence of {pair.max_len:,} positions, when it is full"
        yield f"The {role} {weights}, and {kv}."
    for device, total in total_bytes(needs_of(pair, limits.max_window, SCRATCH), 1, pair.max_len).items():
        yield f"With working memory, one full sequence takes {total / _GIB:.1f} GiB of {device} in all."
    for device in dict.fromkeys(device for _, spec in _models(pair) for device in spec.devices):
        yield f"{free_bytes(device) / _GIB:.1f} GiB of {device} are free."
    sizes = {spec.folder: disk_bytes(spec.folder) for _, spec in _models(pair)}
    yield f"The models take {sum(sizes.values()) / _GIB:.1f} GiB on disk."


def about_room(pair: Pair, config: EngineConfig) -> Iterator[str]:
    """Describe how many sequences fit, and what they take when all are full.

    Raises:
        DeviceError: not even the limits' number of sequences fits.
    """
    limits = config.limits
    parts = needs_of(pair, limits.max_window, SCRATCH)
    num_seqs = check_needs(parts, limits.max_num_seqs, pair.max_len)
    totals = total_bytes(parts, num_seqs, pair.max_len)
    full = " and ".join(f"{total / _GIB:.1f} GiB of {device}" for device, total in totals.items())
    yield f"It all fits; up to {num_seqs} requests will run at once, which take {full} when all are full."


@dataclass(frozen=True, slots=True)
class StartCost:
    """A start.

    Attributes:
        imports: seconds from the start of the process until this package is imported.
        load: seconds until an engine is open, after that.
        first: seconds until the first token of a short prompt, after that.
        peak: most bytes that the process held.
    """

    imports: float
    load: float
    first: float
    peak: int


def measure_start(config: EngineConfig) -> StartCost:
    """Start an engine in a new process and write one token.

    Raises:
        EngineError: the process failed.
    """
    fields = json.dumps({name: getattr(config, name) for name in _FIELDS})
    command = [sys.executable, "-W", "ignore", "-c", f"from {__name__} import start; start()", fields]
    done = subprocess.run(command, capture_output=True, text=True)  # noqa: S603
    if done.returncode:
        last = ["it printed nothing", *filter(None, map(str.strip, done.stderr.splitlines()))][-1]
        raise EngineError("start", f"exit code {done.returncode}", f"a new process ended ({last})")
    return StartCost(**json.loads(done.stdout.splitlines()[-1]))


def start() -> None:
    """Start an engine with the fields of the command line, write one token, and print a `StartCost`."""
    begun, imported = psutil.Process().create_time(), time.time()
    fields: dict[str, Any] = json.loads(sys.argv[1])
    with Engine(EngineConfig(**fields)) as engine:
        opened = time.time()
        engine.submit(user_prompt(engine, _PROMPT), SamplingParams(max_tokens=1)).result()
        written = time.time()
        peak = PeakMemory(cuda="cuda" in str(engine.devices)).read()
    times = {"imports": imported - begun, "load": opened - imported, "first": written - opened}
    sys.stdout.write(json.dumps({**times, "peak": peak}) + "\n")


def about_start(cost: StartCost) -> Iterator[str]:
    """Describe the time until a new process writes, and the memory that it takes for one short answer."""
    parts = {"imports": cost.imports, "loading": cost.load, "the prompt": cost.first}
    listed = ", ".join(f"{name} {seconds:.1f} s" for name, seconds in parts.items())
    yield f"A new process writes its first token after {sum(parts.values()):.1f} s: {listed}."
    yield f"It takes {cost.peak / _GIB:.1f} GiB of memory at most."


def _models(pair: Pair) -> list[tuple[str, ModelSpec]]:
    return [("target", pair.target), *([("draft", pair.draft)] if pair.draft is not None else [])]


def about_placement(config: EngineConfig, pair: Pair) -> Iterator[str]:
    """Compare both devices of a draft whose target has the only GPU, by measured steps."""
    if not may_choose(config, pair):
        return
    with contextlib.ExitStack() as models:
        chosen, times = compare(config, pair, models, Silent())
    yield (
        f"A step of the draft takes {1e3 * times.on_gpu:.1f} ms on {pair.target.device}, in turns with the target, and "
        f"{1e3 * times.on_cpu:.1f} ms or more on the CPU, while the target works."
    )
    yield f"For one answer at a time, {times}: draft_device='auto' takes {chosen.draft and chosen.draft.device}."


def about_steps(device: Device, *, shared: bool) -> Iterator[str]:
    """Describe step times, and the slowdown of models that share a device."""
    for role, curve in (("target", device.target), ("draft", device.draft)):
        times = ", ".join(f"{1e3 * interpolate(curve, rows):.0f} ms over {rows}" for rows in (1, 4, 8, 16))
        yield f"A step of the {role} takes {times} rows."
    yield f"A target pass takes as long as {device.ratio:.1f} draft steps."
    if shared and max(device.slowdown) > ALIKE:
        yield (
            f"At work at once, the target takes {device.slowdown[0]:.2f} times as long and the draft "
            f"{device.slowdown[1]:.2f} times: they share cores and memory."
        )


@dataclass(frozen=True)
class Trial:
    """The measurements of a few answers.

    Attributes:
        measured: tokens per second, by schedule.
        expected: seconds per token that the controller predicts, by schedule, including `plain`.
        hits: how often the draft model's first guess is right; None without a draft model.
        chosen: schedule that `auto` now chooses for one request.
        shared: True if draft and target share a device.
    """

    measured: dict[Schedule, float]
    expected: dict[Schedule, float]
    hits: float | None
    chosen: Schedule
    shared: bool

    @property
    def predicted(self) -> float:
        """Predicted speedup of the chosen schedule over plain decoding."""
        return self.expected["plain"] / self.expected[self.chosen] if self.expected.get(self.chosen) else 1.0

    @property
    def gain(self) -> float:
        """Measured speedup of the chosen schedule over plain decoding."""
        return self.measured.get(self.chosen, 0.0) / self.measured["plain"] if self.measured["plain"] else 0.0


def try_out(engine: Engine, texts: Sequence[str], max_tokens: int) -> Trial:
    """Answer prompts with every schedule in turns, and return the speeds and the controller's predictions."""
    assert isinstance(engine.backend, Driver)
    policy = engine.backend.coordinator.policy
    assert isinstance(policy, Controller)
    tried = TRIED[: 1 + (engine.config.draft_model is not None) + engine.config.has_draft]
    stats: dict[Schedule, list[RequestStats]] = {schedule: [] for schedule in tried}
    for number, text in enumerate([texts[0], *texts]):  # the first is not counted: it compiles kernels
        for schedule in tried:
            tenant = schedule if number else f"{schedule}, warm-up"  # n-grams do not know the same answer
            params = SamplingParams(max_tokens=max_tokens, schedule=schedule, tenant=tenant)
            answer = engine.submit(user_prompt(engine, text), params).result()
            if number:
                stats[schedule].append(answer.stats)
    measured = {schedule: _speed(of_schedule) for schedule, of_schedule in stats.items()}
    expected = {schedule: policy.seconds_a_token(Load(schedule)) for schedule in tried[1:]}
    expected["plain"] = policy.costs_of(Load("plain")).target.at(1)
    chosen = policy.auto([policy.new_text()], None)
    hits = policy.usual_hits.value if engine.config.has_draft else None  # n-grams alone teach it nothing
    return Trial(measured, expected, hits, chosen, policy.shared_device)


def _speed(stats: Sequence[RequestStats]) -> float:
    seconds = sum(s.decode_seconds for s in stats)
    return sum(s.output_tokens - 1 for s in stats) / seconds if seconds else 0.0


def about_schedule(trial: Trial) -> Iterator[str]:
    """Describe the schedule that `auto` will choose, the reason, and the speed to expect."""
    yield (
        "Measured, tokens per second: "
        + ", ".join(f"{name} {speed:.1f}" for name, speed in trial.measured.items())
        + "."
    )
    if trial.hits is None:
        return  # there is nothing to choose
    yield f"The first guess of the draft was right for {trial.hits:.0%} of the tokens."
    expected = ", ".join(f"{name} {1e3 * seconds:.0f} ms" for name, seconds in trial.expected.items() if seconds)
    where = "Draft and target share one device" if trial.shared else "Draft and target have a device each"
    yield f"{where}. By step times and hits a token costs: {expected}."
    figures = f"measured {trial.gain:.2f} times plain decoding"
    if trial.expected.get(trial.chosen):
        figures = f"predicted {trial.predicted:.2f} times plain decoding, measured {trial.gain:.2f}"
    yield f"schedule='auto' will take {trial.chosen!r}: {figures}."
    best = max(trial.measured, key=trial.measured.__getitem__)
    if trial.measured[best] > FAR * trial.measured[trial.chosen]:
        yield f"Here {best!r} was faster. A few short answers decide little: see `langchain-card bench`."
    elif not 1 / FAR < trial.gain / trial.predicted < FAR:
        yield "That is far apart: the machine was busy, or these answers are unlike the steps. Try an idle machine."


def advice(trial: Trial, device: Device | None, pair: Pair) -> Iterator[str]:
    """Recommend what would make this pair faster."""
    if pair.draft is not None and trial.gain < ALIKE and trial.predicted < ALIKE:
        yield "Speculation gains nothing here: plain decoding is as fast, and draft_model=None saves memory."
    if device is not None and device.ratio < GOOD_RATIO:
        yield "The draft is slow beside its target: a smaller one gains more; `langchain-card plan` compares stacks."
    if device is not None and trial.shared and max(device.slowdown) > ALIKE:
        yield "A second GPU, or more cores, would let both work at full speed at once."
    if pair.draft is not None and trial.hits is not None and trial.hits < 0.7:
        yield "The draft is often wrong on these prompts: one of the target's own family guesses better."
    if pair.draft is None:
        yield "A small model of the same family as draft_model gains more than n-grams where text is not copied."
    yield "`langchain-card bench` measures all of this on your prompts, with bounds."
