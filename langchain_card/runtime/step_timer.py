"""`StepTimer`: measure the steps of one model."""

from __future__ import annotations

import time

from langchain_card.runtime.kv_cache import KVCache
from langchain_card.runtime.rows import Rows
from langchain_card.runtime.runner import ModelRunner

CONTEXT = 256
"""Tokens in the cache before a measured step."""


class StepTimer:
    """A timer of one model's steps over a cached text."""

    def __init__(self, runner: ModelRunner) -> None:
        self._runner = runner
        self._cache: KVCache = runner.open()
        runner.prefill(self._cache, [1 + i % 99 for i in range(CONTEXT)])

    def seconds(self, rows: int) -> float:
        """Return the time of one step over a chain of `rows` rows. The cache keeps none of them."""
        paths = [tuple(range(i + 1)) for i in range(rows)]
        begun = time.perf_counter()
        with self._runner.on_stream():
            self._runner.step([Rows(self._cache, [5] * rows, self._cache.length, paths)]).argmax(-1).tolist()
        return time.perf_counter() - begun
