"""Products with adapters (LoRA, arXiv 2106.09685) in compiled layers: each row adds those of its own adapter.

The input is the row as the kernel of the weights reads it, rounded. A row is computed alone and its components are
added in order, so that its bits depend neither on the rows beside it nor on the number of threads.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from langchain_card.runtime.adapters import Stacked
from langchain_card.runtime.cpu.blocks.activations import Rounded, block
from langchain_card.runtime.cpu.blocks.kernel import BLOCK
from langchain_card.runtime.cpu.compiled import Array, Slots, compiled, row_wise
from langchain_card.runtime.cpu.row_kernels import dot
from langchain_card.runtime.cpu.team import Team, together

_ROWS = 64
"""Rows that are computed together: their inputs stay in the cache."""


class LowRank(NamedTuple):
    """The adapters of one matrix, or of the matrices of all layers, which then come first.

    Attributes:
        a: [adapters, components, features].
        b: [adapters, components, outputs], with each adapter's scale.
        spans: [components, 2] the first of the matrix's outputs to which a component adds, and the end of them.
    """

    a: Array
    b: Array
    spans: Slots


class LayerAdapters(NamedTuple):
    """The adapters of a layer, or of all layers.

    Attributes:
        rows: [rows] number of each row's adapter, -1 for none; empty if no row has one.
        qkv, out, gate_up, down: the adapters of the matrices of `row_layers.Stack`.
    """

    rows: Slots
    qkv: LowRank
    out: LowRank
    gate_up: LowRank
    down: LowRank


def no_adapters(layers: int | None = None) -> LayerAdapters:
    """Return what rows without adapters have: for one layer, or for a stack of some."""
    shape = (0, 0, 0) if layers is None else (layers, 0, 0, 0)
    nothing = LowRank(np.empty(shape, np.float32), np.empty(shape, np.float32), np.empty((0, 2), np.int64))
    return LayerAdapters(np.empty(0, np.int64), nothing, nothing, nothing, nothing)


class AdaptedPart(NamedTuple):
    """A linear layer in a matrix: its adapters, None for none, and its number of outputs."""

    adapters: Stacked | None
    outputs: int


def any_adapters(layers: Sequence[Sequence[Sequence[AdaptedPart]]]) -> bool:
    """Return whether a part of any matrix of any layer has adapters."""
    return any(part.adapters is not None for layer in layers for matrix in layer for part in matrix)


def lay_out(layers: Sequence[Sequence[Sequence[AdaptedPart]]]) -> tuple[LayerAdapters, list[LayerAdapters]]:
    """Return the adapters of a stack of layers, and those of each layer in the same memory.

    Args:
        layers: [layers, 4 matrices] the parts of each matrix, from the top.
    """
    rows = np.empty(0, np.int64)
    stacks = [_matrix([layer[i] for layer in layers]) for i in range(4)]
    own = [[LowRank(stack.a[i], stack.b[i], stack.spans) for stack in stacks] for i in range(len(layers))]
    return LayerAdapters(rows, *stacks), [LayerAdapters(rows, *each) for each in own]


def _matrix(layers: Sequence[Sequence[AdaptedPart]]) -> LowRank:
    """Lay out the adapters of one matrix of all layers. A component is a row of `a` and belongs to one part."""
    found = [part.adapters for parts in layers for part in parts if part.adapters is not None]
    if not found:
        return no_adapters(len(layers)).qkv
    columns = [[parts[i] for parts in layers] for i in range(len(layers[0]))]
    ranks = [max((part.adapters.a.shape[1] for part in column if part.adapters), default=0) for column in columns]
    starts = np.cumsum([0, *(column[0].outputs for column in columns)])
    spans = [(starts[i], starts[i + 1]) for i, rank in enumerate(ranks) for _ in range(rank)]
    shape = len(layers), len(found[0].a), sum(ranks)
    a = np.zeros((*shape, found[0].a.shape[2]), np.float32)
    b = np.zeros((*shape, max(adapters.b.shape[2] for adapters in found)), np.float32)
    for n, parts in enumerate(layers):
        for first, part in zip(np.cumsum([0, *ranks]), parts, strict=False):
            if part.adapters is not None:
                own = slice(first, first + part.adapters.a.shape[1])
                a[n, :, own] = part.adapters.a.numpy()
                b[n, :, own, : part.outputs] = part.adapters.b.numpy()
    return LowRank(a, b, np.array(spans, np.int64))


@compiled()
def of_layer(stack: LayerAdapters, i: int) -> LayerAdapters:
    """Return the adapters of one layer of a stack."""
    return LayerAdapters(
        stack.rows, _one(stack.qkv, i), _one(stack.out, i), _one(stack.gate_up, i), _one(stack.down, i)
    )


@compiled()
def _one(stack: LowRank, i: int) -> LowRank:
    return LowRank(stack.a[i], stack.b[i], stack.spans)


@compiled()
def add(y: Array, rounded: Rounded, features: int, adapters: LowRank, rows: Slots, team: Team) -> None:
    """Add the products of the rows' adapters.

    Args:
        y: [rows, outputs] products of the matrix; replaced by the sums.
        rounded: the rows.
        features: of a row of `rounded`; those beyond the adapters' are zeros.
        adapters: of the matrix.
        rows: `LayerAdapters.rows`.
        team: of `team.cores`.
    """
    components = len(adapters.spans)
    if components == 0:
        return
    for begin in range(0, len(rows), _ROWS):
        own = rows[begin : begin + _ROWS]
        x, inner = np.empty((len(own), features), np.float32), np.empty((len(own), components), np.float32)
        _restore_together(team, (rounded, len(rows), begin, own, x))
        _reduce_together(team, (x, adapters.a, own, inner))
        _expand_together(team, (inner, adapters.b, adapters.spans, own, y[begin : begin + _ROWS]))


@compiled()
def _restore(rounded: Rounded, count: int, begin: int, rows: Slots, x: Array, thread: int, threads: int) -> None:
    """Turn a thread's rows, of `count` with `begin` before them, back into floats."""
    features = x.shape[1]
    blocks = (features + BLOCK - 1) // BLOCK
    for i in range(thread, len(rows), threads):
        if rows[i] < 0:
            continue
        first, beside = 0, block(count)
        while begin + i >= first + beside:
            first += beside
            beside = block(count - first)
        column = begin + i - first
        for j in range(features):
            level = rounded.levels[first * features + j // 4 * 4 * beside + 4 * column + j % 4]
            x[i, j] = level * rounded.factors[first * blocks + j // BLOCK * beside + column]


_restore_together = together(_restore)


@compiled()
def _reduce(x: Array, a: Array, rows: Slots, inner: Array, thread: int, threads: int) -> None:
    """Multiply by the first matrices, a thread's components."""
    size = a.shape[2]
    for k in range(thread, a.shape[1], threads):
        for i in range(len(rows)):
            if rows[i] >= 0:
                inner[i, k] = dot(x[i, :size], a[rows[i], k])


_reduce_together = together(_reduce)


@compiled()
def _expand(inner: Array, b: Array, spans: Slots, rows: Slots, y: Array, thread: int, threads: int) -> None:
    """Multiply by the second matrices and add, a thread's outputs of each span."""
    for k in range(len(spans)):
        start, end = spans[k]
        low, high = (end - start) * thread // threads, (end - start) * (thread + 1) // threads
        for i in range(len(rows)):
            if rows[i] >= 0:
                _add_scaled(y[i, start + low : start + high], b[rows[i], k, low:high], inner[i, k])


_expand_together = together(_expand)


@row_wise
def _add_scaled(y: Array, x: Array, factor: np.float32) -> None:
    for i in range(len(y)):
        y[i] += factor * x[i]
