"""Run steps over fixed grids of rows, as captured CUDA graphs or eagerly."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from langchain_card.runtime.attention import ATTENTION_NAME, card_attention, register
from langchain_card.runtime.families import decoder_layers
from langchain_card.runtime.grid_attention import MAX_SCORED_ROWS, Bucket, MaskedPlan, StepInputs, longest
from langchain_card.runtime.kv_cache import KVPool, TensorKV
from langchain_card.runtime.rows import Rows

log = logging.getLogger(__name__)

_capturing = threading.Lock()
"""Lock for one capture at a time in a process: other queued work could end up in the graph."""

WARM_UPS = 2
"""Number of runs before a capture, which choose kernels and allocate workspaces."""


@dataclass(slots=True)
class _Grid:
    """The buffers of a bucket, and its graph once captured."""

    inputs: StepInputs
    graph: torch.cuda.CUDAGraph | None = None
    logits: Tensor | None = None


class GridSteps:
    """A runner of one model over grids of rows.

    Args:
        model: a causal language model of transformers whose attention implementation is "card".
        pool: the sequences' KV.
        window: number of keys that a sliding layer sees, or None if the model has no such layer.
        capture: whether to replay CUDA graphs. After the first failure steps run eagerly, with one warning.
        width: rows of each sequence, if all steps use one bucket with all sequences and positions; None to use the
            smallest bucket for each step.
    """

    def __init__(
        self, model: Any, pool: KVPool[TensorKV], *, window: int | None, capture: bool, width: int | None = None
    ) -> None:
        self._model, self._pool, self._window, self._capture = model, pool, window, capture
        self._only = None if width is None else Bucket(pool.num_seqs, width, pool.max_len)
        self._grids: dict[tuple[Bucket, bool], _Grid] = {}  # by bucket, and whether there are logits
        self._memory: Any = None  # shared by all graphs: one runs at a time

    def run(self, batch: Sequence[Rows]) -> Tensor:
        """Run a batch with one entry per sequence; return wanted logits [rows, vocabulary], valid until the next."""
        if self._only is not None:
            return torch.cat([self._run(piece, self._only) for piece in _pieces(batch, self._only.width)])
        return self._run(batch, Bucket.of(batch))

    def _run(self, batch: Sequence[Rows], bucket: Bucket) -> Tensor:
        if self._only is None and longest(batch) > MAX_SCORED_ROWS:  # a text, whose shape rarely recurs
            inputs = StepInputs(self._pool, bucket, self._window)
            return self._forward(inputs, bucket, _wanted(batch, inputs.fill(batch)))
        scored = any(rows.wanted for rows in batch)
        grid = self._grids.get((bucket, scored))
        if grid is None:
            grid = self._grids[bucket, scored] = _Grid(StepInputs(self._pool, bucket, self._window))
        wanted = _wanted(batch, grid.inputs.fill(batch))
        if self._capture and grid.graph is None:
            self._try_capture(grid, bucket, None if scored else ())
        if grid.graph is not None:
            grid.graph.replay()
        elif self._only is None or not scored:
            return self._forward(grid.inputs, bucket, wanted)
        else:  # fixed shapes: the head runs over all rows
            grid.logits = self._forward(grid.inputs, bucket, None)
        assert grid.logits is not None
        return grid.logits if wanted == [*range(len(grid.logits))] else grid.logits[wanted]

    def _forward(self, inputs: StepInputs, bucket: Bucket, wanted: Sequence[int] | None) -> Tensor:
        """Return logits of the wanted rows, or of all."""
        call = {
            "input_ids": inputs.numbers[0].reshape(1, -1),
            "position_ids": inputs.numbers[1].reshape(1, -1),
            "attention_mask": inputs.no_mask,
            "use_cache": False,
            "step": MaskedPlan.of(inputs, self._pool, bucket, self._window),
        }
        if wanted is not None and not wanted:
            self._model.get_decoder()(**call)
            return torch.empty(0, self._model.config.get_text_config().vocab_size, device=inputs.numbers.device)
        keep = 0 if wanted is None else torch.tensor(wanted, device=inputs.numbers.device)
        logits: Tensor = self._model(**call, logits_to_keep=keep).logits[0]
        return logits

    def _try_capture(self, grid: _Grid, bucket: Bucket, wanted: Sequence[int] | None) -> None:
        try:
            with _capturing:
                for _ in range(WARM_UPS):
                    self._forward(grid.inputs, bucket, wanted)
                device = self._pool.kv.layers[0].device
                torch.cuda.synchronize(device)
                # The stream is passed because torch's default may belong to another device.
                graph, stream = torch.cuda.CUDAGraph(), torch.cuda.current_stream(device)
                with torch.cuda.graph(graph, pool=self._memory, stream=stream, capture_error_mode="thread_local"):
                    grid.logits = self._forward(grid.inputs, bucket, wanted)
                grid.graph, self._memory = graph, graph.pool()
        except Exception as error:
            self._capture, grid.graph = False, None
            log.warning("steps run eagerly, several times slower: no CUDA graph of %s (%s)", bucket, error)


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


def _wanted(batch: Sequence[Rows], where: Sequence[int]) -> list[int]:
    """Return the rows of the grid whose logits are wanted, in the batch's order."""
    wanted: list[int] = []
    first = 0
    for rows in batch:
        wanted += (where[first + row] for row in rows.wanted)
        first += len(rows.token_ids)
    return wanted
