"""Assembly of an engine in this process: models, drafters, target and driver."""

from __future__ import annotations

import contextlib
import functools
import logging
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from langchain_card import plugins
from langchain_card.config import EngineConfig
from langchain_card.constraints.draft_grammars import DraftGrammars
from langchain_card.core.controller import Controller
from langchain_card.core.coordinator import Coordinator
from langchain_card.engine.drafter_hosts import needs_process, setting_of, transport_makers
from langchain_card.engine.driver import Driver
from langchain_card.engine.kinds import KindFinder, hash_model
from langchain_card.engine.plugin_drafters import choose
from langchain_card.engine.prefix_folder import PrefixFolder, dependencies
from langchain_card.engine.target_worker import TargetWorker
from langchain_card.models.adapter import read_adapter
from langchain_card.models.files import Progress
from langchain_card.models.loader import ModelSpec, Pair, acquire_model, release_model
from langchain_card.models.store import PREFIXES, default_cache
from langchain_card.ports import AcceptanceRule, Constraint, Observer
from langchain_card.runtime.adapters import Adapters
from langchain_card.runtime.heads import PassObserver, TargetView
from langchain_card.runtime.kind import measure
from langchain_card.runtime.runner import ModelRunner
from langchain_card.runtime.taps import Taps
from langchain_card.runtime.threads import ThreadPlan, num_cores, use_threads

log = logging.getLogger(__name__)


def start_driver(
    config: EngineConfig,
    pair: Pair,
    constrain: Callable[[str], Constraint],
    resources: contextlib.ExitStack,
    progress: Progress,
    observe: Observer | None = None,
) -> Driver:
    """Load the models and start all workers.

    Args:
        config: of the engine, with `max_num_seqs` filled in.
        pair: of the engine.
        constrain: makes the `Constraint` of a grammar.
        resources: ends and frees everything when it is closed.
        progress: receives the start of a draft process.
        observe: called with every event and its effects.

    Raises:
        CARDError: loading failed.
    """
    limits = config.limits
    config = config.settled(apart=(apart := needs_process(config, pair)))
    setting = setting_of(config, pair, constrain)
    rule: AcceptanceRule = plugins.find("acceptance", config.acceptance).make(setting)
    steering = None if config.steering is None else plugins.find("steering", config.steering).make(setting)
    view = TargetView(functools.partial(hash_model, pair.target))
    for_drafters = replace(setting, constrain=DraftGrammars(constrain).start, target=view)
    beside, below = choose(config, for_drafters, resources)
    view.model = model = _acquire(pair.target, resources)
    for chosen in beside:
        chosen.read_target()
    drafts = [] if pair.draft is None or apart else [_acquire(spec, resources) for spec in (pair.draft, *pair.stack)]
    threads = ThreadPlan(
        target_on_cpu=pair.target.device.type == "cpu",
        draft_on_cpu=pair.draft is not None and pair.draft.device.type == "cpu",
    )
    taps = _taps(view, resources)
    strict, adapters = config.exact == "strict", _adapters(config, model, resources)
    target = ModelRunner(
        model,
        max_len=pair.max_len,
        num_scratch=limits.max_window + (0 if (observer := view.observer) is None else observer.num_scratch),
        num_seqs=limits.num_seqs,
        execution=config.execution_on(pair.target.device.type),
        width=limits.max_window if strict else None,
        integer_kv=pair.target.integer_kv,
        adapters=adapters,
        on_capture=_captures(progress, "target"),
        priority=-1,
        taps=taps,
        more_layers=0 if observer is None else observer.num_layers,
    )
    if observer is not None:
        observer.bind(target)
    prefixes = _prefixes(config, pair.target, target, observer, resources)

    def set_threads(schedule: str) -> None:
        use_threads(threads.target(schedule), in_torch=pair.target.form == "float")

    def measure_target() -> str:
        set_threads("sequential")
        return measure(target, in_place=strict)

    def make_target() -> TargetWorker:
        target.pool.forget()
        if observer is not None:
            observer.forget()
        return TargetWorker(
            target,
            set_threads,
            limits.max_step_rows,
            in_place=strict,
            constrain=constrain,
            rule=rule,
            steering=steering,
            prefixes=prefixes,
            observer=observer,
        )

    captures = _captures(progress, "draft")
    makers = transport_makers(config, pair, threads, drafts, for_drafters, beside, below, captures)
    shared = pair.draft is None or pair.share_device
    overlaps = pair.draft is not None and pair.target.device.type == "cpu" and num_cores() > 1
    policy = Controller(shared_device=shared, overlaps=overlaps, limits=limits, pins=config.pins)
    core = Coordinator([*makers], limits, policy, pair.vocab_size, chains=strict, rule=rule)
    digests = {name: adapters.digest(name) for name, _ in config.adapters} if adapters is not None else {}
    finder, transports = KindFinder(config, pair, digests, measure_target), {s.name: make for s, make in makers.items()}
    driver = Driver(core, make_target, transports, observe=observe, finder=finder)
    resources.callback(_close_transports, driver)
    if apart:
        progress.update(f"load {config.draft_model} in a process of its own", 0, 0)
    for transport in driver.transports.values():
        transport.wait_ready()
    thread = threading.Thread(target=driver.run, name="card-target", daemon=True)
    thread.start()
    resources.callback(thread.join)
    resources.callback(driver.close)
    return driver


def _captures(progress: Progress, role: str) -> Callable[[int, int], None]:
    """Return a function that reports the captures of a model's steps."""
    return lambda done, total: progress.update(f"capture steps of the {role}, {done + 1} of {total}", 0, 0)


def _acquire(spec: ModelSpec, resources: contextlib.ExitStack) -> Any:
    """Return the model of a spec, acquired until `resources` is closed."""
    model = acquire_model(spec)
    resources.callback(release_model, spec)
    return model


def _adapters(config: EngineConfig, model: Any, resources: contextlib.ExitStack) -> Adapters | None:
    """Return the target's adapters, on the model until `resources` is closed; None without any."""
    if not config.adapters:
        return None
    adapters = Adapters(model, [read_adapter(name, Path(folder)) for name, folder in config.adapters])
    resources.callback(adapters.remove)
    return adapters


def _taps(view: TargetView, resources: contextlib.ExitStack) -> Taps | None:
    """Return the taps of what reads the target, on the model until `resources` is closed; None without it."""
    if view.observer is None:
        return None
    taps = Taps(view.model, view.observer.taps)
    resources.callback(taps.remove)
    return taps


def _prefixes(
    config: EngineConfig,
    spec: ModelSpec,
    target: ModelRunner,
    observer: PassObserver | None,
    resources: contextlib.ExitStack,
) -> PrefixFolder | None:
    """Return the folder of prefixes; None without one, or with a warning if it cannot be used."""
    if config.prefix_cache != "folder":
        return None
    folder = default_cache() / PREFIXES
    needs = dependencies(spec, config) + (observer.digest if observer is not None else "")
    try:
        prefixes = PrefixFolder(folder, target, needs, config.limits.max_prefix_bytes)
    except OSError as error:
        log.warning("no prefixes are kept: %s cannot be used (%s)", folder, error)
        return None
    resources.callback(prefixes.close)
    return prefixes


def _close_transports(driver: Driver) -> None:
    for transport in driver.transports.values():
        transport.close()
