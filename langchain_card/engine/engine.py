"""`Engine`: a target model with its drafters, ready to decode requests."""

from __future__ import annotations

import atexit
import contextlib
import itertools
import os
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from typing_extensions import Self

from langchain_card.config import EngineConfig, check_adapter_name
from langchain_card.core.request import Request, SamplingParams
from langchain_card.engine.backends import Opened, describe, open_backend
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
from langchain_card.models.files import Progress, Silent
from langchain_card.models.loader import Pair
from langchain_card.models.registry import Registry
from langchain_card.ports import Backend, Health, Observer
from langchain_card.runtime.cpu import compilations
from langchain_card.text.detokenizer import Detokenizer

if TYPE_CHECKING:
    from langchain_card.engine.relay.description import Description
    from langchain_card.runtime.kind import Kind

_DRAIN_POLL_SECONDS = 0.02


class Engine:
    """A target model with any number of drafters, which decodes requests. Usable from any thread; a context manager.

    Args:
        config: models, devices and limits; the built-in pair by default.
        progress: receives the progress of downloads, of conversions and of a draft process that starts.
        pair: models already resolved, in place of those that `config` names.
        observe: called with every event and its effects; not possible in other processes.

    Attributes:
        config: the configuration with all open values filled in.
        tokenizer: the target's.
        grammars: compiled grammars of the requests; `grammars.check` compiles one before it is submitted.
        request_ids: ids for new requests.
        backend: decodes the requests, in this process or in others.
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
        self.config = config or EngineConfig()
        if observe is not None and (self.config.in_processes or self.config.cluster is not None):
            limit = "cannot be watched: the engine works in a process of its own"
            raise InvalidInputError("observe", "given", limit, "leave isolate, replicas and cluster out")
        self._lock = threading.RLock()  # a garbage-collected generation may abort anywhere
        self._closed = self._draining = False
        self._closing_thread, self._close_done = 0, threading.Event()
        with rare_collections, _shown_compilations(progress or Silent()), contextlib.ExitStack() as resources:
            opened = open_backend(self.config, resources, progress or Silent(), pair, observe)
            self.config, self._pair, self.grammars = opened.config, opened.pair, opened.grammars
            self.tokenizer, self.request_ids = self._pair.tokenizer, itertools.count()
            self.backend = opened.backend
            self._resources = resources.pop_all()  # else all are freed
        _open_engines.add(self)

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
            EngineError: the model's files have changed since they were loaded, or this engine is the only one in a
                process of its own, which does not measure it.
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

    def describe(self) -> Description:
        """Return what a relay elsewhere must know of this engine."""
        return describe(Opened(self.config, self._pair, self.grammars, self._open_backend()))

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
        request = Request(next(self.request_ids), tuple(prompt_ids), params, self._pair.eos_ids, (*map(tuple, labels),))
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
