"""Compiled decoder layers of the common kind over any rows: all in one call, or each in two around its attention.

On a CPU half of a small model's step would be small operations: dozens per layer, each with its own dispatch, and all
with cold caches, which the weights have just passed through. Here rows are normed, rotated, scaled and rounded for the
kernel of the weights in one pass, and shared among the threads.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from langchain_card.runtime.cpu import block_attention, low_rank, row_attention
from langchain_card.runtime.cpu.blocks.activations import Rounded, empty_rounded, round_block, scratch
from langchain_card.runtime.cpu.blocks.kernel import BLOCK
from langchain_card.runtime.cpu.blocks.matmul import Weights, multiply, one
from langchain_card.runtime.cpu.compiled import Array, Numbers, Slots, compiled, row_wise
from langchain_card.runtime.cpu.integer_kv import Blocks, of_layer
from langchain_card.runtime.cpu.low_rank import LayerAdapters, LowRank
from langchain_card.runtime.cpu.row_attention import Heads, Seen
from langchain_card.runtime.cpu.row_kernels import dot, gate_row, norm_factor, norm_row, split_heads
from langchain_card.runtime.cpu.team import Team, together

_FED_ROWS = 256
"""Rows that are gated together. The allocator maps, and clears, more than 32 MB anew each time."""


class Stack(NamedTuple):
    """The weights of all decoder layers of a model. Each array has the layer first.

    Attributes:
        norms: [layers, 2, features] weights of the RMS norms.
        eps: [layers, 2] epsilons of those norms.
        qkv: matrices of queries, keys and values.
        bias: [layers, outputs] bias of that product, or [layers, 0].
        head_norms: [layers, 2, head_dim] weights of an RMS norm for queries and keys, or [layers, 0, 0].
        head_eps: [layers] epsilons of those norms.
        out: matrices after attention.
        gate_up: matrices of gates and ups.
        down: matrices after the gates.
        windows, scalings, softcaps: [layers] fields of `row_attention.Heads`.
        num_heads, num_kv_heads: number of heads of each layer.
        first: index of the first layer in the KV.
    """

    norms: Array
    eps: Array
    qkv: Weights
    bias: Array
    head_norms: Array
    head_eps: Array
    out: Weights
    gate_up: Weights
    down: Weights
    windows: Slots
    scalings: Numbers
    softcaps: Numbers
    num_heads: int
    num_kv_heads: int
    first: int


class KV(NamedTuple):
    """Keys and values of all layers, in one of two forms; the arrays of the other are empty.

    Attributes:
        floats: [layers, 2, kv_heads, slots, head_dim].
        blocks: integers.
    """

    floats: Array
    blocks: Blocks


@compiled()
def decode(
    x: Array, stack: Stack, adapters: LayerAdapters, cos: Array, sin: Array, kv: KV, seen: Seen, tapped: Array,
    states: Array, team: Team,
) -> None:  # fmt: skip
    """Run all layers.

    Args:
        x: [rows, features]; replaced by the output.
        stack: the model's layers.
        adapters: of all layers.
        cos: [rows, head_dim], cosines of the rows' positions.
        sin: [rows, head_dim], sines of the rows' positions.
        kv: keys and values.
        seen: slots of the rows.
        tapped: indexes of layers, in ascending order.
        states: [tapped, rows, features] receives what these layers put out.
        team: of `team.cores`.
    """
    rows, size = cos.shape
    q = np.empty((rows, stack.num_heads, size), np.float32)
    k = np.empty((rows, stack.num_kv_heads, size), np.float32)
    v = np.empty_like(k)
    num_copied = 0
    for i in range(len(stack.norms)):
        own = low_rank.of_layer(adapters, i)
        heads(
            x, stack.norms[i, 0], stack.eps[i, 0], one(stack.qkv, i), own, stack.bias[i], cos, sin, stack.head_norms[i],
            stack.head_eps[i], q, k, v, team,
        )  # fmt: skip
        wanted = Heads(stack.windows[i], stack.scalings[i], stack.softcaps[i])
        if len(kv.floats):
            attended = row_attention.attend(q, k, v, kv.floats[stack.first + i], seen, wanted, team)
        else:
            attended = block_attention.attend(q, k, v, of_layer(kv.blocks, stack.first + i), seen, wanted, team)
        rest(
            x, attended.reshape(rows, -1), one(stack.out, i), stack.norms[i, 1], stack.eps[i, 1], one(stack.gate_up, i),
            one(stack.down, i), own, team,
        )  # fmt: skip
        if num_copied < len(tapped) and tapped[num_copied] == i:
            states[num_copied] = x
            num_copied += 1


@compiled()
def linear(x: Array, weights: Weights, bias: Array, team: Team) -> Array:
    """Run a linear layer.

    Args:
        x: [rows, features].
        weights: the layer's matrix.
        bias: [outputs], or empty.
        team: of `team.cores`.

    Returns:
        [rows, outputs].
    """
    y = multiply(_rounded(x, np.empty(0, np.float32), np.float32(0), weights.features, team), weights, team)
    out = np.empty((len(x), weights.outputs), np.float32)
    for n in range(len(x)):
        for i in range(weights.outputs):
            out[n, i] = y[n, i]
        if len(bias):
            for i in range(weights.outputs):
                out[n, i] += bias[i]
    return out


@compiled()
def fuse(states: Array, eps: np.float32, weights: Weights, team: Team) -> Array:
    """Add the last of some normed states to the product of the others; see `heads.model.Fusion`.

    Args:
        states: [taps, rows, features].
        eps: epsilon of the norms.
        weights: of the product.
        team: of `team.cores`.

    Returns:
        [rows, features].
    """
    taps, rows, size = states.shape
    ones, normed = np.ones(size, np.float32), np.empty((rows, taps - 1, size), np.float32)
    out = np.empty((rows, size), np.float32)
    for n in range(rows):
        for i in range(taps - 1):
            norm_row(states[i, n], ones, norm_factor(states[i, n], eps), normed[n, i])
        norm_row(states[-1, n], ones, norm_factor(states[-1, n], eps), out[n])
    x = normed.reshape(rows, -1)
    _add(out, multiply(_rounded(x, np.empty(0, np.float32), np.float32(0), weights.features, team), weights, team))
    return out


@compiled()
def mix(features: Array, embedded: Array, norms: Array, eps: np.float32, weights: Weights, team: Team) -> Array:
    """Add to features the product of them and of embeddings, normed; see `heads.model.Mixture`.

    Args:
        features: [rows, features].
        embedded: [rows, features].
        norms: [2, features] weights of the norms of embeddings and of features.
        eps: epsilon of the norms.
        weights: of the product.
        team: of `team.cores`.

    Returns:
        [rows, features].
    """
    rows, size = features.shape
    normed, out = np.empty((rows, 2, size), np.float32), features.copy()
    for n in range(rows):
        norm_row(embedded[n], norms[0], norm_factor(embedded[n], eps), normed[n, 0])
        norm_row(features[n], norms[1], norm_factor(features[n], eps), normed[n, 1])
    x = normed.reshape(rows, -1)
    _add(out, multiply(_rounded(x, np.empty(0, np.float32), np.float32(0), weights.features, team), weights, team))
    return out


@compiled()
def float_linear(x: Array, weight: Array, bias: Array, team: Team) -> Array:
    """Run a linear layer whose weights are floats [outputs, features]; see `linear`."""
    out = np.empty((len(x), len(weight)), np.float32)
    _dots_together(team, (x, weight, bias, out))
    return out


@compiled()
def _dots(x: Array, weight: Array, bias: Array, out: Array, thread: int, threads: int) -> None:
    """Compute a thread's outputs of all rows; a weight is read once."""
    for i in range(len(weight) * thread // threads, len(weight) * (thread + 1) // threads):
        for n in range(len(x)):
            out[n, i] = dot(x[n], weight[i])
            if len(bias):
                out[n, i] += bias[i]


_dots_together = together(_dots)


@compiled()
def heads(
    x: Array, norm: Array, eps: np.float32, qkv: Weights, adapters: LayerAdapters, bias: Array, cos: Array, sin: Array,
    head_norms: Array, head_eps: np.float32, q: Array, k: Array, v: Array, team: Team,
) -> None:  # fmt: skip
    """Run a layer from its input to the queries, keys and values of its attention.

    Args:
        x: [rows, features].
        norm: [features] weight of the first norm.
        eps: epsilon of that norm.
        qkv: matrix of queries, keys and values.
        adapters: of the layer.
        bias: bias of that product, or empty.
        cos: [rows, head_dim], cosines of the rows' positions.
        sin: [rows, head_dim], sines of the rows' positions.
        head_norms: `norms` of `row_kernels.split_heads`.
        head_eps: epsilon of those norms.
        q: [rows, heads, head_dim], output.
        k: [rows, kv_heads, head_dim], output.
        v: [rows, kv_heads, head_dim], output.
        team: of `team.cores`.
    """
    y = _product(x, norm, eps, qkv, adapters.qkv, adapters.rows, team)
    _split_together(team, (y, bias, cos, sin, head_norms, head_eps, q, k, v))


@compiled()
def _split(
    y: Array, bias: Array, cos: Array, sin: Array, norms: Array, eps: np.float32, q: Array, k: Array, v: Array,
    thread: int, threads: int,
) -> None:  # fmt: skip
    """Compute queries, keys and values of a thread's heads: mostly of products that it has computed."""
    kv_heads = k.shape[1]
    for n in range(len(y)):
        for h in range(kv_heads):
            if (n * kv_heads + h) % threads == thread:
                split_heads(y[n], bias, cos[n], sin[n], norms, eps, q[n], k[n], v[n], h)


_split_together = together(_split)


@compiled()
def rest(
    x: Array, attended: Array, out: Weights, norm: Array, eps: np.float32, gate_up: Weights, down: Weights,
    adapters: LayerAdapters, team: Team,
) -> None:  # fmt: skip
    """Run a layer from the results of its attention to its output.

    Args:
        x: [rows, features], the layer's input; replaced by its output.
        attended: [rows, heads x head_dim].
        out: matrix after attention.
        norm: [features] weight of the second norm.
        eps: epsilon of that norm.
        gate_up: matrix of gates and ups.
        down: matrix after the gates.
        adapters: of the layer.
        team: of `team.cores`.
    """
    rows = adapters.rows
    _add(x, _product(attended, np.empty(0, np.float32), np.float32(0), out, adapters.out, rows, team))
    for begin in range(0, len(x), _FED_ROWS):
        own, own_rows = x[begin : begin + _FED_ROWS], rows[begin : begin + _FED_ROWS]
        y = _product(own, norm, eps, gate_up, adapters.gate_up, own_rows, team)
        rounded = empty_rounded(len(own), down.features)
        _gate_together(team, (y, gate_up.outputs // 2, down.features, rounded))
        products = multiply(rounded, down, team)
        low_rank.add(products, rounded, down.features, adapters.down, own_rows, team)
        _add(own, products)


@compiled()
def _product(
    x: Array, norm: Array, eps: np.float32, weights: Weights, adapters: LowRank, rows: Slots, team: Team
) -> Array:
    """Multiply rows, normed first if there is a norm, and add the products of their adapters."""
    rounded = _rounded(x, norm, eps, weights.features, team)
    products: Array = multiply(rounded, weights, team)
    low_rank.add(products, rounded, weights.features, adapters, rows, team)
    return products


@compiled()
def _rounded(x: Array, norm: Array, eps: np.float32, features: int, team: Team) -> Rounded:
    """Round rows for the kernel, normed first if there is a norm."""
    rounded: Rounded = empty_rounded(len(x), features)
    if len(x) == 1:
        norm_and_round(x, norm, eps, features, rounded, 0, 1)
    else:
        _rows_together(team, (x, norm, eps, features, rounded))
    return rounded


@compiled()
def norm_and_round(
    x: Array, norm: Array, eps: np.float32, features: int, rounded: Rounded, thread: int, threads: int
) -> None:
    """Norm, if there is a norm, and round a thread's blocks of features in all rows.

    Threads that shared the rows instead would write to the same lines of the cache.

    Args:
        x: [rows, features].
        norm: [features] weight of the norm, or empty.
        eps: epsilon of the norm.
        features: features that the kernel reads, with zeros behind those of `x`.
        rounded: output.
        thread: number of the thread.
        threads: number of threads.
    """
    own, factor, blocks = scratch(), np.float32(1), (features + BLOCK - 1) // BLOCK
    for n in range(len(x)):
        if len(norm):
            factor = norm_factor(x[n], eps)
        for i in range(blocks * thread // threads, blocks * (thread + 1) // threads):
            begin = i * BLOCK
            part = x[n, begin : begin + BLOCK]
            own.row[len(part) :] = 0
            if len(norm):
                norm_row(part, norm[begin : begin + BLOCK], factor, own.row)
            else:
                own.row[: len(part)] = part
            round_block(own, i, n, len(x), rounded)


_rows_together = together(norm_and_round)


@compiled()
def _gate(y: Array, size: int, features: int, rounded: Rounded, thread: int, threads: int) -> None:
    """Gate and round a thread's blocks of features, in all rows of `size` values each."""
    own, blocks = scratch(), (features + BLOCK - 1) // BLOCK
    for n in range(len(y)):
        for i in range(blocks * thread // threads, blocks * (thread + 1) // threads):
            begin, end = i * BLOCK, min((i + 1) * BLOCK, size)
            own.row[max(0, end - begin) :] = 0
            gate_row(y[n, begin:end], y[n, size + begin : size + end], own.row, own.bits)
            round_block(own, i, n, len(y), rounded)


_gate_together = together(_gate)


@row_wise
def _add(x: Array, y: Array) -> None:
    """Add products to `x`."""
    for n in range(len(x)):
        for i in range(x.shape[1]):
            x[n, i] += y[n, i]
