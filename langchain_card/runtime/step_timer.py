"""Measure the steps of one model, and the memory that they read."""

from __future__ import annotations

import time

import torch

from langchain_card.runtime.kv_cache import KVCache
from langchain_card.runtime.rows import Rows
from langchain_card.runtime.runner import ModelRunner
from langchain_card.runtime.threads import num_cores, use_threads

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


def memory_bandwidth(size: int = 1 << 30, passes: int = 8) -> float:
    """Return the bytes that all cores together read in a second: the best of several passes over one array.

    Args:
        size: bytes of the array, far more than the caches hold.
        passes: number of passes of each kind.
    """
    use_threads(num_cores())
    numbers, seconds = torch.ones(size // 4), float("inf")
    for read in (torch.sum, torch.amax):
        for _ in range(passes):
            begun = time.perf_counter()
            read(numbers)
            seconds = min(seconds, time.perf_counter() - begun)
    return numbers.nbytes / seconds
