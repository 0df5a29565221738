"""The parts of a step: rows of sequences, and a layer's options of attention."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from langchain_card.runtime.kv_cache import KVCache

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class Rows:
    """The rows of one sequence in a step.

    Attributes:
        cache: the sequence's KV.
        token_ids: one token per row.
        start: position of the first row.
        paths: per row, the slots of its unverified ancestors from `start` on, ending with its own slot; the row's
            position is `start + len(path) - 1`. These are scratch slots, or the slots of the positions themselves if
            windows are chains (`exact="strict"`). None for the next tokens of a text, which go to their positions.
        features: [rows, features] of a head's rows (`heads.model`); None for other models.
        ask: whether the logits after a text's last token are wanted; those of unverified rows always are.
    """

    cache: KVCache
    token_ids: Sequence[int]
    start: int
    paths: Sequence[tuple[int, ...]] | None = None
    ask: bool = False
    features: Tensor | None = None

    @property
    def wanted(self) -> range:
        """The rows whose logits are wanted."""
        count = len(self.token_ids)
        return range(0 if self.paths is not None else count - self.ask, count)

    @property
    def positions(self) -> list[int]:
        """Absolute positions, [rows]."""
        if self.paths is None:
            return list(range(self.start, self.start + len(self.token_ids)))
        return [self.start + len(path) - 1 for path in self.paths]

    @property
    def seen_positions(self) -> list[int]:
        """Number of positions that each row sees, [rows]; those that this step writes are included."""
        if self.paths is None:
            return [position + 1 for position in self.positions]
        scratch = self.cache.pool.num_scratch
        return [self.start + sum(slot >= scratch for slot in path) for path in self.paths]

    @property
    def positions_before(self) -> list[int]:
        """Number of positions that each row sees before its path, [rows]; rows of a text count their own position."""
        if self.paths is None:
            return [position + 1 for position in self.positions]
        return [self.start] * len(self.paths)

    @property
    def slots(self) -> list[int]:
        """Slots of the pool that get the rows' keys and values, [rows]."""
        if self.paths is None:
            return [self.cache.first_position + position for position in self.positions]
        return [self.cache.base + path[-1] for path in self.paths]


class AttentionOptions(NamedTuple):
    """Options of attention in one layer of a model.

    Attributes:
        scaling: factor of the scores; None for 1 / sqrt(head_dim).
        window: number of keys that a row sees, its own included; None for all.
        softcap: bound of the scores (Gemma 2, arXiv 2408.00118), or None.
    """

    scaling: float | None
    window: int | None
    softcap: float | None
