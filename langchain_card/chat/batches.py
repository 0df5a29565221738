"""`Batches`: LangChain's batch methods, run as one batch of the engine."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from contextlib import aclosing
from contextvars import ContextVar
from typing import Any
from weakref import WeakSet

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
"""Default number of prompts under way: twice what an engine decodes at once, so that it never waits for the next."""


class Group:
    """The answers of one batch; leaving the batch aborts all of them."""

    def __init__(self) -> None:
        self._generations: WeakSet[Generation] = WeakSet()  # answers without a reader are garbage, and have ended
        self._left = False
        self._lock = threading.RLock()  # a collection may close a batch anywhere

    def add(self, generation: Generation) -> None:
        """Add an answer; it is aborted at once if the batch was already left."""
        with self._lock:
            self._generations.add(generation)
        if self._left:
            self.leave()

    def leave(self) -> None:
        """Abort the answers that still run."""
        with self._lock:
            self._left, generations = True, [*self._generations]
            self._generations.clear()
        for generation in generations:
            limit = "the batch it belongs to was left"
            generation.abort(GenerationAbortedError("request", generation.request.request_id, limit))


_group: ContextVar[Group | None] = ContextVar("langchain_card_group", default=None)
"""The group of the batch that the current thread or task belongs to."""


def join_group(generation: Generation) -> None:
    """Add an answer to the batch that the current thread or task belongs to, if any."""
    if (group := _group.get()) is not None:
        group.add(generation)


class Batches(BaseChatModel):
    """A chat model that runs the prompts of a batch concurrently, so that the engine decodes them in common passes.

    Callbacks, caches, tracing, and one result or error per item are LangChain's, as in single calls. When a batch ends
    early, by ctrl-c or because an item failed, the answers that still run are aborted.
    """

    def _announce(self, count: int, options: Mapping[str, Any]) -> None:
        """Announce to the engine that serves these options that `count` calls are about to come."""

    def _concurrency(self) -> int:
        """Return the number of prompts of a batch that run at once by default (`max_concurrency`)."""
        return CONCURRENCY

    @override
    def batch(
        self,
        inputs: list[Any],
        config: RunnableConfig | list[RunnableConfig] | None = None,
        *,
        return_exceptions: bool = False,
        **kwargs: Any,
    ) -> list[Any]:
        outputs = dict(self._run(inputs, config, return_exceptions, kwargs))
        return [outputs[i] for i in range(len(inputs))]

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
        configs, concurrency = self._configs(config, len(inputs))

        def call(i: int) -> tuple[int, Any]:
            try:
                return i, self.invoke(inputs[i], configs[i], **kwargs)
            except Exception as error:
                if not return_exceptions:
                    raise
                return i, error

        if inputs:
            self._announce(min(len(inputs), concurrency), kwargs)
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
        outputs = dict(await _collect(self._arun(inputs, config, return_exceptions, kwargs)))
        return [outputs[i] for i in range(len(inputs))]

    async def abatch_with(self, inputs: Sequence[Any], options: Sequence[Mapping[str, Any]]) -> list[Any]:
        """Run a batch as `abatch` does, with a mapping of options for each input."""

        async def call(i: int) -> tuple[int, Any]:
            return i, await self.ainvoke(inputs[i], **options[i])

        concurrency = min(max(len(inputs), 1), self._concurrency())
        if inputs:
            self._announce(min(len(inputs), concurrency), {})
        outputs = dict(await _collect(_in_tasks(call, len(inputs), concurrency)))
        return [outputs[i] for i in range(len(inputs))]

    @override
    async def abatch_as_completed(
        self,
        inputs: Sequence[Any],
        config: RunnableConfig | Sequence[RunnableConfig] | None = None,
        *,
        return_exceptions: bool = False,
        **kwargs: Any,
    ) -> AsyncIterator[tuple[int, Any]]:
        async with aclosing(self._arun(inputs, config, return_exceptions, kwargs)) as answers:
            async for answer in answers:
                yield answer

    def _arun(
        self, inputs: Sequence[Any], config: Any, return_exceptions: bool, kwargs: dict[str, Any]
    ) -> AsyncGenerator[tuple[int, Any], None]:
        configs, concurrency = self._configs(config, len(inputs))

        async def call(i: int) -> tuple[int, Any]:
            try:
                return i, await self.ainvoke(inputs[i], configs[i], **kwargs)
            except Exception as error:
                if not return_exceptions:
                    raise
                return i, error

        if inputs:
            self._announce(min(len(inputs), concurrency), kwargs)
        return _in_tasks(call, len(inputs), concurrency)

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

        self._announce(min(len(messages), self._concurrency()), kwargs)
        return self._combine(dict(_in_threads(call, len(messages), self._concurrency())))

    @override
    async def agenerate(
        self,
        messages: list[list[BaseMessage]],
        stop: list[str] | None = None,
        callbacks: Callbacks = None,
        *,
        run_id: Any = None,
        **kwargs: Any,
    ) -> LLMResult:
        agenerate = super().agenerate
        if len(messages) < 2:
            return await agenerate(messages, stop, callbacks, run_id=run_id, **kwargs)

        async def call(i: int) -> tuple[int, LLMResult]:
            return i, await agenerate([messages[i]], stop, callbacks, run_id=None if i else run_id, **kwargs)

        self._announce(min(len(messages), self._concurrency()), kwargs)
        return self._combine(dict(await _collect(_in_tasks(call, len(messages), self._concurrency()))))

    def _combine(self, results_by_index: Mapping[int, LLMResult]) -> LLMResult:
        results = [results_by_index[i] for i in range(len(results_by_index))]
        return LLMResult(
            generations=[generations for result in results for generations in result.generations],
            llm_output=self._combine_llm_outputs([result.llm_output for result in results]),
            run=[run for result in results for run in result.run or ()] or None,
        )

    def _configs(self, config: Any, count: int) -> tuple[list[RunnableConfig], int]:
        """Return a config for each input, and how many may run at once (`max_concurrency` of the first config)."""
        configs = get_config_list(config, count) if count else [{}]
        return configs, configs[0].get("max_concurrency") or min(max(count, 1), self._concurrency())


def _in_threads(call: Callable[[int], tuple[int, Any]], count: int, num_threads: int) -> Iterator[tuple[int, Any]]:
    """Yield the results of `call(0)`, `call(1)`, ... as they complete; abort the rest if the caller stops early."""
    executor, group, futures = ContextThreadPoolExecutor(max_workers=num_threads), Group(), set[Future[Any]]()
    try:
        token = _group.set(group)
        try:
            for i in range(count):
                futures.add(executor.submit(call, i))
        finally:
            _group.reset(token)
        while futures:
            done, futures = wait(futures, return_when=FIRST_COMPLETED)
            while done:
                yield done.pop().result()
    finally:
        for future in futures:
            future.cancel()
        group.leave()
        executor.shutdown(wait=False)  # aborted answers take one more step


async def _in_tasks(
    call: Callable[[int], Awaitable[tuple[int, Any]]], count: int, num_tasks: int
) -> AsyncGenerator[tuple[int, Any], None]:
    """Yield results as `_in_threads` does, from tasks of the event loop; the rest are cancelled if the caller stops."""
    free = asyncio.Semaphore(num_tasks)

    async def run(i: int) -> tuple[int, Any]:
        async with free:
            return await call(i)

    tasks = {asyncio.create_task(run(i)) for i in range(count)}
    try:
        while tasks:
            done, tasks = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            while done:
                yield done.pop().result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _collect(results: AsyncGenerator[tuple[int, Any], None]) -> list[tuple[int, Any]]:
    async with aclosing(results):
        return [result async for result in results]
