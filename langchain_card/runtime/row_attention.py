"""Attention of one row at a time over the slots that it sees, compiled by numba; see `row_stable`."""

from __future__ import annotations

from typing import Any

import numpy as np

from langchain_card.runtime.row_kernels import Array, exp, row_wise


@row_wise
def _score(own: Array, keys: Array, slots: Any, scores: Array) -> None:
    """Products of a query with the keys in `slots`, four at a time."""
    for j in range(0, len(slots), 4):
        k0, k1, k2, k3 = keys[slots[j]], keys[slots[j + 1]], keys[slots[j + 2]], keys[slots[j + 3]]
        s0 = s1 = s2 = s3 = own.dtype.type(0)
        for i in range(len(own)):
            s0 += own[i] * k0[i]
            s1 += own[i] * k1[i]
            s2 += own[i] * k2[i]
            s3 += own[i] * k3[i]
        scores[j], scores[j + 1], scores[j + 2], scores[j + 3] = s0, s1, s2, s3


@row_wise
def _mix(chances: Array, values: Array, slots: Any, out: Array) -> None:
    """The values in `slots` by their chances, four at a time."""
    out[:] = 0
    for j in range(0, len(slots), 4):
        v0, v1, v2, v3 = values[slots[j]], values[slots[j + 1]], values[slots[j + 2]], values[slots[j + 3]]
        c0, c1, c2, c3 = chances[j], chances[j + 1], chances[j + 2], chances[j + 3]
        for i in range(len(out)):
            out[i] += (c0 * v0[i] + c1 * v1[i]) + (c2 * v2[i] + c3 * v3[i])


@row_wise
def _to_chances(scores: Array, factor: Any, cap: Any, count: int, bits: Any) -> None:
    """Softmax of the first `count` scores, in place; the others get none."""
    for i in range(count):
        scores[i] *= factor
    if cap > 0:
        for i in range(count):
            scores[i] = np.tanh(scores[i] / cap) * cap
    top = scores[0]
    lanes = np.full(16, top)
    for i in range(0, count - 15, 16):
        own = scores[i : i + 16]
        for j in range(16):
            lanes[j] = max(lanes[j], own[j])
    for i in range(16):
        top = max(top, lanes[i])
    for i in range(count // 16 * 16, count):
        top = max(top, scores[i])
    for i in range(count):
        scores[i] -= top
    if scores.itemsize == 4:
        exp(scores, bits)
    else:
        for i in range(count):
            scores[i] = np.exp(scores[i])
    total = scores.dtype.type(0)
    for i in range(count):
        total += scores[i]
    share = scores.dtype.type(1) / total
    for i in range(count):
        scores[i] *= share
    scores[count:] = 0


@row_wise
def attend(
    q: Array, keys: Array, values: Array, first: Any, starts: Any, paths: Any, ends: Any,
    window: int, scaling: float, softcap: float, rows: Any, out: Array,
) -> None:  # fmt: skip
    """Attention of rows, each over what it sees, in order of position.

    A row's arithmetic depends on nothing but its query and the keys and values that it sees: not on where they lie, nor
    on which of them came in the same step.

    Args:
        q: [rows, heads, head_dim], float32 or float64 as all that follows.
        keys: [kv_heads, slots, head_dim].
        values: likewise.
        first: [rows] slot of each row's position 0; its committed positions follow.
        starts: [rows] how many of those it sees.
        paths: slots of what it sees after them, of all rows, one row after another.
        ends: [rows] where in `paths` each row's end.
        window: how many of the last positions a row sees, at most.
        scaling: of the scores.
        softcap: bound that they are bent to; 0 for none.
        rows: which rows to attend for.
        out: [rows, heads, head_dim], filled for those.
    """
    group = q.shape[1] // keys.shape[0]
    factor, cap = q.dtype.type(scaling), q.dtype.type(softcap)
    for n in rows:
        begin = ends[n - 1] if n else 0
        total = starts[n] + ends[n] - begin
        low = max(total - window, 0)
        count = total - low
        padded = (count + 3) // 4 * 4
        slots, scores = np.zeros(padded, dtype=np.int64), np.empty(padded, dtype=q.dtype)
        bits = np.empty(padded, dtype=np.int32)
        for j in range(count):
            at = low + j
            slots[j] = first[n] + at if at < starts[n] else paths[begin + at - starts[n]]
        slots[count:] = slots[0]
        for h in range(q.shape[1]):
            of = h // group
            _score(q[n, h], keys[of], slots, scores)
            _to_chances(scores, factor, cap, count, bits)
            _mix(scores, values[of], slots, out[n, h])
