"""`ModelRunner`: the only caller of a transformers model's forward pass."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, replace
from typing import Any

import torch
from torch import Tensor

from langchain_card.runtime.adapters import NONE, Adapters
from langchain_card.runtime.families import KVShape, decoder_layers, kv_shape
from langchain_card.runtime.grid_steps import GridSteps, StepOutput, joined
from langchain_card.runtime.kv_cache import GridKV, KVCache, KVPool, TensorKV
from langchain_card.runtime.rows import Rows
from langchain_card.runtime.taps import Taps

TEXT_CHUNK = 512
"""Largest number of tokens that `prefill` reads in one step."""


class ModelRunner:
    """A runner of one model over sequences, with their KV.

    Args:
        model: a causal language model of transformers whose attention implementation is "card".
        max_len: positions per sequence.
        num_scratch: unverified rows per sequence.
        num_seqs: sequences open at once.
        execution: execution of steps over fixed grids: "eager", "graphs" (captured on CUDA) or "compiled" (graphs with
            compiled layers). None for "graphs" on CUDA, and for steps without a grid on a CPU.
        width: rows of each sequence in every step, padded; None for no padding. A width makes steps of all schedules
            the same arithmetic, in any dtype (`exact="strict"`).
        integer_kv: whether keys and values are integers (`IntegerKV`); for float32 activations, without grids.
        adapters: of the model, which sequences may use.
        taps: of the model, or None.
        target: runner whose KV and stream it shares: a head's layers are further layers of it. None for its own.
        more_layers: number of layers that heads add to the pool.
        on_capture: called before each capture with the number of steps that are captured, and of all.
        priority: of the work on CUDA, -1 for work that goes first where two models share a device.

    Attributes:
        pool: the sequences' KV.
        states: [taps, rows, features] of all rows of the last step, in order, if there are taps. On CUDA they are valid
            until the next step.
    """

    def __init__(
        self,
        model: Any,
        *,
        max_len: int,
        num_scratch: int,
        num_seqs: int = 1,
        execution: str | None = None,
        width: int | None = None,
        integer_kv: bool = False,
        adapters: Adapters | None = None,
        taps: Taps | None = None,
        target: ModelRunner | None = None,
        more_layers: int = 0,
        on_capture: Callable[[int, int], None] = lambda done, total: None,
        priority: int = 0,
    ) -> None:
        self.model = model
        self.max_len = max_len
        self.num_scratch, self._adapters, self._taps = num_scratch, adapters, taps
        self.states: Tensor | None = None
        config = model.config.get_text_config()
        self.device: torch.device = model.device
        self.dtype: torch.dtype = model.dtype
        self._sliding_window: int | None = getattr(config, "sliding_window", None)
        devices = [next(layer.parameters()).device for layer in decoder_layers(model)]
        devices += [self.device] * more_layers
        shape, in_grids = kv_shape(config), width is not None or execution is not None or self.device.type == "cuda"
        shape = replace(shape, layers=shape.layers + more_layers)
        # Attention over a number of keys that is no multiple of 8 has no fast kernel on CUDA.
        store, align = _floats(shape, devices, self.dtype, num_seqs if in_grids else None), 8 if in_grids else 1
        if integer_kv and not in_grids:
            from langchain_card.runtime.cpu.integer_kv import BLOCK_SLOTS, IntegerKV  # imports numba

            store, align = functools.partial(IntegerKV, **asdict(shape)), BLOCK_SLOTS
        self._is_head = target is not None
        self._stream: Any = None
        self.pool: KVPool[Any]
        if target is not None:
            self.pool, self._stream = target.pool, target._stream
        else:
            self.pool = KVPool(
                store, max_len=max_len, num_scratch=num_scratch, num_seqs=num_seqs, compact=in_grids, align=align
            )
            if self.device.type == "cuda":
                self._stream = torch.cuda.Stream(self.device, priority=priority)  # type: ignore[no-untyped-call]
        self._grids: GridSteps | None = None
        for device in {*devices, self.device}:
            _finish_writes(device)
        if in_grids:
            self._grids = GridSteps(
                model, self.pool, window=self._sliding_window, width=width, adapters=adapters, taps=taps
            )
            if self._stream is not None and execution != "eager" and {*devices} == {self.device}:
                self._grids.capture(self._stream, on_capture)
        else:
            from langchain_card.runtime.cpu import plan  # imports numba, which grids do not need

            plan.prepare(self.pool.kv)
            self._row_stable = plan
        # A mask of four dimensions is taken as ready-made, which skips transformers' own mask building.
        self._no_mask = torch.zeros(1, 1, 1, 1, device=self.device)

    @property
    def in_grids(self) -> bool:
        """Whether steps are over fixed grids."""
        return self._grids is not None

    def open(self, token_ids: Sequence[int] = (), tenant: str = "", adapter: str = "") -> KVCache:
        """Open a sequence; a prefix that is known from the tenant's texts with this adapter is committed already."""
        with self.on_stream():
            if self._adapters is None:
                return self.pool.open(token_ids, tenant)
            owner = f"{tenant}\n{self._adapters.digest(adapter)}" if adapter else tenant  # no tenant has a line break
            cache = self.pool.open(token_ids, owner)
            cache.adapter = self._adapters.number(adapter)
            return cache

    def close(self, cache: KVCache) -> None:
        """Close a sequence."""
        with self.on_stream():
            self.pool.close(cache)

    def prefill(self, cache: KVCache, token_ids: Sequence[int]) -> None:
        """Append `token_ids` to the committed positions, in chunks, without logits."""
        for start in range(0, len(token_ids), TEXT_CHUNK):
            self.step([Rows(cache, token_ids[start : start + TEXT_CHUNK], cache.length)])

    def synchronize(self) -> None:
        """Wait until the device has done all steps, so that their time can be measured."""
        if self._stream is not None:
            self._stream.synchronize()

    @contextlib.contextmanager
    def on_stream(self) -> Iterator[None]:
        """Queue what the calling thread does on this model's CUDA stream, in order with its work before and after."""
        caller = None if self._stream is None else torch.cuda.current_stream(self.device)
        if caller is None or caller == self._stream:
            yield
            return
        self._stream.wait_stream(caller)
        try:
            with torch.cuda.stream(self._stream):
                yield
        finally:  # what the caller frees after a failure may still be read
            caller.wait_stream(self._stream)

    def follow(self, cache: KVCache, token_ids: Sequence[int]) -> Iterator[Tensor]:
        """Append `token_ids`, some rows at a time.

        Yields:
            Logits after each of the next tokens, [rows, vocabulary].
        """
        for start in range(0, len(token_ids), self.num_scratch):
            chunk = token_ids[start : start + self.num_scratch]
            yield self.step([Rows(cache, chunk, cache.length, [tuple(range(i + 1)) for i in range(len(chunk))])])
            cache.keep(range(len(chunk)), chunk)

    @torch.inference_mode()
    def step(self, batch: Sequence[Rows]) -> Tensor:
        """Run one forward pass over rows of any sequences, and commit the texts among them.

        With grids, texts and windows take one pass each.

        Returns:
            Logits [rows, vocabulary] of the wanted rows, in order and in the model's dtype. On CUDA they are to be used
            within `on_stream`.
        """
        with self.on_stream():
            logits = self._any_rows(batch) if self._grids is None else self._in_grids(batch, self._grids)
        for rows in batch:
            if rows.paths is None and not self._is_head:
                rows.cache.token_ids += rows.token_ids
        return logits

    def _in_grids(self, batch: Sequence[Rows], grids: GridSteps) -> Tensor:
        found: dict[int, StepOutput] = {}
        for group in ([rows for rows in batch if rows.paths is None], [rows for rows in batch if rows.paths]):
            if group:
                found |= {id(rows): output for rows, output in zip(group, grids.run(group), strict=True)}
        logits, self.states = joined([found[id(rows)] for rows in batch])
        return logits

    def _any_rows(self, batch: Sequence[Rows]) -> Tensor:
        wanted: list[int] = []
        num_rows = 0
        for rows in batch:
            wanted += (num_rows + row for row in rows.wanted)
            num_rows += len(rows.token_ids)
        inputs = {
            "input_ids": torch.tensor([[token for rows in batch for token in rows.token_ids]]),
            "position_ids": torch.tensor([[position for rows in batch for position in rows.positions]]),
            "attention_mask": self._no_mask,
            "use_cache": False,
            "step": self._row_stable.plan_step(batch),
        }
        if batch[0].features is not None:
            inputs["features"] = torch.cat([rows.features for rows in batch if rows.features is not None])[None]
        with self._with_adapters(batch), self._with_taps():
            if not wanted:
                self.model.get_decoder()(**inputs)
                return torch.empty(0, self.model.config.get_text_config().vocab_size)
            keep = 0 if len(wanted) == num_rows else torch.tensor(wanted)
            logits: Tensor = self.model(**inputs, logits_to_keep=keep).logits[0]
        return logits

    @contextlib.contextmanager
    def _with_taps(self) -> Iterator[None]:
        """Keep the states of a pass."""
        if self._taps is None:
            yield
            return
        with self._taps.on():
            yield
        self.states = self._taps.states

    def _with_adapters(self, batch: Sequence[Rows]) -> contextlib.AbstractContextManager[None]:
        """Return a context for a pass in which each row uses the adapter of its sequence."""
        if self._adapters is None or all(rows.cache.adapter == NONE for rows in batch):
            return contextlib.nullcontext()
        numbers = [rows.cache.adapter for rows in batch for _ in rows.token_ids]
        return self._adapters.on(torch.tensor(numbers))


def _finish_writes(device: torch.device) -> None:
    """Wait until weights and KV are written, by this thread and those that loaded them: other threads read them."""
    if device.type == "cuda":
        for stream in (torch.cuda.current_stream(device), torch.cuda.default_stream(device)):
            stream.synchronize()


def _floats(
    shape: KVShape, devices: Sequence[torch.device], dtype: torch.dtype, num_seqs: int | None
) -> Callable[[int], Any]:
    """Return a maker of storage, in the model's type for grids of `num_seqs` sequences, else at least in float32."""
    make: Callable[..., Any] = TensorKV if num_seqs is None else functools.partial(GridKV, num_seqs=num_seqs)
    dtype = torch.promote_types(dtype, torch.float32) if num_seqs is None else dtype
    return functools.partial(make, devices=devices, kv_heads=shape.kv_heads, head_dim=shape.head_dim, dtype=dtype)
