"""The target side: reads prompts, verifies windows, owns the sequences' KV."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor

from langchain_card.core.messages import ROOT, Begin, TokenLogprob, Verdict, Window
from langchain_card.core.walk import AcceptanceRule, ExactRule, mismatches
from langchain_card.engine.steering import Text, steered
from langchain_card.ports import Constraint, Steering
from langchain_card.runtime.guide import Guide
from langchain_card.runtime.kv_cache import KVCache
from langchain_card.runtime.rows import Rows
from langchain_card.runtime.runner import ModelRunner
from langchain_card.runtime.sampling import Sampler, token_logprobs


@dataclass(slots=True)
class _Sequence:
    begin: Begin
    cache: KVCache
    sampler: Sampler
    cached: int  # tokens known from an earlier sequence; 0 once that was said
    verified: Window | None = None  # its rows lie in slots that are not committed

    def advance(self, window: Window, *, in_place: bool) -> None:
        """Keeps what was committed since the last window.

        A window that failed for want of memory comes again: what was done for it already is not done twice.
        """
        if self.verified is not None:
            kept = [self.verified.token_ids[row] for row in window.kept_rows]
            first = self.first_slot(self.verified, in_place=in_place)
            self.cache.keep([first + row for row in window.kept_rows], kept)
            self.sampler.commit([*kept[1:], window.token_ids[0]])
            self.verified = None
        assert self.sampler.length == window.start_position + 1, "the history is not that of the window"

    def first_slot(self, window: Window, *, in_place: bool) -> int:
        """Slot of a window's first row; the others follow."""
        return self.cache.pool.num_scratch + window.start_position if in_place else 0

    def unread(self, window: Window) -> Sequence[int]:
        """What of the text before the window has no KV yet."""
        if self.cache.length == window.start_position:
            return ()
        return (*self.begin.request.prompt_ids, *self.begin.output_ids)[self.cache.length : window.start_position]


_Due: TypeAlias = tuple[_Sequence, Window]


class TargetWorker:
    """Runs the target model.

    A pass takes the windows of all sequences that are read, and of the texts that are not as much as the row budget
    leaves, oldest first. A window is verified in the pass that reads the last of the text before it.

    Args:
        runner: of the target; its scratch slots bound the rows of a window.
        set_threads: called with the schedule of each pass before it.
        max_rows: rows of one pass; windows that come together leave a row for each text that is read.
        in_place: windows are chains, and their rows lie in their positions from the first, as those of a text.
        constrain: what a grammar allows, before the answer.
        rule: of acceptance, which may measure something; the exact one by default.
        steering: what changes the logits before anything else sees them, if anything does.
    """

    def __init__(
        self,
        runner: ModelRunner,
        set_threads: Callable[[str], None],
        max_rows: int,
        *,
        in_place: bool = False,
        constrain: Callable[[str], Constraint],
        rule: AcceptanceRule | None = None,
        steering: Steering | None = None,
    ) -> None:
        self._runner, self._constrain = runner, constrain
        self._set_threads = set_threads
        self._max_rows, self._in_place = max_rows, in_place
        self._rule: AcceptanceRule = rule or ExactRule()
        self._steering = steering
        self._begun: dict[int, Begin] = {}  # no window yet
        self._sequences: dict[int, _Sequence] = {}
        self._windows: dict[int, Window] = {}  # not verified yet

    def begin(self, begin: Begin) -> None:
        """A sequence starts; memory is taken and its text read from the first window on."""
        self._begun[begin.request_id] = begin

    def end(self, request_id: int) -> None:
        """Frees a sequence."""
        self._begun.pop(request_id, None)
        self._windows.pop(request_id, None)
        sequence = self._sequences.pop(request_id, None)
        if sequence is not None:
            self._runner.close(sequence.cache)

    def verify(self, windows: Iterable[Window]) -> list[Verdict]:
        """One pass: the target's own token after every row of every window whose text is read by now."""
        self._windows.update((window.request_id, window) for window in windows)
        try:
            return self._verify()
        except BaseException:
            self._windows.clear()  # they come again
            raise

    def _verify(self) -> list[Verdict]:
        for request_id in [request_id for request_id in self._windows if request_id in self._begun]:
            self._sequences[request_id] = self._open(self._begun[request_id])
            del self._begun[request_id]
        due = [(self._sequences[request_id], window) for request_id, window in self._windows.items()]
        for sequence, window in due:
            sequence.advance(window, in_place=self._in_place)
        texts, verified = self._share_out(due)
        self._set_threads(min(window.schedule for _, window in due))  # "parallel" where any is
        started = time.perf_counter()
        logits = self._runner.step([*texts, *(self._rows(*pair) for pair in verified)])
        if self._steering is not None and verified:
            logits = steered(self._steering, logits, [text for pair in verified for text in _texts(*pair)])
        target_ids, closed, logprobs = _choose(verified, logits)
        measured = self._measured(verified, logits, target_ids)
        read = sum(len(rows.token_ids) for rows in texts)
        per_row = (time.perf_counter() - started) / (read + sum(map(len, target_ids)))
        verdicts = []
        for (sequence, window), own_ids, early, own_logprobs, own_measured in zip(
            verified, target_ids, closed, logprobs, measured, strict=True
        ):
            verdicts.append(
                Verdict(
                    window.request_id,
                    window.step_id,
                    own_ids,
                    per_row * len(own_ids),
                    own_logprobs,
                    read=read,
                    cached=sequence.cached,
                    together=len(verified),
                    closed=early,
                    measured=own_measured,
                )
            )
            sequence.verified, sequence.cached = window, 0
            del self._windows[window.request_id]
        return verdicts

    def _open(self, begin: Begin) -> _Sequence:
        text = (*begin.request.prompt_ids, *begin.output_ids)
        params, guide = begin.request.params, None
        if params.grammar:
            guide = Guide(self._constrain(params.grammar), begin.request.eos_ids, params.max_tokens)
        sampler = Sampler(params, begin.request.prompt_ids, guide)
        sampler.commit(begin.output_ids)
        cache = self._runner.open(text[:-1], params.tenant)
        return _Sequence(begin, cache, sampler, cached=cache.length)

    def _rows(self, sequence: _Sequence, window: Window) -> Rows:
        first = sequence.first_slot(window, in_place=self._in_place)
        paths = [tuple(first + row for row in path) for path in row_paths(window.parents)]
        return Rows(sequence.cache, window.token_ids, window.start_position, paths)

    def _measured(
        self, verified: Sequence[_Due], logits: Tensor, target_ids: Sequence[Sequence[int]]
    ) -> list[tuple[float, ...]]:
        """For every window what the acceptance rule measures of its rows; nothing of those it answers exactly."""
        measure, is_exact = self._rule.measure, self._rule.is_exact
        if measure is None:
            return [()] * len(verified)
        free = [i for i, (sequence, _) in enumerate(verified) if not is_exact(sequence.begin.request)]
        found = [[0.0] * (len(ids) if i in free else 0) for i, ids in enumerate(target_ids)]
        asked = [(i, row) for i in free for row in mismatches(verified[i][1], target_ids[i])]
        if asked:
            starts = [*itertools.accumulate(map(len, target_ids), initial=0)]
            values = measure(logits[[starts[i] + row for i, row in asked]])
            for (i, row), value in zip(asked, values, strict=True):
                found[i][row] = value
        return [*map(tuple, found)]

    def _share_out(self, due: Sequence[_Due]) -> tuple[list[Rows], list[_Due]]:
        """What this pass reads, and which windows it verifies."""
        verified = [(sequence, window) for sequence, window in due if not sequence.unread(window)]
        left = self._max_rows - sum(len(window.token_ids) for _, window in verified)
        texts: list[Rows] = []
        for sequence, window in due:
            unread = sequence.unread(window)
            if not unread or left <= 0:
                continue
            texts.append(Rows(sequence.cache, unread[:left], sequence.cache.length))
            left -= len(texts[-1].token_ids)
            if len(texts[-1].token_ids) == len(unread) and len(window.token_ids) <= left:
                verified.append((sequence, window))
                left -= len(window.token_ids)
        return texts, verified


def _choose(
    verified: Sequence[_Due], logits: Tensor
) -> tuple[list[tuple[int, ...]], list[bool], list[tuple[TokenLogprob, ...]]]:
    """For every window the target's token for each row, whether an end was written early, and what `logprobs` asks for.

    The tokens are read from the device at once.
    """
    sizes = [len(window.token_ids) for _, window in verified]
    ways = [path_tokens(window.token_ids, row_paths(window.parents)) for _, window in verified]
    by_window = torch.split(logits, sizes)
    chosen = [
        sequence.sampler.scores(own, own_ways).argmax(dim=-1)
        for (sequence, _), own, own_ways in zip(verified, by_window, ways, strict=True)
    ]
    flat = torch.cat(chosen).tolist() if chosen else []
    ends = [sum(sizes[: i + 1]) for i in range(len(sizes))]
    target_ids = [tuple(flat[end - size : end]) for size, end in zip(sizes, ends, strict=True)]
    closed = [False] * len(verified)
    for i, (sequence, _) in enumerate(verified):
        if sequence.sampler.guide is not None:
            target_ids[i], closed[i] = sequence.sampler.guide.settle(target_ids[i], ways[i])
    logprobs = []
    for (sequence, _), own, ids in zip(verified, by_window, target_ids, strict=True):
        count = sequence.begin.request.params.logprobs
        logprobs.append(() if count is None else token_logprobs(own, ids, count))
    return target_ids, closed, logprobs


def _texts(sequence: _Sequence, window: Window) -> list[Text]:
    """For each row of a window what stands before the token to be chosen."""
    ways = path_tokens(window.token_ids, row_paths(window.parents))
    return [Text(sequence.cache.token_ids, (window.token_ids[0], *way)) for way in ways]


def row_paths(parents: Sequence[int]) -> list[tuple[int, ...]]:
    """For each row, the rows from the first of the window down to itself."""
    paths: list[tuple[int, ...]] = []
    for row, parent in enumerate(parents):
        paths.append((row,) if parent == ROOT else (*paths[parent], row))
    return paths


def path_tokens(token_ids: Sequence[int], paths: Sequence[tuple[int, ...]]) -> list[tuple[int, ...]]:
    """For each row the tokens on its path, without the first of the window, which is committed."""
    found: list[tuple[int, ...]] = []
    for path in paths:
        found.append((*found[path[-2]], token_ids[path[-1]]) if len(path) > 1 else ())
    return found
