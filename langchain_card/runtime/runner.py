"""`ModelRunner`: the only caller of a transformers model."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from langchain_card.runtime.attention import StepPlan, padded_keys, plan_rows
from langchain_card.runtime.kv_cache import KVCache

PREFILL_CHUNK = 512


class ModelRunner:
    """Runs one model over sequences that it keeps KV for.

    Args:
        model: a causal LM of transformers whose attention implementation is "card".
        max_len: positions per sequence.
        num_scratch: unverified rows per sequence.
    """

    def __init__(self, model: Any, *, max_len: int, num_scratch: int) -> None:
        self.model = model
        self.max_len = max_len
        self.num_scratch = num_scratch
        config = model.config.get_text_config()
        self.device: torch.device = model.device
        self.dtype: torch.dtype = model.dtype
        self._sliding_window: int | None = getattr(config, "sliding_window", None)
        self._kv_shape = {
            "layers": config.num_hidden_layers,
            "kv_heads": config.num_key_value_heads,
            "head_dim": getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads,
        }
        # A mask of four dimensions is taken as ready-made, which skips transformers' own mask building.
        self._no_mask = torch.zeros(1, 1, 1, 1, device=self.device)

    def open(self) -> KVCache:
        """KV for a new sequence, empty."""
        return KVCache(
            **self._kv_shape,
            max_len=padded_keys(self.max_len - 1),
            num_scratch=self.num_scratch,
            dtype=self.dtype,
            device=self.device,
        )

    @torch.inference_mode()
    def prefill(self, cache: KVCache, token_ids: Sequence[int]) -> None:
        """Appends `token_ids` to the committed positions, in chunks; computes no logits."""
        for start in range(0, len(token_ids), PREFILL_CHUNK):
            chunk = token_ids[start : start + PREFILL_CHUNK]
            first = cache.num_scratch + cache.length
            slots = torch.arange(first, first + len(chunk), device=self.device)
            self._forward(
                self.model.get_decoder(), chunk, range(cache.length, cache.length + len(chunk)), StepPlan(cache, slots)
            )
            cache.length += len(chunk)

    def follow(self, cache: KVCache, token_ids: Sequence[int]) -> Iterator[Tensor]:
        """Appends `token_ids` row by row, as decoding would: the bits are those of one step for each.

        Yields:
            Logits after each of the next tokens, [rows, vocabulary].
        """
        for start in range(0, len(token_ids), self.num_scratch):
            rows = token_ids[start : start + self.num_scratch]
            yield self.step(cache, rows, [tuple(range(i + 1)) for i in range(len(rows))])
            cache.keep(range(len(rows)))

    @torch.inference_mode()
    def step(self, cache: KVCache, token_ids: Sequence[int], paths: Sequence[tuple[int, ...]]) -> Tensor:
        """One forward pass over unverified rows.

        Args:
            cache: the sequence's KV; its length is unchanged.
            token_ids: one per row.
            paths: per row, the scratch slots of its unverified ancestors from the first unverified position on, ending
                with its own slot. A row's position is `cache.length + len(path) - 1`.

        Returns:
            Logits [rows, vocabulary], in the model's dtype.
        """
        plan = plan_rows(cache, paths, self._sliding_window, self.dtype)
        positions = [cache.length + len(path) - 1 for path in paths]
        logits: Tensor = self._forward(self.model, token_ids, positions, plan).logits[0]
        return logits

    def _forward(self, module: Any, token_ids: Sequence[int], positions: Sequence[int], plan: StepPlan) -> Any:
        return module(
            input_ids=torch.tensor([token_ids], device=self.device),
            position_ids=torch.tensor([list(positions)], device=self.device),
            attention_mask=self._no_mask,
            use_cache=False,
            step=plan,
        )
