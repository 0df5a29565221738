"""`Batches`: many prompts as one batch of the engine, whatever LangChain calls them with."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from concurrent.futures import as_completed
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from langchain_core.callbacks import Callbacks
from langchain_core.language_models.chat_models import BaseChatModel
from langchain_core.messages import BaseMessage
from langchain_core.outputs import LLMResult
from langchain_core.runnables import RunnableConfig
from langchain_core.runnables.config import ContextThreadPoolExecutor, get_config_list
from typing_extensions import override

from langchain_card.engine.generation import Generation
from langchain_card.errors import GenerationAbortedError

CONCURRENCY = 32
"""Prompts of a batch that are under way at once, where `max_concurrency` says nothing: twice what an engine decodes at
once by default, so that it never waits for the next one."""


class Group:
    """The answers of one batch: whoever leaves it ends all of them."""

    def __init__(self) -> None:
        self._generations: list[Generation] = []
        self._left = False
        self._lock = threading.RLock()  # a collection may close a batch anywhere

    def add(self, generation: Generation) -> None:
        """One more; ended at once when the batch was left already."""
        with self._lock:
            self._generations.append(generation)
        if self._left:
            self.leave()

    def leave(self) -> None:
        """Ends those that still run."""
        with self._lock:
            self._left, generations = True, self._generations
            self._generations = []
        for generation in generations:
            limit = "the batch it belongs to was left"
            generation.abort(GenerationAbortedError("request", generation.request.request_id, limit))


_group: ContextVar[Group | None] = ContextVar("langchain_card_group", default=None)
"""Of the batch in whose thread or task this runs."""


def join_group(generation: Generation) -> None:
    """Notes an answer of the batch that is under way here, if one is."""
    if (group := _group.get()) is not None:
        group.add(generation)


@contextmanager
def _together() -> Iterator[None]:
    """What begins in this block belongs to one group, which is left with an exception."""
    group = Group()
    token = _group.set(group)
    try:
        yield
    except BaseException:
        group.leave()
        raise
    finally:
        _group.reset(token)


class Batches(BaseChatModel):
    """Runs the prompts of a batch side by side and tells the engine how many come; it puts them into common passes.

    Everything else (callbacks, caches, tracing, one result or error per item) stays what LangChain makes of single
    calls. Leaving a batch, by ctrl-c or because one item failed, ends the answers that still run.
    """

    def announce(self, count: int) -> None:
        """Called before `count` prompts are sent."""

    @override
    def batch(
        self,
        inputs: list[Any],
        config: RunnableConfig | list[RunnableConfig] | None = None,
        *,
        return_exceptions: bool = False,
        **kwargs: Any,
    ) -> list[Any]:
        found = dict(self._run(inputs, config, return_exceptions, kwargs))
        return [found[i] for i in range(len(inputs))]

    @override
    def batch_as_completed(
        self,
        inputs: Sequence[Any],
        config: RunnableConfig | Sequence[RunnableConfig] | None = None,
        *,
        return_exceptions: bool = False,
        **kwargs: Any,
    ) -> Iterator[tuple[int, Any]]:
        return self._run(inputs, config, return_exceptions, kwargs)

    def _run(
        self, inputs: Sequence[Any], config: Any, return_exceptions: bool, kwargs: dict[str, Any]
    ) -> Iterator[tuple[int, Any]]:
        configs, concurrency = _configs(config, len(inputs))

        def call(i: int) -> tuple[int, Any]:
            try:
                return i, self.invoke(inputs[i], configs[i], **kwargs)
            except Exception as error:
                if not return_exceptions:
                    raise
                return i, error

        if inputs:
            self.announce(len(inputs))
            yield from _in_threads(call, len(inputs), concurrency)

    @override
    async def abatch(
        self,
        inputs: list[Any],
        config: RunnableConfig | list[RunnableConfig] | None = None,
        *,
        return_exceptions: bool = False,
        **kwargs: Any,
    ) -> list[Any]:
        configs, concurrency = _configs(config, len(inputs))
        limited: list[RunnableConfig] = [{**config, "max_concurrency": concurrency} for config in configs]
        self.announce(len(inputs))
        with _together():
            return await super().abatch(inputs, limited, return_exceptions=return_exceptions, **kwargs)

    @override
    async def abatch_as_completed(
        self,
        inputs: Sequence[Any],
        config: RunnableConfig | Sequence[RunnableConfig] | None = None,
        *,
        return_exceptions: bool = False,
        **kwargs: Any,
    ) -> AsyncIterator[tuple[int, Any]]:
        configs, concurrency = _configs(config, len(inputs))
        free = asyncio.Semaphore(concurrency)

        async def call(i: int) -> tuple[int, Any]:
            async with free:
                try:
                    return i, await self.ainvoke(inputs[i], configs[i], **kwargs)
                except Exception as error:
                    if not return_exceptions:
                        raise
                    return i, error

        self.announce(len(inputs))
        tasks = [asyncio.create_task(call(i)) for i in range(len(inputs))]
        try:
            for done in asyncio.as_completed(tasks):
                yield await done
        finally:
            for task in tasks:
                task.cancel()

    @override
    def generate(
        self,
        messages: list[list[BaseMessage]],
        stop: list[str] | None = None,
        callbacks: Callbacks = None,
        *,
        run_id: Any = None,
        **kwargs: Any,
    ) -> LLMResult:
        generate = super().generate
        if len(messages) < 2:
            return generate(messages, stop, callbacks, run_id=run_id, **kwargs)

        def call(i: int) -> tuple[int, LLMResult]:
            return i, generate([messages[i]], stop, callbacks, run_id=None if i else run_id, **kwargs)

        self.announce(len(messages))
        found = dict(_in_threads(call, len(messages), CONCURRENCY))
        results = [found[i] for i in range(len(messages))]
        return LLMResult(
            generations=[generations for result in results for generations in result.generations],
            llm_output=self._combine_llm_outputs([result.llm_output for result in results]),
            run=[run for result in results for run in result.run or ()] or None,
        )

    @override
    async def agenerate(self, messages: list[list[BaseMessage]], *args: Any, **kwargs: Any) -> LLMResult:
        if len(messages) < 2:
            return await super().agenerate(messages, *args, **kwargs)
        self.announce(len(messages))
        with _together():
            return await super().agenerate(messages, *args, **kwargs)


def _configs(config: Any, count: int) -> tuple[list[RunnableConfig], int]:
    """One for each input, and how many may be under way at once, which the first of them says."""
    configs = get_config_list(config, count) if count else [{}]
    return configs, configs[0].get("max_concurrency") or min(max(count, 1), CONCURRENCY)


def _in_threads(call: Callable[[int], tuple[int, Any]], count: int, num_threads: int) -> Iterator[tuple[int, Any]]:
    """Results of `call(0)`, `call(1)`, ... as they come; those that still run are ended when the caller leaves."""
    executor = ContextThreadPoolExecutor(max_workers=num_threads)
    group = Group()
    token = _group.set(group)
    futures = [executor.submit(call, i) for i in range(count)]
    _group.reset(token)
    try:
        for future in as_completed(futures):
            yield future.result()
    finally:
        for future in futures:
            future.cancel()
        group.leave()
        executor.shutdown(wait=False)  # those that were ended take one more step
