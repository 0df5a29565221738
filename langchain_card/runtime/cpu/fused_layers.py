"""Replace decoder layers of the common kind (Llama, Qwen 2 and 3, Mistral, ...) by compiled passes over rows.

The common kind is: RMS norm, attention with rotated queries and keys, RMS norm, gated SiLU. Such a layer becomes two
compiled calls with its attention between them; a model with only such layers becomes one call. A layer is recognised by
its parts and by its results. The bits of an output row never depend on its neighbours.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from langchain_card.runtime.adapters import TakeAdapters, rows_with_adapters
from langchain_card.runtime.cpu import low_rank, row_layers
from langchain_card.runtime.cpu.blocks.matmul import Weights
from langchain_card.runtime.cpu.integer_kv import IntegerKV
from langchain_card.runtime.cpu.low_rank import LayerAdapters, no_adapters
from langchain_card.runtime.cpu.plan import NOT_TAPPED, RowStablePlan, arrays, kernel_heads
from langchain_card.runtime.cpu.quantized_layers import FusedRMSNorm, LinearPart, QuantizedLinear, as_array
from langchain_card.runtime.cpu.row_attention import Seen
from langchain_card.runtime.cpu.team import cores
from langchain_card.runtime.rows import AttentionOptions
from langchain_card.runtime.taps import taps_of_pass

if TYPE_CHECKING:
    from langchain_card.runtime.attention import StepPlan

_PARTS = {"self_attn", "mlp", "input_layernorm", "post_attention_layernorm"}
_ATTENTION = {"q_proj", "k_proj", "v_proj", "o_proj"}
_HEAD_NORMS = ("q_norm", "k_norm")
_MLP = {"gate_proj", "up_proj", "down_proj", "act_fn"}

_PROBED_ROWS = 5
_TOLERANCE = 0.02
"""Largest relative difference of a replacement's output: other last bits change some roundings to 7 bits."""


class FusedLayer(nn.Module):
    """A replacement for a decoder layer of transformers.

    Args:
        layer: a layer of the common kind with quantized linear layers and fused norms.
        options: the layer's options of attention.
    """

    def __init__(self, layer: Any, options: AttentionOptions) -> None:
        super().__init__()
        attention, mlp = layer.self_attn, layer.mlp
        self.layer_idx: int = attention.layer_idx
        self._options = options
        self.qkv: QuantizedLinear = attention.q_proj.whole
        self.out: QuantizedLinear = attention.o_proj
        self.gate_up: QuantizedLinear = mlp.gate_proj.whole
        self.down: QuantizedLinear = mlp.down_proj
        norms = [layer.input_layernorm, layer.post_attention_layernorm]
        self.norms = nn.ModuleList(norms)
        self._norms = [(norm.weight.numpy(), np.float32(norm.eps)) for norm in norms]
        of_heads = [getattr(attention, name) for name in _HEAD_NORMS if hasattr(attention, name)]
        weights = [norm.weight.numpy() for norm in of_heads]
        self._head_norms = np.stack(weights) if weights else np.empty((0, 0), np.float32)
        self._head_eps = np.float32(of_heads[0].eps if of_heads else 0.0)
        self._bias, self._none = as_array(self.qkv.bias), no_adapters()
        self._sizes: list[int] = attention.q_proj.sizes
        self._head_dim: int = attention.head_dim
        self._num_heads, self._num_kv_heads, values = (size // self._head_dim for size in attention.q_proj.sizes)
        if values != self._num_kv_heads or sum(attention.q_proj.sizes) % self._head_dim:
            raise ValueError("these are more than queries, keys and values")

    @property
    def shape(self) -> tuple[Any, ...]:
        """Shapes that the layers of one stack have in common."""
        linear = (self.qkv, self.out, self.gate_up, self.down)
        sizes = [(layer.weights.parts.shape, *layer.weights[2:]) for layer in linear]
        return self._num_heads, self._num_kv_heads, len(self._bias), self._head_norms.shape, *sizes

    def forward(
        self, hidden: Tensor, *, position_embeddings: tuple[Tensor, Tensor], step: StepPlan, **_: Any
    ) -> Tensor:
        """Run the layer: [1, rows, features] -> the same; cosines and sines are [1, rows, head_dim]."""
        x, adapters = hidden[0].numpy().copy(), _adapters(self, self._none)
        (first, first_eps), (second, second_eps) = self._norms
        counts = self._num_heads, self._num_kv_heads, self._num_kv_heads
        q, k, v = (np.empty((len(x), count, self._head_dim), np.float32) for count in counts)
        cos, sin = (part[0].contiguous().numpy() for part in position_embeddings)
        with cores() as team:
            row_layers.heads(
                x, first, first_eps, self.qkv.weights, adapters, self._bias, cos, sin, self._head_norms,
                self._head_eps, q, k, v, team,
            )  # fmt: skip
        query, key, value = (torch.from_numpy(part).transpose(0, 1)[None] for part in (q, k, v))
        mixed = step.attend(self.layer_idx, query, key, value, self._options)
        attended = mixed.reshape(len(x), -1).contiguous().numpy()
        with cores() as team:
            row_layers.rest(
                x, attended, self.out.weights, second, second_eps, self.gate_up.weights, self.down.weights, adapters,
                team,
            )  # fmt: skip
        return torch.from_numpy(x)[None]

    def lay_out_adapters(self, layers: str, take: TakeAdapters) -> dict[nn.Module, LayerAdapters]:
        """Return this layer's adapters, or nothing.

        Args:
            layers: name of the list of layers in transformers' model.
            take: returns the adapters of a linear layer by its name, and the numbers of its features and outputs.
        """
        found = self.take_adapters(layers, take)
        return {self: low_rank.lay_out([found])[1][0]} if low_rank.any_adapters([found]) else {}

    def take_adapters(self, layers: str, take: TakeAdapters) -> list[list[low_rank.AdaptedPart]]:
        """Return for each matrix the adapters of the linear layers in it."""
        half = self.gate_up.out_features // 2
        matrices = [
            (self.qkv, "self_attn", ("q_proj", "k_proj", "v_proj"), self._sizes),
            (self.out, "self_attn", ("o_proj",), [self.out.out_features]),
            (self.gate_up, "mlp", ("gate_proj", "up_proj"), [half, half]),
            (self.down, "mlp", ("down_proj",), [self.down.out_features]),
        ]
        return [
            [
                low_rank.AdaptedPart(take(f"{layers}.{self.layer_idx}.{parent}.{name}", matrix.in_features, size), size)
                for name, size in zip(names, sizes, strict=True)
            ]
            for matrix, parent, names, sizes in matrices
        ]


class FusedStack(nn.Module):
    """A replacement for all decoder layers.

    Args:
        layers: layers of one shape.
    """

    def __init__(self, layers: Sequence[FusedLayer]) -> None:
        super().__init__()
        self.stacked_layers = nn.ModuleList(layers)
        first = layers[0]
        heads = [kernel_heads(layer._options, first._head_dim) for layer in layers]
        self._stack = row_layers.Stack(
            norms=np.stack([np.stack([norm for norm, _ in layer._norms]) for layer in layers]),
            eps=np.array([[eps for _, eps in layer._norms] for layer in layers], np.float32),
            qkv=_stacked([layer.qkv for layer in layers]),
            bias=np.stack([layer._bias for layer in layers]),
            head_norms=np.stack([layer._head_norms for layer in layers]),
            head_eps=np.array([layer._head_eps for layer in layers], np.float32),
            out=_stacked([layer.out for layer in layers]),
            gate_up=_stacked([layer.gate_up for layer in layers]),
            down=_stacked([layer.down for layer in layers]),
            windows=np.array([head.window for head in heads]),
            scalings=np.array([head.scaling for head in heads]),
            softcaps=np.array([head.softcap for head in heads]),
            num_heads=first._num_heads,
            num_kv_heads=first._num_kv_heads,
            first=first.layer_idx,
        )
        self._none = no_adapters(len(layers))
        self._prepare(first._head_dim)

    def _prepare(self, head_dim: int) -> None:
        """Compile what `forward` needs, or load it from numba's cache; this takes seconds that no step should spend."""
        x, angles, zero = np.ones_like(self._stack.norms[0, :1]), np.ones((1, head_dim), np.float32), np.zeros(1, int)
        layers = self._stack.first + len(self.stacked_layers)
        kv = IntegerKV(1, layers=layers, kv_heads=self._stack.num_kv_heads, head_dim=head_dim)
        seen = Seen(zero, zero, zero + 1, zero[:0], zero)
        with cores() as team:
            row_layers.decode(x, self._stack, self._none, angles, angles, arrays(kv), seen, *NOT_TAPPED, team)

    def forward(
        self, hidden: Tensor, *, position_embeddings: tuple[Tensor, Tensor], step: StepPlan, **_: Any
    ) -> Tensor:
        """Run all layers: [1, rows, features] -> the same; cosines and sines are [1, rows, head_dim]."""
        if not isinstance(step, RowStablePlan):
            for layer in self.stacked_layers:
                hidden = layer(hidden, position_embeddings=position_embeddings, step=step)
            return hidden
        hidden = hidden.clone()
        step.decode(self._stack, _adapters(self, self._none), hidden, *position_embeddings, taps_of_pass())
        return hidden

    def lay_out_adapters(self, layers: str, take: TakeAdapters) -> dict[nn.Module, LayerAdapters]:
        """Return the adapters of the stack and, as parts of the same arrays, of each layer; or nothing."""
        own_layers: Any = self.stacked_layers
        found = [layer.take_adapters(layers, take) for layer in own_layers]
        if not low_rank.any_adapters(found):
            return {}
        stack, own = low_rank.lay_out(found)
        return {self: stack, **dict(zip(own_layers, own, strict=True))}


def _adapters(module: nn.Module, none: LayerAdapters) -> LayerAdapters:
    """Return a module's adapters with the rows of this thread's step, or `none`."""
    found = rows_with_adapters(module)
    return none if found is None else found[0]._replace(rows=found[1].numpy())


def _stacked(linear: Sequence[QuantizedLinear]) -> Weights:
    """Stack the matrices of layers, which lie in the same memory."""
    return linear[0].weights._replace(parts=np.stack([layer.weights.parts for layer in linear]))


def stack_layers(decoder: Any) -> None:
    """Replace a decoder's layers by one module if all are fused and of one shape."""
    for name, child in decoder.named_children():
        layers = [layer for layer in child.children() if isinstance(layer, FusedLayer)]
        if isinstance(child, nn.ModuleList) and 0 < len(layers) == len(child):
            indexes = [layer.layer_idx for layer in layers]
            in_order = indexes == [*range(indexes[0], indexes[0] + len(layers))]
            if in_order and len({layer.shape for layer in layers}) == 1:
                decoder.set_submodule(name, nn.ModuleList([FusedStack(layers)]))


def fuse_layer(layer: Any, cos_sin: tuple[Tensor, Tensor]) -> FusedLayer | None:
    """Return a replacement for a decoder layer, or None if there is none that computes the same.

    Args:
        layer: a layer with quantized linear layers and fused norms.
        cos_sin: [1, `_PROBED_ROWS`, head_dim] the model's cosines and sines of the first positions.
    """
    if not _is_common(layer):
        return None
    features = layer.self_attn.o_proj.out_features
    hidden = torch.randn(1, _PROBED_ROWS, features, generator=torch.Generator().manual_seed(0))
    before, after = _Probe(), _Probe()
    try:
        expected = layer(hidden, position_embeddings=cos_sin, attention_mask=None, step=before)
        fused = FusedLayer(layer, before.calls[0][1])
        result = fused(hidden, position_embeddings=cos_sin, step=after)
    except Exception:  # it needs more arguments than a layer of the common kind, such as positions
        return None
    if len(before.calls) != 1 or not isinstance(expected, Tensor) or cos_sin[0].shape[-1] != fused._head_dim:
        return None
    difference, change = (torch.linalg.vector_norm(x - expected) for x in (result, hidden))
    return fused if bool(difference <= _TOLERANCE * change) and before.calls == after.calls else None


@torch.inference_mode()
def fuse_layers(decoder: Any) -> None:
    """Replace all layers of a decoder that have a replacement."""
    rotary: Any = getattr(decoder, "rotary_emb", None)
    try:
        cos_sin = rotary(torch.zeros(1, _PROBED_ROWS, 1), torch.arange(_PROBED_ROWS)[None])
    except TypeError:  # no rotary embedding, or one for each kind of layer
        return
    for name, module in list(decoder.named_modules()):
        if (fused := fuse_layer(module, cos_sin)) is not None:
            decoder.set_submodule(name, fused)


@dataclass
class _Probe:
    """A stand-in for a step's plan that mixes its arguments and records its calls."""

    calls: list[tuple[int, AttentionOptions]] = field(default_factory=list)

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, options: AttentionOptions) -> Tensor:
        self.calls.append((layer, options))
        group = query.shape[1] // key.shape[1]
        return (query + (key - 2 * value).repeat_interleave(group, dim=1)).transpose(1, 2)


def _is_common(layer: Any) -> bool:
    """Return whether a module has exactly the parts of the common kind of decoder layer."""
    if {name for name, _ in layer.named_children()} != _PARTS:
        return False
    attention, mlp = ({name for name, _ in part.named_children()} for part in (layer.self_attn, layer.mlp))
    if mlp != _MLP or attention not in (_ATTENTION, _ATTENTION | {*_HEAD_NORMS}):
        return False
    gates = torch.linspace(-9, 9, 64)
    norms = [layer.input_layernorm, layer.post_attention_layernorm]
    norms += [getattr(layer.self_attn, name) for name in attention & {*_HEAD_NORMS}]
    stacked = [layer.self_attn.q_proj, layer.mlp.gate_proj]
    plain = [layer.self_attn.o_proj, layer.mlp.down_proj]
    return (
        all(isinstance(norm, FusedRMSNorm) for norm in norms)
        and len({norm.eps for norm in norms[2:]}) < 2
        and all(isinstance(part, LinearPart) for part in stacked)
        and all(isinstance(part, QuantizedLinear) and part.bias is None for part in plain)
        and layer.mlp.gate_proj.whole.bias is None
        and torch.allclose(layer.mlp.act_fn(gates), F.silu(gates))
    )
