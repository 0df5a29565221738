"""`Engine`: a target model with its drafters, ready to decode requests."""

from __future__ import annotations

import atexit
import contextlib
import itertools
import logging
import os
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from typing_extensions import Self

from langchain_card.config import EngineConfig, check_adapter_name, lossy_note
from langchain_card.constraints.compiler import Grammars
from langchain_card.core.request import Request, SamplingParams
from langchain_card.engine.build import start_driver
from langchain_card.engine.draft_placement import place_draft
from langchain_card.engine.drafter_hosts import SCRATCH
from langchain_card.engine.driver import Driver
from langchain_card.engine.garbage import rare_collections
from langchain_card.engine.generation import Generation
from langchain_card.engine.labels import check_labels
from langchain_card.errors import (
    ContextOverflowError,
    EngineBusyError,
    EngineClosedError,
    EngineError,
    InvalidInputError,
)
from langchain_card.models.budget import check_budget, free_bytes, weight_bytes
from langchain_card.models.files import Progress, Silent
from langchain_card.models.loader import ModelSpec, Pair, begin_loading, drop_loading, resolve
from langchain_card.models.registry import Registry
from langchain_card.ports import Backend, Health, Observer
from langchain_card.runtime.cpu import compilations
from langchain_card.text.detokenizer import Detokenizer

if TYPE_CHECKING:
    from langchain_card.engine.relay.relay import Relay
    from langchain_card.runtime.kind import Kind

log = logging.getLogger(__name__)

_CPU = torch.device("cpu")
_DRAIN_POLL_SECONDS = 0.02


class Engine:
    """A target model with any number of drafters, which decodes requests. Usable from any thread; a context manager.

    Args:
        config: models, devices and limits; the built-in pair by default.
        progress: receives the progress of downloads, of conversions and of a draft process that starts.
        pair: models already resolved, in place of those that `config` names.
        observe: called with every event and its effects; not possible with `isolate`.

    Attributes:
        config: the configuration with all open values filled in.
        tokenizer: the target's.
        grammars: compiled grammars of the requests; `grammars.check` compiles one before it is submitted.
        backend: decodes the requests, in this process or in another.
    """

    def __init__(
        self,
        config: EngineConfig | None = None,
        *,
        progress: Progress | None = None,
        pair: Pair | None = None,
        observe: Observer | None = None,
    ) -> None:
        _check_process()
        self.config, self._observe = config or EngineConfig(), observe
        if observe is not None and self.config.in_processes:
            limit = "cannot be watched: the engine works in a process of its own"
            raise InvalidInputError("observe", "given", limit, "leave isolate and replicas out")
        self._begun, self._free = list[ModelSpec](), 0
        try:
            with rare_collections, _shown_compilations(progress or Silent()):
                begin = None if self.config.in_processes else self._begin
                self._open(pair or resolve(self.config, progress, begin), progress)
        finally:
            for spec in self._begun:
                drop_loading(spec)

    def _begin(self, spec: ModelSpec) -> None:
        """Begin to load a model whose checks still run, if there is far more memory than that takes."""
        if not self._begun:
            self._free = free_bytes(_CPU)
        needed = sum(map(weight_bytes, [*self._begun, spec])) if spec.form != "float" else 0
        if 0 < 2 * needed < self._free and begin_loading(spec):
            self._begun.append(spec)

    def _open(self, pair: Pair, progress: Progress | None) -> None:
        self._pair = pair
        self.tokenizer = self._pair.tokenizer
        self.grammars = Grammars(self.tokenizer, self._pair.vocab_size, self._pair.eos_ids, self.config.limits)
        self._ids = itertools.count()
        self._lock = threading.RLock()  # a garbage-collected generation may abort anywhere
        self._closed = self._draining = False
        self._closing_thread, self._close_done = 0, threading.Event()
        with contextlib.ExitStack() as resources:  # all freed if anything fails
            make = self._isolate if self.config.in_processes else self._drive
            self.backend: Backend = make(resources, progress or Silent())
            self._resources = resources.pop_all()
        _open_engines.add(self)

    def _isolate(self, resources: contextlib.ExitStack, progress: Progress) -> Relay:
        """Load everything in other processes."""
        from langchain_card.engine.isolated.process_pool import ProcessPool  # imports msgspec
        from langchain_card.engine.relay.relay import Relay

        progress.update(f"load {self.config.model} in a process of its own", 0, 0)
        if self.config.replicas > 1 and self._pair.target.device.type == "cpu":  # each would count on all free memory
            self.config = self._with_seats(lambda device: free_bytes(device) // self.config.replicas)
        pool = ProcessPool(self.config, progress=progress)
        relay = Relay(pool, self.config.limits)
        resources.callback(relay.close)
        relay.start()
        before, loaded = self.config, pool.wait_ready()
        self.config = replace(before, limits=loaded.limits, draft_device=loaded.draft_device)
        if self.config.draft_device != before.draft_device:
            self._pair = resolve(self.config)
        return relay

    def _drive(self, resources: contextlib.ExitStack, progress: Progress) -> Driver:
        """Load the models in this process, and start all workers."""
        names = " and ".join(filter(None, [self.config.model, self.config.draft_model if self._pair.draft else None]))
        progress.update(f"load {names}", 0, 0)
        if self.config.lossy:
            log.warning("%s", lossy_note(self.config.acceptance))
        self.config = self._with_seats(
            (lambda device: self._free if device == _CPU else free_bytes(device)) if self._begun else free_bytes
        )
        self.config, self._pair = place_draft(self.config, self._pair, resources, progress)
        return start_driver(self.config, self._pair, self.grammars.start, resources, progress, self._observe)

    def _with_seats(self, free: Callable[[torch.device], int]) -> EngineConfig:
        """Return the configuration with the number of sequences that fit into the free memory of the devices.

        Raises:
            DeviceError: not even the limits' number of sequences fits.
        """
        limits = self.config.limits
        wanted = 1 if limits.max_num_seqs is None and self.config.exact == "strict" else limits.max_num_seqs
        fitting = check_budget(self._pair, wanted, limits.max_window, SCRATCH, free)
        return replace(self.config, limits=replace(limits, max_num_seqs=min(fitting, limits.max_step_rows)))

    @property
    def devices(self) -> dict[str, str]:
        """Devices of target and draft, by name."""
        models = {"target": self._pair.target, "draft": self._pair.draft}
        return {name: ",".join(map(str, spec.devices)) for name, spec in models.items() if spec is not None}

    @property
    def coverage(self) -> float:
        """Share of the draft's tokens that the target also has: 1 with the same vocabulary, 0 without a draft."""
        if self._pair.draft is None:
            return 0.0
        return self._pair.vocabulary.coverage if self._pair.vocabulary is not None else 1.0

    @property
    def kind(self) -> Kind:
        """What the text of an answer depends on, so that another engine may go on with it. Not for `observe` to read.

        It is measured at the first use, in ten passes of the target between those of requests. The weights are hashed,
        a second for each one to two gigabytes; hashes are kept on disk.

        Raises:
            EngineClosedError: the engine was closed.
            EngineError: the model's files have changed since they were loaded, or this engine has a process of its own
                and no replicas.
        """
        return self._open_backend().kind()

    @property
    def eos_ids(self) -> tuple[int, ...]:
        """Tokens that end an answer."""
        return self._pair.eos_ids

    @property
    def max_model_len(self) -> int:
        """Maximum number of positions per sequence, prompt and answer together."""
        return self._pair.max_len

    @property
    def num_running(self) -> int:
        """Number of requests that hold KV on the target."""
        return self._open_backend().num_running

    @property
    def num_open(self) -> int:
        """Number of requests that wait or run."""
        return self._open_backend().num_open

    def health(self) -> dict[str, Health]:
        """Return the health of the workers, by name: `"target"` and each drafter."""
        return self._open_backend().health()

    def submit(
        self,
        prompt_ids: Sequence[int],
        params: SamplingParams | None = None,
        labels: Sequence[Sequence[int]] = (),
    ) -> Generation:
        """Queue a prompt and return its generation.

        Args:
            prompt_ids: token ids of `self.tokenizer`, at least one.
            params: how to decode. `max_tokens` is cut to the room that the context leaves.
            labels: token ids of possible answers, which fit into one window together (see `engine/labels.py`). No
                answer is written: the statistics hold the log-probability of each label.

        Raises:
            InvalidInputError: a field breaks its bound.
            ContextOverflowError: the prompt leaves no room for an answer.
            EngineBusyError: the queue is full.
            EngineClosedError: the engine was closed.
            EngineError: this process is a fork of one that has loaded a model.
        """
        _check_process()
        params = params or SamplingParams()
        limits = self.config.limits
        params.check(limits, self._pair.vocab_size)
        check_adapter_name(params.adapter, self.config)
        max_tokens, params = params.max_tokens, self._fit(prompt_ids, params)
        if params.grammar:
            self._check_grammar(params, max_tokens, len(prompt_ids))
        if labels:
            check_labels(labels, self.config, self._pair.vocab_size)
            params = replace(params, schedule="plain", stop=(), grammar="")
        request = Request(next(self._ids), tuple(prompt_ids), params, self._pair.eos_ids, (*map(tuple, labels),))
        generation = Generation(
            request,
            Detokenizer(self.tokenizer, params.stop),
            lambda: self._if_open(lambda backend: backend.stop(request.request_id)),
            lambda paused: self._if_open(lambda backend: backend.pause(request.request_id, paused)),
            self.config.limits.max_unread,
        )
        backend = self._open_backend()
        if self._draining:
            raise EngineClosedError("engine", self.config.model, "the engine is draining", "make a new one")
        if backend.num_open >= limits.max_queue + backend.num_seats:
            limit = f"as many requests wait already, {backend.num_open:,} with those that run"
            raise EngineBusyError("max_queue", limits.max_queue, limit, "try again later")
        backend.submit(generation)
        return generation

    def warm_up(self, progress: Progress) -> None:
        """Decode two tokens if kernels were compiled while the models were loaded: passes need some more of them."""
        global _compilations
        if compilations.num_begun() > _compilations:
            with _shown_compilations(progress):
                self.submit(self.eos_ids[:1], SamplingParams(max_tokens=2)).result()
            _compilations = compilations.num_begun()

    def announce(self, count: int) -> None:
        """Announce `count` requests that are about to be submitted, so that they share their first pass."""
        self._if_open(lambda backend: backend.announce(count))

    def _open_backend(self) -> Backend:
        with self._lock:
            if self._closed:
                raise EngineClosedError("engine", self.config.model, "the engine was closed", "make a new one")
            return self.backend

    def _fit(self, prompt_ids: Sequence[int], params: SamplingParams) -> SamplingParams:
        if not prompt_ids:
            raise InvalidInputError("prompt_ids", [], "must hold at least one token")
        room = self._pair.max_len - self.config.limits.max_window - len(prompt_ids)
        if room < 1:
            raise ContextOverflowError(
                "prompt",
                f"{len(prompt_ids):,} tokens",
                f"the context holds {self._pair.max_len:,} tokens, {self.config.limits.max_window} for candidates",
                "shorten the prompt or raise max_model_len",
            )
        size = len(self.tokenizer)
        bad = next((t for t in prompt_ids if not 0 <= t < size), None)
        if bad is not None:
            raise InvalidInputError("prompt_ids", bad, f"token ids must be between 0 and {size - 1:,}")
        if params.max_tokens <= room:
            return params
        return replace(params, max_tokens=room)

    def _check_grammar(self, params: SamplingParams, wanted_tokens: int, num_prompt: int) -> None:
        if params.max_tokens < self.grammars.shortest(params.grammar) <= wanted_tokens:
            limit = f"leaves room for {params.max_tokens:,}, fewer than the shortest answer of this form"
            raise ContextOverflowError("prompt", f"{num_prompt:,} tokens", limit, "shorten the prompt")
        self.grammars.check(params.grammar, params.max_tokens)

    def _if_open(self, call: Callable[[Backend], None]) -> None:
        with contextlib.suppress(EngineClosedError):
            call(self._open_backend())

    def drain(self, timeout: float | None = None) -> bool:
        """Take no more requests, and wait until all open requests have ended.

        Args:
            timeout: seconds to wait at most; None for no limit.

        Returns:
            True if all of them ended in time. The engine stays open, so that the others go on; `close` ends them.
        """
        backend = self._open_backend()
        self._draining = True
        backend.drain()
        deadline = None if timeout is None else time.monotonic() + timeout
        while backend.num_open and (deadline is None or time.monotonic() < deadline):
            time.sleep(_DRAIN_POLL_SECONDS)
        return not backend.num_open

    def close(self) -> None:
        """End all requests, stop all workers and release the weights. May be called twice.

        A second call from another thread waits for the first: the interpreter must not exit before it has ended.
        """
        if os.getpid() != _home:
            return  # a fork has none of its threads
        with self._lock:
            is_first, self._closed = not self._closed, True
            self._closing_thread = threading.get_ident() if is_first else self._closing_thread
        if not is_first:
            if self._closing_thread != threading.get_ident():  # else a garbage collection during `close` called it
                self._close_done.wait()
            return
        try:
            self._resources.close()
            del self.backend
        finally:
            self._close_done.set()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


_compilations = 0
"""Kernels that were compiled before the last `Engine.warm_up` ended."""


def _shown_compilations(progress: Progress) -> contextlib.AbstractContextManager[None]:
    """Report compilations as progress: the first as it begins, then every tenth."""
    numbers = itertools.count()

    def show() -> None:
        if next(numbers) % 10 == 0:
            stage = f"compile kernels for this CPU, once: a minute ({compilations.num_begun()} so far)"
            progress.update(stage, 0, 0)

    return compilations.watched(show)


_home: int | None = None
"""Id of the process that made the first engine."""


def _check_process() -> None:
    """Raise `EngineError` in a fork of the process of the first engine: its threads do not survive a fork."""
    global _home
    _home = _home or os.getpid()
    if os.getpid() != _home:
        limit = f"is a fork of process {_home}, which has loaded a model"
        hint = "load the first model in each process after it was forked, or start processes by spawn"
        raise EngineError("process", os.getpid(), limit, hint)


_open_engines: weakref.WeakSet[Engine] = weakref.WeakSet()


@atexit.register
def _close_all() -> None:
    """Close all engines at exit: an interpreter that ends while a thread runs torch code aborts the process."""
    for engine in list(_open_engines):
        engine.close()


_engines: Registry[Engine] = Registry(close=Engine.close)


def acquire_engine(config: EngineConfig, progress: Progress | None = None) -> Engine:
    """Return the process's engine of a configuration. Give it back with `release_engine`."""
    return _engines.acquire(config, lambda: Engine(config, progress=progress))


def release_engine(config: EngineConfig) -> None:
    """Release one use of an engine; the last one closes it."""
    _engines.release(config)
