"""The KV cache of one sequence: scratch slots for unverified rows first, then one slot per committed position.

```
slot   0 .. num_scratch-1 | num_scratch .. num_scratch+length-1 | .. tail ..
       rows not yet kept  | committed positions 0 .. length-1   | the path being attended to
```

A row is written once, into its scratch slot, and stays there until it is kept or freed. To attend, its path (the
unverified rows from the last committed position down to it) is laid out in the tail, so that keys always lie in order
of absolute position. Keeping rows copies them into committed positions; rejecting them costs nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


class KVCache:
    """Keys and values of one sequence for all layers.

    Attributes:
        data: [layers, 2, kv_heads, num_scratch + max_len, head_dim]; index 1 is keys, then values.
        length: committed positions.
        num_scratch: number of scratch slots.
    """

    def __init__(
        self,
        *,
        layers: int,
        kv_heads: int,
        head_dim: int,
        max_len: int,
        num_scratch: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        # Zeros, not empty: masked slots are multiplied by zero, and zero times a stray NaN is NaN. Pages are lazy.
        shape = (layers, 2, kv_heads, num_scratch + max_len, head_dim)
        self.data = torch.zeros(shape, dtype=dtype, device=device)
        self.num_scratch = num_scratch
        self.max_len = max_len
        self.length = 0

    def keep(self, slots: Sequence[int]) -> None:
        """Makes scratch rows the next committed positions, in the order given."""
        if slots:
            start = self.num_scratch + self.length
            index = torch.tensor(slots, device=self.data.device)
            self.data[:, :, :, start : start + len(slots)] = self.data.index_select(3, index)
            self.length += len(slots)


@dataclass(frozen=True, slots=True)
class RowGroup:
    """Rows of one step that lie on one path and read the same number of keys.

    Attributes:
        rows: indices of the rows in the step.
        tail_start: absolute slot where `tail_slots` are laid out; None when the tail already holds the path.
        tail_slots: [n] scratch slots to copy there.
        mask: [rows, 1, 1, keys], 0 where a key is visible and -inf elsewhere.
        sliding_mask: the same for layers with a sliding window; None where the model has none.
        keys: number of keys read: a function of the position alone, so that a row's arithmetic never changes.
    """

    rows: Tensor
    tail_start: int | None
    tail_slots: Tensor
    mask: Tensor
    sliding_mask: Tensor | None
    keys: int
