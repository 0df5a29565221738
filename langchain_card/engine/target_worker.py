"""The target side: reads prompts, verifies windows, owns the sequences' KV."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from langchain_card.core.messages import ROOT, Begin, Verdict, Window
from langchain_card.runtime.kv_cache import KVCache
from langchain_card.runtime.runner import ModelRunner
from langchain_card.runtime.sampling import select_tokens


@dataclass(slots=True)
class _Sequence:
    begin: Begin
    cache: KVCache


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

    @property
    def num_sequences(self) -> int:
        """Sequences that hold KV."""
        return len(self._sequences)

    def begin(self, begin: Begin) -> None:
        """Opens a sequence; its text is read with the first window."""
        self._sequences[begin.request.request_id] = _Sequence(begin, self._runner.open())

    def end(self, request_id: int) -> None:
        """Frees a sequence."""
        self._sequences.pop(request_id, None)

    def verify(self, windows: Sequence[Window]) -> list[Verdict]:
        """The target's own token after every row of every window."""
        return [self._verify(window, self._sequences[window.request_id]) for window in windows]

    def _verify(self, window: Window, sequence: _Sequence) -> Verdict:
        self._set_threads(sequence.begin.schedule)
        cache, request = sequence.cache, sequence.begin.request
        if window.start_position and not cache.length:
            self._read(sequence)
        else:
            cache.keep(window.kept_rows)  # the scratch slot of a row is its index in its window
        assert cache.length == window.start_position, "the window was cut for another prefix"
        paths = row_paths(window.parents)
        started = time.perf_counter()
        logits = self._runner.step(cache, window.token_ids, paths)
        positions = [cache.length + len(path) for path in paths]
        target_ids = select_tokens(logits, positions, request.params)
        elapsed = time.perf_counter() - started
        return Verdict(window.request_id, window.step_id, tuple(target_ids), elapsed)

    def _read(self, sequence: _Sequence) -> None:
        """Reads all but the last token: the prompt at once; an answer that goes on row by row, as it was written.

        A row's bits do not depend on the other rows of a step, so the sequence continues exactly as it would have.
        """
        prompt_ids, output_ids = sequence.begin.request.prompt_ids, sequence.begin.output_ids
        self._runner.prefill(sequence.cache, prompt_ids[:-1])
        rest = (prompt_ids[-1], *output_ids)[: len(output_ids)]
        for start in range(0, len(rest), self._runner.num_scratch):
            rows = rest[start : start + self._runner.num_scratch]
            self._runner.step(sequence.cache, rows, [tuple(range(i + 1)) for i in range(len(rows))])
            sequence.cache.keep(range(len(rows)))


def row_paths(parents: Sequence[int]) -> list[tuple[int, ...]]:
    """For each row, the rows from the first of the window down to itself."""
    paths: list[tuple[int, ...]] = []
    for row, parent in enumerate(parents):
        paths.append((row,) if parent == ROOT else (*paths[parent], row))
    return paths
