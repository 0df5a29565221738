"""Attention over integer keys and values: a row's bits depend on what it sees, and on nothing else in its blocks."""

from __future__ import annotations

import numpy as np
import pytest

from langchain_card.runtime.cpu import block_attention
from langchain_card.runtime.cpu.integer_kv import BLOCK_SLOTS, IntegerKV, of_layer
from langchain_card.runtime.cpu.row_attention import Heads, Seen
from langchain_card.runtime.cpu.team import cores

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize("softcap", [0.0, 30.0])
def test_what_a_row_does_not_see_may_be_no_number(softcap: float) -> None:
    """A slot keeps the scales of an earlier request, whose numbers may have been infinite."""
    rng, count = np.random.default_rng(0), BLOCK_SLOTS + 10
    q, k, v = (rng.standard_normal((count, heads, 32), np.float32) for heads in (4, 2, 2))
    first = np.full(count, BLOCK_SLOTS)
    seen = Seen(first + np.arange(count), first, 1 + np.arange(count), first[:0], first - BLOCK_SLOTS)

    def attend(left: float) -> np.ndarray:
        kv = of_layer(IntegerKV(4 * BLOCK_SLOTS, layers=1, kv_heads=2, head_dim=32).blocks, 0)
        kv.key_scales[:], kv.value_scales[:] = left, left
        with cores() as team:
            return np.asarray(block_attention.attend(q, k, v, kv, seen, Heads(1 << 62, 0.2, softcap), team))

    clean = attend(0.0)
    assert np.isfinite(clean).all()
    for left in (np.nan, np.inf):
        np.testing.assert_array_equal(attend(left), clean)
