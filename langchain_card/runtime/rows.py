"""What a step consists of: rows of sequences, and what a layer wants of its attention."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from langchain_card.runtime.kv_cache import KVCache


@dataclass(frozen=True, slots=True)
class Rows:
    """What one sequence contributes to a step.

    Attributes:
        cache: the sequence's KV.
        token_ids: one per row.
        start: position of the first row.
        paths: per row, the slots of its unverified ancestors from `start` on, ending with its own; a row's position is
            `start + len(path) - 1`. They are scratch slots, or those of the positions themselves where windows are
            chains (`exact="strict"`). None for the next tokens of a text, which go to their positions.
        ask: whether the logits after a text's last token are wanted; those of unverified rows always are.
    """

    cache: KVCache
    token_ids: Sequence[int]
    start: int
    paths: Sequence[tuple[int, ...]] | None = None
    ask: bool = False

    @property
    def wanted(self) -> range:
        """Rows whose logits are wanted."""
        count = len(self.token_ids)
        return range(0 if self.paths is not None else count - self.ask, count)

    @property
    def positions(self) -> list[int]:
        """[rows] absolute positions."""
        if self.paths is None:
            return list(range(self.start, self.start + len(self.token_ids)))
        return [self.start + len(path) - 1 for path in self.paths]

    @property
    def seen_positions(self) -> list[int]:
        """[rows] how many committed positions each row sees, those that rows of this step are written to included."""
        if self.paths is None:
            return [position + 1 for position in self.positions]
        scratch = self.cache.pool.num_scratch
        return [self.start + sum(slot >= scratch for slot in path) for path in self.paths]

    @property
    def positions_before(self) -> list[int]:
        """[rows] positions that each row sees before its path; for the rows of a text all, their own included."""
        if self.paths is None:
            return [position + 1 for position in self.positions]
        return [self.start] * len(self.paths)

    @property
    def slots(self) -> list[int]:
        """[rows] where in the pool each row's key and value go."""
        if self.paths is None:
            return [self.cache.first_position + position for position in self.positions]
        return [self.cache.base + path[-1] for path in self.paths]


class Heads(NamedTuple):
    """What a model's layer wants of its attention.

    Attributes:
        scaling: of the scores; None for 1 / sqrt(head_dim).
        window: keys that the layer sees, the row's own included; None for all.
        softcap: bound that the scores are bent to (Gemma 2, arXiv 2408.00118), or None.
    """

    scaling: float | None
    window: int | None
    softcap: float | None
