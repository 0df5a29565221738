"""Run steps over fixed grids of rows, as captured CUDA graphs or eagerly."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from langchain_card.errors import is_out_of_memory
from langchain_card.runtime.adapters import Adapters
from langchain_card.runtime.attention import ATTENTION_NAME, card_attention, register
from langchain_card.runtime.families import decoder_layers
from langchain_card.runtime.grid_attention import Bucket, Ladder, MaskedPlan, StepInputs, longest
from langchain_card.runtime.kv_cache import GridKV, KVPool
from langchain_card.runtime.rows import Rows

log = logging.getLogger(__name__)

_capturing = threading.Lock()
"""Lock for one capture at a time in a process: other queued work could end up in the graph."""

WARM_UPS = 2
"""Number of runs before a capture, which choose kernels and allocate workspaces."""

MOST_PADDING = 2
"""Texts are read one by one if their common grid has more than so many times as many rows."""


@dataclass(slots=True)
class _Captured:
    """A step's inputs, its graph, and the logits that a replay computes, [rows, vocabulary]."""

    inputs: StepInputs
    graph: torch.cuda.CUDAGraph
    logits: Tensor


class GridSteps:
    """A runner of one model over grids of rows.

    Args:
        model: a causal language model of transformers whose attention implementation is "card".
        pool: the sequences' KV.
        window: number of keys that a sliding layer sees, or None if the model has no such layer.
        width: rows of each sequence, if all steps use one bucket with all sequences and positions; None to use the
            smallest bucket for each step.
        adapters: of the model, which sequences may use.
    """

    def __init__(
        self,
        model: Any,
        pool: KVPool[GridKV],
        *,
        window: int | None,
        width: int | None = None,
        adapters: Adapters | None = None,
    ) -> None:
        self._model, self._pool, self._window, self._adapters = model, pool, window, adapters
        self._only = None if width is None else Bucket(pool.num_seqs, width, pool.max_len)
        self._ladder = Ladder(pool)
        self._captured: dict[Bucket, _Captured] = {}
        self._inputs: dict[Bucket, StepInputs] = {}  # of steps that are not captured

    def run(self, batch: Sequence[Rows]) -> Tensor:
        """Run a batch with one entry per sequence; return wanted logits [rows, vocabulary], valid until the next."""
        if self._only is None:
            bucket = self._ladder.bucket(batch)
            apart = [self._ladder.alone(rows) for rows in batch if rows.paths is None]
            if apart and bucket.seqs * bucket.width > MOST_PADDING * sum(each.width for each in apart):
                pairs = zip(batch, apart, strict=True)
                return torch.cat([self._run([rows], each).clone() for rows, each in pairs])
            return self._run(batch, bucket)
        if longest(batch) <= self._only.width:
            return self._run(batch, self._only)
        return self._run_pieces(batch, self._only)

    def _run_pieces(self, batch: Sequence[Rows], bucket: Bucket) -> Tensor:
        """Run texts that are longer than a grid."""
        found: dict[int, list[Tensor]] = {id(rows.cache): [] for rows in batch}
        for piece in _pieces(batch, bucket.width):
            logits = self._run(piece, bucket).clone()  # the next piece overwrites them
            for rows, part in zip(piece, torch.split(logits, [len(rows.wanted) for rows in piece]), strict=True):
                found[id(rows.cache)].append(part)
        return torch.cat([part for rows in batch for part in found[id(rows.cache)]])

    def _run(self, batch: Sequence[Rows], bucket: Bucket) -> Tensor:
        captured = self._captured.get(bucket)
        inputs = self._inputs_of(bucket) if captured is None else captured.inputs
        wanted = inputs.fill(batch)
        if captured is not None:
            captured.graph.replay()
            logits = captured.logits
        elif self._only is None or not wanted:
            return self._forward(inputs, bucket, len(wanted))
        else:  # fixed shapes: the head runs over all rows
            logits = self._forward(inputs, bucket, None)
        return logits if wanted == [*range(len(logits))] else logits.index_select(0, inputs.rows(len(wanted)))

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
        scores, memory = None, None  # shared by all graphs, because one runs at a time
        for done, bucket in enumerate(buckets):
            report(done, len(buckets))
            try:
                with _capturing, torch.inference_mode(), torch.cuda.stream(stream):
                    inputs = StepInputs(self._pool, bucket, self._window)
                    inputs.fill(())
                    for _ in range(WARM_UPS):
                        logits = self._forward(inputs, bucket, None)
                    scores = torch.empty_like(logits) if scores is None else scores
                    stream.synchronize()
                    graph, out = torch.cuda.CUDAGraph(), scores[: len(logits)]
                    # The stream is passed because torch's default may belong to another device.
                    with torch.cuda.graph(graph, pool=memory, stream=stream, capture_error_mode="thread_local"):
                        out.copy_(self._forward(inputs, bucket, None))
                    memory = graph.pool()
            except Exception as error:
                log.warning("steps run eagerly, several times slower: no CUDA graph of %s (%s)", bucket, error)
                if not is_out_of_memory(error):
                    return
                continue
            self._captured[bucket] = _Captured(inputs, graph, out)

    def _forward(self, inputs: StepInputs, bucket: Bucket, wanted: int | None) -> Tensor:
        """Return logits of so many wanted rows, or of all rows."""
        call = {
            "input_ids": inputs.numbers[0].reshape(1, -1),
            "position_ids": inputs.numbers[1].reshape(1, -1),
            "attention_mask": inputs.no_mask,
            "use_cache": False,
            "step": MaskedPlan.of(inputs, self._pool, bucket, self._window),
        }
        rows = inputs.numbers[4].flatten()
        with contextlib.nullcontext() if self._adapters is None else self._adapters.on(rows):
            if wanted == 0:
                self._model.get_decoder()(**call)
                return torch.empty(0, self._model.config.get_text_config().vocab_size, device=rows.device)
            keep = 0 if wanted is None else inputs.rows(wanted)
            logits: Tensor = self._model(**call, logits_to_keep=keep).logits[0]
        return logits


def compile_layers(model: Any) -> None:
    """Compile the decoder layers, which are alike, once for all numbers of rows, but leave attention uncompiled.

    Attention depends on the layer's index (which KV it reads), so that each layer would become a program of its own.
    """
    name = f"{ATTENTION_NAME}-apart"
    register(name, torch.compiler.disable(card_attention))  # type: ignore[no-untyped-call]
    model.set_attn_implementation(name)
    for layer in decoder_layers(model):
        layer.compile(dynamic=True)


def _pieces(batch: Sequence[Rows], width: int) -> Iterator[list[Rows]]:
    """Yield a batch in pieces, its texts cut so that no sequence has more rows than `width`."""
    for first in range(0, longest(batch), width):
        piece = []
        for rows in batch:
            token_ids = rows.token_ids[first : first + width]
            if token_ids:
                last = first + width >= len(rows.token_ids)
                piece.append(replace(rows, token_ids=token_ids, start=rows.start + first, ask=rows.ask and last))
        yield piece
