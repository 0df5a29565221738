"""`TargetWorker`: reads prompts, verifies windows and owns the sequences' KV on the target."""

from __future__ import annotations

import contextlib
import itertools
import logging
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeAlias, overload

import torch
from torch import Tensor

from langchain_card.core.messages import NO_TOKEN, ROOT, Begin, Reading, TokenLogprob, Verdict, Window
from langchain_card.core.request import Request
from langchain_card.core.walk import AcceptanceRule, ExactRule, children, mismatches
from langchain_card.engine.prefix_folder import BLOCK, PrefixFolder
from langchain_card.errors import InvalidInputError, is_device_failure
from langchain_card.ports import Constraint, Steering
from langchain_card.runtime.guide import Guide
from langchain_card.runtime.heads import ObservedRows, PassObserver, observed_windows, unread_on_failure
from langchain_card.runtime.kv_cache import KVCache
from langchain_card.runtime.rows import Rows
from langchain_card.runtime.runner import ModelRunner
from langchain_card.runtime.sampling import Sampler, choose, token_logprobs

log = logging.getLogger(__name__)

LOAD_BLOCKS = 4
"""Blocks of prefixes that one pass loads if other sequences wait for it: some 30 ms of the built-in target's."""


@dataclass(slots=True)
class _Sequence:
    begin: Begin
    cache: KVCache
    sampler: Sampler
    loading: Iterator[int] | None  # loads its prefix; None when no more can be loaded
    known: int  # tokens reused from earlier sequences
    cached: int  # the same with those that were loaded; 0 once that was reported
    verified: Window | None = None  # the last window, until the KV of its committed rows was kept

    def advance(self, window: Window, *, in_place: bool) -> None:
        """Keep the KV of the rows that were committed since the last window.

        A window that failed because memory ran out is sent again; the second call for it keeps nothing twice.
        """
        if self.verified is not None:
            kept = [self.verified.token_ids[row] for row in window.kept_rows]
            first = self.first_slot(self.verified, in_place=in_place)
            self.cache.keep([first + row for row in window.kept_rows], kept)
            self.sampler.commit([*kept[1:], window.token_ids[0]])
            self.verified = None
        assert self.sampler.length == window.start_position + 1, "the history is not that of the window"

    def first_slot(self, window: Window, *, in_place: bool) -> int:
        """Return the slot of a window's first row; the others follow."""
        return self.cache.pool.num_scratch + window.start_position if in_place else 0

    def unread(self, window: Window) -> Sequence[int]:
        """Return the tokens before the window that have no KV yet."""
        if self.cache.length == window.start_position:
            return ()
        return (*self.begin.request.prompt_ids, *self.begin.output_ids)[self.cache.length : window.start_position]

    def reading(self, window: Window) -> Reading:
        """Return how much of the text has been read. The window's first row counts as the last of its tokens."""
        total = window.start_position + 1 - self.known
        return Reading(window.request_id, self.cache.length - self.known, total)


_Due: TypeAlias = tuple[_Sequence, Window]


class TargetWorker:
    """A worker that runs the target model.

    A pass verifies the windows of all sequences whose text was read, and fills the rest of the row budget with unread
    text, oldest first. A window is verified in the pass that reads the last of the text before it. What a folder holds
    of a text is loaded before the text is read, a few blocks a pass if other sequences go on meanwhile. A text after
    which logits are not finite is neither reused nor saved.

    Args:
        runner: of the target; its scratch slots bound the rows of a window.
        set_threads: called with the schedule before each pass.
        max_rows: limit for the rows of a pass; windows of one pass must leave a row for each text to be read.
        in_place: windows are chains, and their rows are written to their final positions instead of scratch slots.
        constrain: makes the `Constraint` of a grammar.
        rule: of acceptance, which may measure the logits; the exact rule by default.
        steering: transforms the logits, if given.
        prefixes: texts are loaded from it and saved to it, if given.
        observer: sees each pass, if given.
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
        prefixes: PrefixFolder | None = None,
        observer: PassObserver | None = None,
    ) -> None:
        self._runner, self._constrain, self._observer = runner, constrain, observer
        self._set_threads = set_threads
        self._max_rows, self._in_place = max_rows, in_place
        self._rule: AcceptanceRule = rule or ExactRule()
        self._steering, self._prefixes = steering, prefixes
        self._begun: dict[int, Begin] = {}  # sequences without a window so far
        self._sequences: dict[int, _Sequence] = {}
        self._windows: dict[int, Window] = {}  # to be verified

    def begin(self, begin: Begin) -> None:
        """Register a sequence; its memory is allocated and its text read from the first window on."""
        self._begun[begin.request_id] = begin

    def end(self, request_id: int) -> None:
        """Free a sequence."""
        self._begun.pop(request_id, None)
        self._windows.pop(request_id, None)
        sequence = self._sequences.pop(request_id, None)
        if self._observer is not None:
            self._observer.end(request_id)
        if sequence is not None:
            self._runner.close(sequence.cache)
            if self._prefixes is not None:
                self._prefixes.save(sequence.cache)

    def verify(self, windows: Iterable[Window]) -> list[Verdict | Reading]:
        """Run one pass; return a verdict for every window whose text has been read, a reading for the others."""
        self._windows.update((window.request_id, window) for window in windows)
        try:
            with self._runner.on_stream():
                return self._verify()
        except BaseException:
            self._windows.clear()  # they are sent again
            raise

    def _verify(self) -> list[Verdict | Reading]:
        for request_id in [request_id for request_id in self._windows if request_id in self._begun]:
            self._sequences[request_id] = self._open(self._begun[request_id])
            del self._begun[request_id]
        due = [(self._sequences[request_id], window) for request_id, window in self._windows.items()]
        for sequence, window in due:
            sequence.advance(window, in_place=self._in_place)
        self._set_threads("parallel" if any(window.drafting for _, window in due) else "sequential")
        started, read = time.perf_counter(), self._load([sequence for sequence, _ in due])
        texts, verified = self._share_out([pair for pair in due if pair[0].loading is None])
        windows = [self._rows(*pair) for pair in verified]
        logits = self._runner.step([*texts, *windows])
        with contextlib.nullcontext() if self._observer is None else unread_on_failure(texts):
            if self._steering is not None and verified:
                histories = [history for pair in verified for history in _histories(*pair)]
                logits = apply_steering(self._steering, logits, histories)
            target_ids, closed, logprobs = _choose(verified, logits)
        if self._observer is not None:
            seen = observed_windows([window for _, window in verified], windows, target_ids)
            self._observe([*self._observed_texts(due, texts), *seen])
        by_window = torch.split(logits, [*map(len, target_ids)])
        measured = self._measured(verified, logits, target_ids)
        read += sum(len(rows.token_ids) for rows in texts)
        per_row = (time.perf_counter() - started) / (read + sum(map(len, target_ids)))
        verdicts = list[Verdict | Reading]()
        for i, (sequence, window) in enumerate(verified):
            verdicts.append(
                Verdict(
                    window.request_id,
                    window.step_id,
                    target_ids[i],
                    per_row * len(target_ids[i]),
                    logprobs[i],
                    read=read,
                    cached=sequence.cached,
                    together=len(verified),
                    closed=closed[i],
                    measured=measured[i],
                    label_logprobs=label_logprobs(by_window[i], window, sequence.begin.request),
                )
            )
            sequence.verified, sequence.cached = window, 0
            sequence.cache.damaged |= target_ids[i][0] == NO_TOKEN
            del self._windows[window.request_id]
        open_windows = self._windows.items()
        return [*verdicts, *(self._sequences[request_id].reading(window) for request_id, window in open_windows)]

    def _open(self, begin: Begin) -> _Sequence:
        text = (*begin.request.prompt_ids, *begin.output_ids)
        params, guide = begin.request.params, None
        if params.grammar:
            guide = Guide(self._constrain(params.grammar), begin.request.eos_ids, params.max_tokens)
        sampler = Sampler(params, begin.request.prompt_ids, guide)
        sampler.commit(begin.output_ids)
        cache = self._runner.open(text[:-1], params.tenant, params.adapter)
        self._reread(cache)
        loading = None if self._prefixes is None else self._prefixes.load(cache, text[:-1])
        return _Sequence(begin, cache, sampler, loading, known=cache.length, cached=cache.length)

    def _reread(self, cache: KVCache) -> None:
        """Drop the last position of a known prefix: what a head has there depends on the token that followed it."""
        if self._observer is not None:
            del cache.token_ids[-1:]

    def _load(self, sequences: Sequence[_Sequence]) -> int:
        """Load the next blocks of texts, of the oldest text first; return how many tokens.

        There are `LOAD_BLOCKS` in all, or more until one of the sequences has something for the model to do.
        """
        loaded = 0
        for sequence in sequences:
            while sequence.loading is not None:
                if loaded >= LOAD_BLOCKS * BLOCK and any(other.loading is None for other in sequences):
                    return loaded
                if (length := next(sequence.loading, None)) is None:
                    sequence.loading = None
                    self._reread(sequence.cache)
                else:
                    sequence.cached, loaded = length, loaded + BLOCK
        return loaded

    def _observe(self, batch: Sequence[ObservedRows]) -> None:
        """Show a pass to the observer; one that fails sees no more passes, and requests go on without it."""
        assert self._observer is not None
        try:
            self._observer.observe(batch)
        except Exception as error:
            if is_device_failure(error):
                raise
            log.exception("what reads the target's states failed; requests go on without it")
            self._observer.forget()
            self._observer = None

    def _observed_texts(self, due: Sequence[_Due], texts: Sequence[Rows]) -> list[ObservedRows]:
        """Return the texts of a pass for a head: each row with the token that follows."""
        sequences, observed = {id(sequence.cache): sequence for sequence, _ in due}, list[ObservedRows]()
        for rows in texts:
            begin = sequences[id(rows.cache)].begin
            text, after = (*begin.request.prompt_ids, *begin.output_ids), rows.start + 1
            observed.append(ObservedRows(begin.request.request_id, rows, text[after : after + len(rows.token_ids)]))
        return observed

    def _rows(self, sequence: _Sequence, window: Window) -> Rows:
        first = sequence.first_slot(window, in_place=self._in_place)
        paths = [tuple(first + row for row in path) for path in row_paths(window.parents)]
        return Rows(sequence.cache, window.token_ids, window.start_position, paths)

    def _measured(
        self, verified: Sequence[_Due], logits: Tensor, target_ids: Sequence[Sequence[int]]
    ) -> list[tuple[float, ...]]:
        """Return the acceptance rule's measurements of each window's rows; none for requests that it treats exactly."""
        measure, is_exact = self._rule.measure, self._rule.is_exact
        if measure is None:
            return [()] * len(verified)
        lossy = [i for i, (sequence, _) in enumerate(verified) if not is_exact(sequence.begin.request)]
        measured = [[0.0] * (len(ids) if i in lossy else 0) for i, ids in enumerate(target_ids)]
        differing = [(i, row) for i in lossy for row in mismatches(verified[i][1], target_ids[i])]
        if differing:
            starts = [*itertools.accumulate(map(len, target_ids), initial=0)]
            values = measure(logits[[starts[i] + row for i, row in differing]])
            for (i, row), value in zip(differing, values, strict=True):
                measured[i][row] = value
        return [*map(tuple, measured)]

    def _share_out(self, due: Sequence[_Due]) -> tuple[list[Rows], list[_Due]]:
        """Return the unread text that this pass reads, and the windows that it verifies."""
        verified = [(sequence, window) for sequence, window in due if not sequence.unread(window)]
        room = self._max_rows - sum(len(window.token_ids) for _, window in verified)
        texts: list[Rows] = []
        for sequence, window in due:
            unread = sequence.unread(window)
            if not unread or room <= 0:
                continue
            texts.append(Rows(sequence.cache, unread[:room], sequence.cache.length))
            room -= len(texts[-1].token_ids)
            if len(texts[-1].token_ids) == len(unread) and len(window.token_ids) <= room:
                verified.append((sequence, window))
                room -= len(window.token_ids)
        return texts, verified


def _choose(
    verified: Sequence[_Due], logits: Tensor
) -> tuple[list[tuple[int, ...]], list[bool], list[tuple[TokenLogprob, ...]]]:
    """Return for each window the target's tokens, whether a grammar forced an early end, and log-probabilities."""
    sizes = [len(window.token_ids) for _, window in verified]
    paths = [path_tokens(window.token_ids, row_paths(window.parents)) for _, window in verified]
    by_window = torch.split(logits, sizes)
    scores = [
        sequence.sampler.scores(window_logits, window_paths)
        for (sequence, _), window_logits, window_paths in zip(verified, by_window, paths, strict=True)
    ]
    flat = choose(scores)
    ends = [sum(sizes[: i + 1]) for i in range(len(sizes))]
    target_ids = [tuple(flat[end - size : end]) for size, end in zip(sizes, ends, strict=True)]
    closed = [False] * len(verified)
    for i, (sequence, _) in enumerate(verified):
        if sequence.sampler.guide is not None:
            target_ids[i], closed[i] = sequence.sampler.guide.settle(target_ids[i], paths[i])
    logprobs = []
    for (sequence, _), window_logits, ids in zip(verified, by_window, target_ids, strict=True):
        count = sequence.begin.request.params.logprobs
        known = [max(token, 0) for token in ids]  # those after damaged logits are never handed out
        logprobs.append(() if count is None else token_logprobs(window_logits, known, count))
    return target_ids, closed, logprobs


def label_logprobs(logits: Tensor, window: Window, request: Request) -> tuple[float, ...]:
    """Return the log-probability of each of a request's labels as the whole answer; NaN where logits are damaged.

    Args:
        logits: [rows, vocabulary] of the window, whose candidates are the tokens of the labels.
        window: the window.
        request: its request.
    """
    if not request.labels:
        return ()
    logs, child = logits.double().log_softmax(dim=-1), children(window)
    ends, sums = logs[:, [*request.eos_ids]].logsumexp(dim=-1), list[Tensor]()
    for label in request.labels:
        rows = [*itertools.accumulate(label, lambda row, token: child[row, token], initial=0)]
        sums.append(logs[rows[:-1], [*label]].sum() + ends[rows[-1]])
    return tuple(torch.stack(sums).tolist())


def _histories(sequence: _Sequence, window: Window) -> list[TokenHistory]:
    """Return for each row of a window the tokens before the one to be chosen."""
    paths = path_tokens(window.token_ids, row_paths(window.parents))
    return [TokenHistory(sequence.cache.token_ids, (window.token_ids[0], *path)) for path in paths]


def row_paths(parents: Sequence[int]) -> list[tuple[int, ...]]:
    """Return for each row the rows from the window's first down to the row itself."""
    paths: list[tuple[int, ...]] = []
    for row, parent in enumerate(parents):
        paths.append((row,) if parent == ROOT else (*paths[parent], row))
    return paths


def path_tokens(token_ids: Sequence[int], paths: Sequence[tuple[int, ...]]) -> list[tuple[int, ...]]:
    """Return for each row the tokens on its path, without the window's first, which is committed."""
    tokens: list[tuple[int, ...]] = []
    for path in paths:
        tokens.append((*tokens[path[-2]], token_ids[path[-1]]) if len(path) > 1 else ())
    return tokens


class TokenHistory(Sequence[int]):
    """The tokens before the next one: a view, not a copy.

    Args:
        committed: committed tokens; tokens appended later are not part of the view.
        path: candidates after them.
    """

    __slots__ = ("_committed", "_path", "_split")

    def __init__(self, committed: Sequence[int], path: tuple[int, ...]) -> None:
        self._committed, self._path, self._split = committed, path, len(committed)

    def __len__(self) -> int:
        return self._split + len(self._path)

    def __iter__(self) -> Iterator[int]:
        return itertools.chain(itertools.islice(self._committed, self._split), self._path)

    @overload
    def __getitem__(self, index: int) -> int: ...

    @overload
    def __getitem__(self, index: slice) -> list[int]: ...

    def __getitem__(self, index: int | slice) -> int | list[int]:
        if isinstance(index, slice):
            return [self[place] for place in range(*index.indices(len(self)))]
        place = range(len(self))[index]
        return self._committed[place] if place < self._split else self._path[place - self._split]


@torch.inference_mode()
def apply_steering(steering: Steering, logits: Tensor, histories: Sequence[TokenHistory]) -> Tensor:
    """Return the steered logits, [rows, vocabulary].

    Raises:
        InvalidInputError: steering returned another shape, or no floating-point tensor.
    """
    steered = steering(logits, histories)
    if not isinstance(steered, Tensor) or steered.shape != logits.shape or not steered.is_floating_point():
        got = f"{steered.dtype} {tuple(steered.shape)}" if isinstance(steered, Tensor) else type(steered).__name__
        raise InvalidInputError("steering", got, f"must return logits of the shape {tuple(logits.shape)}")
    return steered
