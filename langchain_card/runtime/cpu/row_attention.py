"""Attention of rows over the slots that each sees, compiled by numba; see `plan`."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from langchain_card.runtime.cpu.compiled import Array, Slots, compiled, row_wise
from langchain_card.runtime.cpu.row_kernels import exp
from langchain_card.runtime.cpu.team import Team, together


@row_wise
def _score(own: Array, keys: Array, slots: Any, scores: Array) -> None:
    """Multiply a query with the keys in `slots`, four at a time."""
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
    """Sum the values in `slots`, weighted by their probabilities, four at a time."""
    out[:] = 0
    for j in range(0, len(slots), 4):
        v0, v1, v2, v3 = values[slots[j]], values[slots[j + 1]], values[slots[j + 2]], values[slots[j + 3]]
        c0, c1, c2, c3 = chances[j], chances[j + 1], chances[j + 2], chances[j + 3]
        for i in range(len(out)):
            out[i] += (c0 * v0[i] + c1 * v1[i]) + (c2 * v2[i] + c3 * v3[i])


@row_wise
def _to_chances(scores: Array, factor: Any, cap: Any, count: int, bits: Any) -> None:
    """Apply softmax to the first `count` scores, in place; the others become 0."""
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


class Seen(NamedTuple):
    """The slots that the rows of a step see, and those that they are written to.

    Attributes:
        slots: [rows] slot for each row's key and value.
        first: [rows] slot of each row's position 0; its committed positions follow.
        starts: [rows] number of committed positions that each row sees.
        paths: slots that each row sees after those, of all rows, one row after another.
        ends: [rows] end of each row's slots in `paths`.
    """

    slots: Slots
    first: Slots
    starts: Slots
    paths: Slots
    ends: Slots


class Heads(NamedTuple):
    """The options of a layer's heads as numbers; see `rows.AttentionOptions`.

    Attributes:
        window: largest number of last positions that a row sees.
        scaling: factor of the scores.
        softcap: bound of the scores; 0 for none.
    """

    window: int
    scaling: float
    softcap: float


@compiled()
def attend(q: Array, k: Array, v: Array, kv: Array, seen: Seen, heads: Heads, team: Team) -> Array:
    """Write rows' keys and values, and attend, each row over the positions that it sees, in order.

    A row's arithmetic depends only on its query and the keys and values that it sees: not on their slots, nor on which
    of them were written in the same step.

    Args:
        q: [rows, heads, head_dim], float32 or float64 like all that follows.
        k: [rows, kv_heads, head_dim].
        v: [rows, kv_heads, head_dim].
        kv: [2, kv_heads, slots, head_dim], keys and values of a layer.
        seen: slots of the rows.
        heads: options of the layer.
        team: of `team.cores`.

    Returns:
        [rows, heads, head_dim].
    """
    for n in range(len(q)):
        kv[0, :, seen.slots[n]] = k[n]
        kv[1, :, seen.slots[n]] = v[n]
    out = np.empty_like(q)
    _attend_together(team, (q, kv, seen, heads, out))
    return out


@row_wise
def _attend(q: Array, kv: Array, seen: Seen, heads: Heads, out: Array, thread: int, threads: int) -> None:
    """Attend for a thread's share of rows and heads."""
    kv_heads = kv.shape[1]
    group = q.shape[1] // kv_heads
    factor, cap = q.dtype.type(heads.scaling), q.dtype.type(heads.softcap)
    for unit in range(thread, len(q) * kv_heads, threads):
        n, of = unit // kv_heads, unit % kv_heads
        begin = seen.ends[n - 1] if n else 0
        total = seen.starts[n] + seen.ends[n] - begin
        low = max(total - heads.window, 0)
        count = total - low
        padded = (count + 3) // 4 * 4
        slots, scores = np.zeros(padded, dtype=np.int64), np.empty(padded, dtype=q.dtype)
        bits = np.empty(padded, dtype=np.int32)
        for j in range(count):
            at = low + j
            slots[j] = seen.first[n] + at if at < seen.starts[n] else seen.paths[begin + at - seen.starts[n]]
        slots[count:] = slots[0]
        for h in range(of * group, of * group + group):
            _score(q[n, h], kv[0, of], slots, scores)
            _to_chances(scores, factor, cap, count, bits)
            _mix(scores, kv[1, of], slots, out[n, h])


_attend_together = together(_attend)
