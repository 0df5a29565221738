"""The target side: reads prompts, verifies windows, owns the sequences' KV."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from langchain_card.core.messages import ROOT, Begin, Verdict, Window
from langchain_card.runtime.kv_cache import KVCache
from langchain_card.runtime.runner import ModelRunner
from langchain_card.runtime.sampling import Sampler, token_logprobs


@dataclass(slots=True)
class _Sequence:
    begin: Begin
    cache: KVCache | None  # opened with the first window
    sampler: Sampler
    window: Window | None = None


class TargetWorker:
    """Runs the target model.

    Args:
        runner: of the target; its scratch slots bound the rows of a window.
        set_threads: called with the request's schedule before its steps.
    """

    def __init__(self, runner: ModelRunner, set_threads: Callable[[str], None]) -> None:
        self._runner = runner
        self._set_threads = set_threads
        self._sequences: dict[int, _Sequence] = {}

    def begin(self, begin: Begin) -> None:
        """Opens a sequence; its text is read with the first window."""
        sampler = Sampler(begin.request.params, begin.request.prompt_ids)
        self._sequences[begin.request.request_id] = _Sequence(begin, None, sampler)

    def end(self, request_id: int) -> None:
        """Frees a sequence."""
        self._sequences.pop(request_id, None)

    def verify(self, windows: Sequence[Window]) -> list[Verdict]:
        """The target's own token after every row of every window."""
        return [self._verify(window, self._sequences[window.request_id]) for window in windows]

    def _verify(self, window: Window, sequence: _Sequence) -> Verdict:
        self._set_threads(sequence.begin.schedule)
        cache = self._advance(window, sequence)
        paths = row_paths(window.parents)
        started = time.perf_counter()
        logits = self._runner.step(cache, window.token_ids, paths)
        scores = sequence.sampler.scores(logits, path_tokens(window.token_ids, paths))
        target_ids = tuple(scores.argmax(dim=-1).tolist())
        count = sequence.begin.request.params.logprobs
        logprobs = () if count is None else token_logprobs(logits, target_ids, count)
        elapsed = time.perf_counter() - started
        return Verdict(window.request_id, window.step_id, target_ids, elapsed, logprobs)

    def _advance(self, window: Window, sequence: _Sequence) -> KVCache:
        """Keeps what was committed since the last window, or reads the text so far.

        A window that failed for want of memory comes again: what was done for it already is not done twice.
        """
        last = sequence.window
        if last is None:
            sequence.cache = None  # what an attempt that failed had taken is free before this one takes as much
            sequence.cache = self._read(sequence)
        cache = sequence.cache
        assert cache is not None, "a sequence that was read has its cache"
        if last is not None and cache.length < window.start_position:
            cache.keep(window.kept_rows)  # the scratch slot of a row is its index in its window
            accepted = [last.token_ids[row] for row in window.kept_rows[1:]]
            sequence.sampler.commit([*accepted, window.token_ids[0]])
        sequence.window = window
        assert cache.length == window.start_position, "the window was cut for another prefix"
        assert sequence.sampler.length == window.start_position + 1, "the history is not that of the window"
        return cache

    def _read(self, sequence: _Sequence) -> KVCache:
        """Reads all but the last token: the prompt at once; an answer that goes on row by row, as it was written."""
        request, output_ids = sequence.begin.request, sequence.begin.output_ids
        sequence.sampler = Sampler(request.params, request.prompt_ids)
        sequence.sampler.commit(output_ids)
        cache = self._runner.open()
        self._runner.prefill(cache, request.prompt_ids[:-1])
        for _ in self._runner.follow(cache, (request.prompt_ids[-1], *output_ids)[: len(output_ids)]):
            pass
        return cache


def row_paths(parents: Sequence[int]) -> list[tuple[int, ...]]:
    """For each row, the rows from the first of the window down to itself."""
    paths: list[tuple[int, ...]] = []
    for row, parent in enumerate(parents):
        paths.append((row,) if parent == ROOT else (*paths[parent], row))
    return paths


def path_tokens(token_ids: Sequence[int], paths: Sequence[tuple[int, ...]]) -> list[tuple[int, ...]]:
    """For each row the tokens on its path, without the first of the window, which is committed."""
    return [tuple(token_ids[row] for row in path[1:]) for path in paths]
