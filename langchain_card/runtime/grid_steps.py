"""Run steps over fixed grids of rows, as captured CUDA graphs or eagerly."""

from __future__ import annotations

import contextlib
import itertools
import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from langchain_card.errors import is_out_of_memory
from langchain_card.runtime.adapters import Adapters
from langchain_card.runtime.attention import ATTENTION_NAME, card_attention, register
from langchain_card.runtime.families import decoder_layers
from langchain_card.runtime.grid_attention import Bucket, Ladder, MaskedPlan, StepInputs, longest
from langchain_card.runtime.kv_cache import GridKV, KVPool
from langchain_card.runtime.rows import Rows
from langchain_card.runtime.taps import Taps
from langchain_card.runtime.transfer import to_device

log = logging.getLogger(__name__)

_capturing = threading.Lock()
"""Lock for one capture at a time in a process: other queued work could end up in the graph."""

WARM_UPS = 2
"""Number of runs before a capture, which choose kernels and allocate workspaces."""

MOST_PADDING = 2
"""Texts are read one by one if their common grid has more than so many times as many rows."""


class StepOutput(NamedTuple):
    """What a step computed of some rows.

    Attributes:
        logits: [rows, vocabulary] of the wanted rows.
        states: [taps, rows, features] of all rows; None without taps.
    """

    logits: Tensor
    states: Tensor | None

    def split(self, batch: Sequence[Rows]) -> list[StepOutput]:
        """Return the output of each entry of a batch whose rows these are."""
        logits = torch.split(self.logits, [len(rows.wanted) for rows in batch])
        if self.states is None:
            return [StepOutput(part, None) for part in logits]
        states = torch.split(self.states, [len(rows.token_ids) for rows in batch], dim=1)
        return [*map(StepOutput, logits, states)]

    def first(self, count: int) -> StepOutput:
        """Return the first rows."""
        return StepOutput(self.logits[:count], None if self.states is None else self.states[:, :count])

    def clone(self) -> StepOutput:
        """Return a copy, which further steps do not overwrite."""
        return StepOutput(self.logits.clone(), None if self.states is None else self.states.clone())


def joined(outputs: Sequence[StepOutput]) -> StepOutput:
    """Return one output for the rows of several, in order."""
    if len(outputs) == 1:
        return outputs[0]
    states = [output.states for output in outputs if output.states is not None]
    return StepOutput(torch.cat([output.logits for output in outputs]), torch.cat(states, dim=1) if states else None)


@dataclass(slots=True)
class _Captured:
    """A step's inputs, its graph, and what a replay computes of all rows of the grid."""

    inputs: StepInputs
    graph: torch.cuda.CUDAGraph
    output: StepOutput


class GridSteps:
    """A runner of one model over grids of rows.

    Args:
        model: a causal language model of transformers whose attention implementation is "card".
        pool: the sequences' KV.
        window: number of keys that a sliding layer sees, or None if the model has no such layer.
        width: rows of each sequence, if all steps use one bucket with all sequences and positions; None to use the
            smallest bucket for each step.
        adapters: of the model, which sequences may use.
        taps: of the model, or None.
    """

    def __init__(
        self,
        model: Any,
        pool: KVPool[GridKV],
        *,
        window: int | None,
        width: int | None = None,
        adapters: Adapters | None = None,
        taps: Taps | None = None,
    ) -> None:
        self._model, self._pool, self._window, self._adapters, self._taps = model, pool, window, adapters, taps
        self._only = None if width is None else Bucket(pool.num_seqs, width, pool.max_len)
        self._ladder = Ladder(pool)
        self._captured: dict[Bucket, _Captured] = {}
        self._inputs: dict[Bucket, StepInputs] = {}  # of steps that are not captured

    def run(self, batch: Sequence[Rows]) -> list[StepOutput]:
        """Run a batch with one entry per sequence; return the output of each, valid until the next step."""
        if self._only is None:
            bucket = self._ladder.bucket(batch)
            apart = [self._ladder.alone(rows) for rows in batch if rows.paths is None]
            if apart and bucket.seqs * bucket.width > MOST_PADDING * sum(each.width for each in apart):
                return [self._run([rows], each).clone() for rows, each in zip(batch, apart, strict=True)]
            return self._run(batch, bucket).split(batch)
        if longest(batch) <= self._only.width:
            return self._run(batch, self._only).split(batch)
        return self._run_pieces(batch, self._only)

    def _run_pieces(self, batch: Sequence[Rows], bucket: Bucket) -> list[StepOutput]:
        """Run texts that are longer than a grid."""
        found: dict[int, list[StepOutput]] = {id(rows.cache): [] for rows in batch}
        for piece in _pieces(batch, bucket.width):
            outputs = self._run(piece, bucket).clone().split(piece)  # the next piece overwrites them
            for rows, output in zip(piece, outputs, strict=True):
                found[id(rows.cache)].append(output)
        return [joined(found[id(rows.cache)]) for rows in batch]

    def _run(self, batch: Sequence[Rows], bucket: Bucket) -> StepOutput:
        captured = self._captured.get(bucket)
        inputs = self._inputs_of(bucket) if captured is None else captured.inputs
        wanted = inputs.fill(batch)
        fixed = captured is not None or (self._only is not None and bool(wanted))  # then the head runs over all rows
        if captured is not None:
            captured.graph.replay()
            logits, states = captured.output
        else:
            features = self._features(batch, bucket)
            logits, states = self._forward(inputs, bucket, None if fixed else len(wanted), features=features)
        if fixed and wanted != [*range(len(logits))]:
            logits = logits.index_select(0, inputs.rows(len(wanted)))
        if states is not None:
            states = states.index_select(1, _places(batch, bucket, states.device))
        return StepOutput(logits, states)

    def _features(self, batch: Sequence[Rows], bucket: Bucket) -> Tensor | None:
        """Return the features of a head's rows in the grid, [1, seqs * width, features]; None for other models."""
        found = [rows.features for rows in batch if rows.features is not None]
        if not found:
            return None
        grid = found[0].new_zeros(bucket.seqs * bucket.width, found[0].shape[1])
        return grid.index_copy(0, _places(batch, bucket, grid.device), torch.cat(found))[None]

    def _inputs_of(self, bucket: Bucket) -> StepInputs:
        """Return the inputs of a bucket, which are kept: pinned memory is slow to allocate."""
        if bucket not in self._inputs:
            self._inputs[bucket] = StepInputs(self._pool, bucket, self._window)
        return self._inputs[bucket]

    def capture(self, stream: torch.cuda.Stream, report: Callable[[int, int], None]) -> None:
        """Capture the steps that recur; others run eagerly.

        A step for which memory runs out is left out. Any other failure ends this. Either is logged.

        Args:
            stream: where the steps run.
            report: called before each capture with the number of steps that are captured, and of all.
        """
        buckets = self._ladder.captured if self._only is None else [self._only]
        room: StepOutput | None = None  # shared by all graphs, as is their memory, because one runs at a time
        memory = None
        for done, bucket in enumerate(buckets):
            report(done, len(buckets))
            try:
                with _capturing, torch.inference_mode(), torch.cuda.stream(stream):
                    inputs = StepInputs(self._pool, bucket, self._window)
                    inputs.fill(())
                    for _ in range(WARM_UPS):
                        output = self._forward(inputs, bucket, None)
                    room = output.clone() if room is None else room
                    stream.synchronize()
                    graph, out = torch.cuda.CUDAGraph(), room.first(len(output.logits))
                    # The stream is passed because torch's default may belong to another device.
                    with torch.cuda.graph(graph, pool=memory, stream=stream, capture_error_mode="thread_local"):
                        out.logits.copy_(self._forward(inputs, bucket, None, out.states).logits)
                    memory = graph.pool()
            except Exception as error:
                log.warning("steps run eagerly, several times slower: no CUDA graph of %s (%s)", bucket, error)
                if not is_out_of_memory(error):
                    return
                continue
            self._captured[bucket] = _Captured(inputs, graph, out)

    def _forward(
        self,
        inputs: StepInputs,
        bucket: Bucket,
        wanted: int | None,
        states: Tensor | None = None,
        features: Tensor | None = None,
    ) -> StepOutput:
        """Return logits of so many wanted rows, or of all rows; and the states of all rows, written to `states`."""
        call: dict[str, Any] = {
            "input_ids": inputs.numbers[0].reshape(1, -1),
            "position_ids": inputs.numbers[1].reshape(1, -1),
            "attention_mask": inputs.no_mask,
            "use_cache": False,
            "step": MaskedPlan.of(inputs, self._pool, bucket, self._window),
        }
        if features is not None:
            call["features"] = features
        rows = inputs.numbers[4].flatten()
        with contextlib.ExitStack() as on:
            if self._adapters is not None:
                on.enter_context(self._adapters.on(rows))
            if self._taps is not None:
                on.enter_context(self._taps.on(states))
            if wanted == 0:
                self._model.get_decoder()(**call)
                logits = torch.empty(0, self._model.config.get_text_config().vocab_size, device=rows.device)
            else:
                keep = 0 if wanted is None else inputs.rows(wanted)
                logits = self._model(**call, logits_to_keep=keep).logits[0]
        return StepOutput(logits, None if self._taps is None else self._taps.states)


def compile_layers(model: Any) -> None:
    """Compile the decoder layers, which are alike, once for all numbers of rows, but leave attention uncompiled.

    Attention depends on the layer's index (which KV it reads), so that each layer would become a program of its own.
    """
    name = f"{ATTENTION_NAME}-apart"
    register(name, torch.compiler.disable(card_attention))  # type: ignore[no-untyped-call]
    model.set_attn_implementation(name)
    for layer in decoder_layers(model):
        layer.compile(dynamic=True)


def _places(batch: Sequence[Rows], bucket: Bucket, device: torch.device) -> Tensor:
    """Return the places of a batch's rows in a grid, on the device."""
    starts = [(rows.cache.index - bucket.first) * bucket.width for rows in batch]
    places = [range(start, start + len(rows.token_ids)) for start, rows in zip(starts, batch, strict=True)]
    return to_device(torch.tensor([*itertools.chain(*places)]), device)


def _pieces(batch: Sequence[Rows], width: int) -> Iterator[list[Rows]]:
    """Yield a batch in pieces, its texts cut so that no sequence has more rows than `width`."""
    for first in range(0, longest(batch), width):
        piece = []
        for rows in batch:
            token_ids = rows.token_ids[first : first + width]
            if token_ids:
                last = first + width >= len(rows.token_ids)
                features = None if rows.features is None else rows.features[first : first + width]
                changes: dict[str, Any] = {"token_ids": token_ids, "features": features, "ask": rows.ask and last}
                piece.append(replace(rows, start=rows.start + first, **changes))
        yield piece
