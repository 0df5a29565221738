"""Modules over int8 products. A row of what they give never depends on its neighbours, bit for bit.

Linear layers and norms are replaced one by one in any model. A whole decoder layer is replaced where it is of the kind
that most families share (Llama, Qwen 2 and 3, Mistral, ...): RMS norm, attention with rotated queries and keys, RMS
norm, gated SiLU. It becomes four products, one call of attention and six passes over its rows. Whether it is of that
kind is found out by what it consists of and by what it computes.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from langchain_card.runtime import fbgemm, row_kernels, vnni
from langchain_card.runtime.int8 import ACTIVATION_LEVELS
from langchain_card.runtime.rows import Heads

if TYPE_CHECKING:
    from langchain_card.runtime.attention import StepPlan

_PARTS = {"self_attn", "mlp", "input_layernorm", "post_attention_layernorm"}
_ATTENTION = {"q_proj", "k_proj", "v_proj", "o_proj"}
_HEAD_NORMS = ("q_norm", "k_norm")
_MLP = {"gate_proj", "up_proj", "down_proj", "act_fn"}

_Scaled: TypeAlias = tuple[row_kernels.Array, row_kernels.Array]
"""Rows in the range of the kernel [rows, features], and what brings each back [rows]."""

_PROBED_ROWS = 5
_TOLERANCE = 0.02
"""Share of its norm by which a replacement's output may differ: other last bits turn some roundings to 7 bits."""


class IntegerLinear(nn.Module):
    """A linear layer with integer weights.

    Args:
        weight: int8 [out_features, in_features] from `quantize_rows`; packed for the kernel and not kept.
        scale: float32 [out_features].
        bias: float32 [out_features] or None.

    Attributes:
        weights: as the kernel that runs here reads them.
    """

    def __init__(self, weight: Tensor, scale: Tensor, bias: Tensor | None = None) -> None:
        super().__init__()
        self.out_features, self.in_features = weight.shape
        self.bias = bias
        own, scales = weight.numpy(), scale.numpy()[:, None]
        self.weights: fbgemm.Weights | vnni.Weights = (
            vnni.pack(own, scales, ACTIVATION_LEVELS) if vnni.runs_here() else fbgemm.pack(own, scales)
        )

    def forward(self, x: Tensor) -> Tensor:
        """Float32 [..., in_features] -> float32 [..., out_features]."""
        rows, scale = _scaled(x.reshape(-1, self.in_features).contiguous().numpy())
        y, row_scale = torch.from_numpy(self.product(rows)), torch.from_numpy(scale)[:, None]
        y = y.mul_(row_scale) if self.bias is None else torch.addcmul(self.bias, y, row_scale)
        return y.view(*x.shape[:-1], self.out_features)

    def product(self, rows: row_kernels.Array) -> row_kernels.Array:
        """Scaled rows [rows, in_features] -> [rows, out_features], which the rows' scales bring back; without bias."""
        return self.weights.multiply(rows)

    def first_rows(self, count: int) -> IntegerLinear:
        """A layer with the first `count` outputs."""
        weight, scales = self.weights.unpack()
        scale = torch.from_numpy(scales[:count, 0])
        return IntegerLinear(torch.from_numpy(weight[:count]), scale, None if self.bias is None else self.bias[:count])

    def extra_repr(self) -> str:
        """Shape and whether there is a bias, as torch's own linear prints it."""
        return f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}"


class IntegerPart(nn.Module):
    """One of several layers that read the same input: the first that is called computes all of them in one kernel.

    Args:
        whole: the layers' weights, one below the other.
        sizes: output features of each layer.
        index: which of them this is.
        last: [1] shared by the parts: the input seen last, and all outputs for it.
    """

    def __init__(
        self, whole: IntegerLinear, sizes: list[int], index: int, last: list[tuple[Tensor, Any] | None]
    ) -> None:
        super().__init__()
        self._whole, self._sizes, self._index, self._last = (whole,), sizes, index, last

    @property
    def whole(self) -> IntegerLinear:
        """The layer that this is a part of; no submodule, for it would be one of several modules."""
        return self._whole[0]

    def forward(self, x: Tensor) -> Tensor:
        """Float32 [..., in_features] -> float32 [..., sizes[index]], a view."""
        seen = self._last[0]
        if seen is None or seen[0] is not x:  # also when another thread's input came between: then it is computed anew
            seen = (x, self.whole(x).split(self._sizes, dim=-1))
            self._last[0] = seen
        if self._index == len(self._sizes) - 1:
            self._last[0] = None
        part: Tensor = seen[1][self._index]
        return part


def split_by_layer(whole: IntegerLinear, sizes: list[int]) -> list[IntegerPart]:
    """The layers that `whole` was stacked from, in order."""
    last: list[tuple[Tensor, Any] | None] = [None]
    return [IntegerPart(whole, sizes, index, last) for index in range(len(sizes))]


class FusedRMSNorm(nn.Module):
    """RMS normalisation in one call; see `fuse_norm`."""

    def __init__(self, weight: Tensor, eps: float) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(weight, requires_grad=False), eps

    def forward(self, x: Tensor) -> Tensor:
        """[..., features] -> the same."""
        return F.rms_norm(x, self.weight.shape, self.weight, self.eps)


def fuse_norm(module: nn.Module) -> FusedRMSNorm | None:
    """A one-call replacement, when `module` is an RMS norm by name and by what it computes; else None."""
    eps = getattr(module, "variance_epsilon", None)
    if not type(module).__name__.endswith("RMSNorm") or eps is None:
        return None
    fused = FusedRMSNorm(module.weight, eps)  # type: ignore[arg-type]
    probe = torch.linspace(-3, 3, fused.weight.numel())
    return fused if torch.allclose(module(probe), fused(probe), rtol=1e-5, atol=1e-6) else None


class FusedLayer(nn.Module):
    """Takes the place of a decoder layer of transformers.

    Args:
        layer: of the common kind, whose linear layers are int8 ones and whose norms are fused.
        heads: what it asks of its attention.
    """

    def __init__(self, layer: Any, heads: Heads) -> None:
        super().__init__()
        attention, mlp = layer.self_attn, layer.mlp
        self.layer_idx: int = attention.layer_idx
        self._heads = heads
        self.qkv: IntegerLinear = attention.q_proj.whole
        self.out: IntegerLinear = attention.o_proj
        self.gate_up: IntegerLinear = mlp.gate_proj.whole
        self.down: IntegerLinear = mlp.down_proj
        norms = [layer.input_layernorm, layer.post_attention_layernorm]
        self.norms = nn.ModuleList(norms)
        self._norms = [(norm.weight.numpy(), np.float32(norm.eps)) for norm in norms]
        own = [getattr(attention, name) for name in _HEAD_NORMS if hasattr(attention, name)]
        self._head_norms = np.stack([norm.weight.numpy() for norm in own]) if own else np.empty((0, 0), np.float32)
        self._head_eps = np.float32(own[0].eps if own else 0.0)
        self._bias = np.empty(0, np.float32) if self.qkv.bias is None else self.qkv.bias.numpy()
        self._head_dim: int = attention.head_dim
        self._num_heads = self.out.in_features // self._head_dim
        self._num_kv_heads = (self.qkv.out_features // self._head_dim - self._num_heads) // 2

    def forward(
        self, hidden: Tensor, *, position_embeddings: tuple[Tensor, Tensor], step: StepPlan, **_: Any
    ) -> Tensor:
        """[1, rows, features] -> the same; cosines and sines are [1, rows, head_dim]."""
        x = hidden[0].numpy().copy()
        rows, scale = _normed(x, *self._norms[0])
        q, k, v = self._at_positions(self.qkv.product(rows), scale, position_embeddings)
        attended = step.attend(self.layer_idx, q, k, v, self._heads)
        rows, scale = _scaled(attended.reshape(len(x), -1).contiguous().numpy())
        row_kernels.add(x, self.out.product(rows), scale)
        rows, scale = _normed(x, *self._norms[1])
        rows, scale = _gated(self.gate_up.product(rows), scale)
        row_kernels.add(x, self.down.product(rows), scale)
        return torch.from_numpy(x)[None]

    def _at_positions(
        self, y: row_kernels.Array, scale: row_kernels.Array, cos_sin: tuple[Tensor, Tensor]
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values [1, heads, rows, head_dim]."""
        counts = self._num_heads, self._num_kv_heads, self._num_kv_heads
        q, k, v = (np.empty((len(y), count, self._head_dim), dtype=np.float32) for count in counts)
        cos, sin = (part[0].contiguous().numpy() for part in cos_sin)
        row_kernels.heads(y, scale, self._bias, cos, sin, self._head_norms, self._head_eps, q, k, v)
        q_t, k_t, v_t = (torch.from_numpy(part).transpose(0, 1)[None] for part in (q, k, v))
        return q_t, k_t, v_t


def fuse_layer(layer: Any, cos_sin: tuple[Tensor, Tensor]) -> FusedLayer | None:
    """What may take a decoder layer's place, or None.

    Args:
        layer: with int8 linear layers and fused norms.
        cos_sin: [1, `_PROBED_ROWS`, head_dim] as the model makes them of the first positions.
    """
    if not _is_common(layer):
        return None
    features = layer.self_attn.o_proj.out_features
    hidden = torch.randn(1, _PROBED_ROWS, features, generator=torch.Generator().manual_seed(0))
    own, other = _Probe(), _Probe()
    try:
        wanted = layer(hidden, position_embeddings=cos_sin, attention_mask=None, step=own)
        fused = FusedLayer(layer, own.asked[0][1])
    except Exception:  # it asks for more than a layer of the common kind: positions, say
        return None
    if len(own.asked) != 1 or not isinstance(wanted, Tensor) or cos_sin[0].shape[-1] != fused._head_dim:
        return None
    got = fused(hidden, position_embeddings=cos_sin, step=other)
    same = bool(torch.linalg.vector_norm(got - wanted) <= _TOLERANCE * torch.linalg.vector_norm(wanted - hidden))
    return fused if same and own.asked == other.asked else None


@torch.inference_mode()
def fuse_layers(decoder: Any) -> None:
    """Replaces those layers of a decoder that can be."""
    rotary: Any = getattr(decoder, "rotary_emb", None)
    first = next(module for module in decoder.modules() if isinstance(module, nn.Embedding))
    try:
        cos_sin = rotary(first.weight[None, :_PROBED_ROWS].float(), torch.arange(_PROBED_ROWS)[None])
    except TypeError:  # no rotary embedding, or one for each kind of layer
        return
    for name, module in list(decoder.named_modules()):
        if (fused := fuse_layer(module, cos_sin)) is not None:
            decoder.set_submodule(name, fused)


@dataclass
class _Probe:
    """Takes the place of a step's plan, mixes what it is given, and notes who asked."""

    asked: list[tuple[int, Heads]] = field(default_factory=list)

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, heads: Heads) -> Tensor:
        self.asked.append((layer, heads))
        group = query.shape[1] // key.shape[1]
        return (query + (key - 2 * value).repeat_interleave(group, dim=1)).transpose(1, 2)


def _is_common(layer: Any) -> bool:
    """Whether a module has the parts of the common kind of decoder layer, and no others."""
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
        and all(isinstance(part, IntegerPart) for part in stacked)
        and all(isinstance(part, IntegerLinear) and part.bias is None for part in plain)
        and layer.mlp.gate_proj.whole.bias is None
        and torch.allclose(layer.mlp.act_fn(gates), F.silu(gates))
    )


def _scaled(x: row_kernels.Array) -> _Scaled:
    out, scale = np.empty_like(x), np.empty(len(x), dtype=np.float32)
    row_kernels.scaled(x, out, scale)
    return out, scale


def _normed(x: row_kernels.Array, weight: row_kernels.Array, eps: np.float32) -> _Scaled:
    out, scale = np.empty_like(x), np.empty(len(x), dtype=np.float32)
    row_kernels.normed(x, weight, eps, out, scale)
    return out, scale


def _gated(y: row_kernels.Array, scale: row_kernels.Array) -> _Scaled:
    size = y.shape[1] // 2
    out, out_scale = np.empty((len(y), size), dtype=np.float32), np.empty(len(y), dtype=np.float32)
    row_kernels.gated(y, scale, out, out_scale, np.empty(size, dtype=np.int32))
    return out, out_scale
