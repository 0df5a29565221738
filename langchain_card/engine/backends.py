"""Opening of an engine: its models, its grammars, and the backend that decodes, in this process or in others."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from pathlib import Path

import torch
from typing_extensions import Self

from langchain_card import plugins
from langchain_card.config import EngineConfig, lossy_note
from langchain_card.constraints.compiler import Grammars
from langchain_card.engine.build import start_driver
from langchain_card.engine.draft_placement import place_draft
from langchain_card.engine.drafter_hosts import SCRATCH
from langchain_card.engine.kinds import hash_models
from langchain_card.engine.relay.description import Description
from langchain_card.errors import InvalidInputError
from langchain_card.models.budget import check_budget, free_bytes, weight_bytes
from langchain_card.models.files import Progress
from langchain_card.models.loader import ModelSpec, Pair, begin_loading, drop_loading, resolve
from langchain_card.models.tokenizer import tokenizer_files, tokenizer_of
from langchain_card.ports import Backend, Observer

log = logging.getLogger(__name__)

_CPU = torch.device("cpu")

FreeBytes = Callable[[torch.device], int]


@dataclass(frozen=True, slots=True)
class Opened:
    """What an engine consists of.

    Attributes:
        config: the configuration with all open values filled in.
        pair: the models.
        grammars: of the requests.
        backend: decodes them.
    """

    config: EngineConfig
    pair: Pair
    grammars: Grammars
    backend: Backend


def open_backend(
    config: EngineConfig,
    resources: contextlib.ExitStack,
    progress: Progress,
    pair: Pair | None = None,
    observe: Observer | None = None,
) -> Opened:
    """Find the models and start the backend.

    Args:
        config: of the engine.
        resources: ends and frees everything when it is closed.
        progress: receives downloads, conversions and the start of processes.
        pair: models already resolved, in place of those that `config` names.
        observe: called with every event and its effects, in this process only.

    Raises:
        CARDError: loading failed.
    """
    if config.cluster is not None:
        return _join(config, config.cluster, resources, progress)
    if config.in_processes:
        return _isolate(config, pair or resolve(config, progress), resources, progress)
    with _EarlyLoading() as early:
        return _drive(config, pair or resolve(config, progress, early.begin), early, resources, progress, observe)


@dataclass
class _EarlyLoading:
    """Models whose weights load while their checks still run.

    Attributes:
        begun: their specs.
        free: free memory of the CPU before the first of them; 0 without any.
    """

    begun: list[ModelSpec] = field(default_factory=list)
    free: int = 0

    def begin(self, spec: ModelSpec) -> None:
        """Begin to load a model, if there is far more memory than that takes."""
        if not self.begun:
            self.free = free_bytes(_CPU)
        needed = sum(map(weight_bytes, [*self.begun, spec])) if spec.form != "float" else 0
        if 0 < 2 * needed < self.free and begin_loading(spec):
            self.begun.append(spec)

    def free_bytes(self, device: torch.device) -> int:
        """Return the free memory of a device without what these models take."""
        return self.free if self.begun and device == _CPU else free_bytes(device)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for spec in self.begun:
            drop_loading(spec)


def _drive(
    config: EngineConfig,
    pair: Pair,
    early: _EarlyLoading,
    resources: contextlib.ExitStack,
    progress: Progress,
    observe: Observer | None,
) -> Opened:
    """Load the models in this process, and start all workers."""
    names = " and ".join(filter(None, [config.model, config.draft_model if pair.draft else None]))
    progress.update(f"load {names}", 0, 0)
    grammars = _grammars(config, pair)
    if config.lossy:
        log.warning("%s", lossy_note(config.acceptance))
    config, pair = place_draft(_with_seats(config, pair, early.free_bytes), pair, resources, progress)
    driver = start_driver(config, pair, grammars.start, resources, progress, observe)
    return Opened(config, pair, grammars, driver)


def _isolate(config: EngineConfig, pair: Pair, resources: contextlib.ExitStack, progress: Progress) -> Opened:
    """Load everything in other processes."""
    from langchain_card.engine.isolated.process_pool import ProcessPool  # imports msgspec
    from langchain_card.engine.relay.relay import Relay

    progress.update(f"load {config.model} in a process of its own", 0, 0)
    grammars = _grammars(config, pair)
    if config.replicas > 1 and pair.target.device.type == "cpu":  # each would count on all free memory
        config = _with_seats(config, pair, lambda device: free_bytes(device) // config.replicas)
    pool = ProcessPool(config, progress=progress)
    relay = Relay(pool, config.limits)
    resources.callback(relay.close)
    relay.start()
    hash_models(config, pair)  # while the process imports and loads: reading large files takes as long
    loaded = pool.wait_ready()
    if loaded.draft_device != config.draft_device:
        pair = resolve(replace(config, draft_device=loaded.draft_device))
    config = replace(config, limits=loaded.limits, draft_device=loaded.draft_device)
    return Opened(config, pair, grammars, relay)


def _join(config: EngineConfig, cluster: str, resources: contextlib.ExitStack, progress: Progress) -> Opened:
    """Reach the engines of a cluster, which say what they are; nothing is loaded here but their tokenizer.

    Raises:
        InvalidInputError: Ray is missing, or the engines have another model or rule than `config` names.
        EngineError: they cannot be reached.
    """
    from langchain_card.engine.relay.relay import Relay

    if find_spec("ray") is None:
        raise InvalidInputError("cluster", cluster, "needs Ray", "pip install 'langchain-card[ray]'")
    progress.update(f"wait for the engines of {cluster}", 0, 0)
    pool = plugins.find("pools", "ray", "cluster").make(cluster)
    resources.callback(pool.close)
    found: Description = pool.describe()
    relay = Relay(pool, found.config.limits)
    resources.callback(relay.close)
    relay.start()
    for name in ("model", "acceptance", "steering", "adapters", "exact"):
        if (wanted := getattr(config, name)) != (given := getattr(found.config, name)):
            limit = f"is not what the engines of {cluster} have: {given!r}"
            raise InvalidInputError(name, wanted, limit, f"give {name}={given!r}")
    pair = _described(found)
    config = replace(found.config, cluster=cluster)
    return Opened(config, pair, _grammars(config, pair), relay)


def describe(opened: Opened) -> Description:
    """Return what an engine says of itself to relays elsewhere."""
    pair = opened.pair
    files = tokenizer_files(pair.target.folder)
    device = ",".join(map(str, pair.target.devices))
    return Description(opened.config, opened.backend.kind(), pair.eos_ids, pair.vocab_size, pair.max_len, device, files)


def _described(found: Description) -> Pair:
    """Return the target of a description, without weights."""
    tokenizer = tokenizer_of(found.tokenizer)
    first, *others = map(torch.device, found.device.split(","))
    spec = ModelSpec(found.config.model, Path(), "float", first, torch.float32, others=(*others,))
    return Pair(spec, None, tokenizer, found.eos_ids, found.vocab_size, found.max_len)


def _grammars(config: EngineConfig, pair: Pair) -> Grammars:
    return Grammars(pair.tokenizer, pair.vocab_size, pair.eos_ids, config.limits)


def _with_seats(config: EngineConfig, pair: Pair, free: FreeBytes) -> EngineConfig:
    """Return the configuration with the number of sequences that fit into the free memory of the devices.

    Raises:
        DeviceError: not even the limits' number of sequences fits.
    """
    limits = config.limits
    wanted = 1 if limits.max_num_seqs is None and config.exact == "strict" else limits.max_num_seqs
    fitting = check_budget(pair, wanted, limits.max_window, SCRATCH, free)
    return replace(config, limits=replace(limits, max_num_seqs=min(fitting, limits.max_step_rows)))
