"""`CommonModel`: a causal language model of the common kind (Llama, Qwen 2 and 3, Mistral) with compiled layers.

Its parts have the names that they have in transformers, whose classes compute the same. Those take seconds to import,
and a millisecond of each pass.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from langchain_card.runtime.attention import Rotary
from langchain_card.runtime.cpu.fused_layers import FusedLayer
from langchain_card.runtime.cpu.quantized_layers import FusedRMSNorm
from langchain_card.runtime.rows import AttentionOptions

if TYPE_CHECKING:
    from langchain_card.runtime.attention import StepPlan

_ATTENTION, _MLP = ("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj")


def fits(config: Any, matrices: Collection[tuple[str, ...]]) -> bool:
    """Return whether `CommonModel` runs a model.

    Args:
        config: text config of a model that `families.is_common` knows.
        matrices: names of the linear layers in blocks, those that are one matrix together.
    """
    found = set(matrices)
    return all(group in found for layer in range(config.num_hidden_layers) for group in _groups(layer))


def _groups(layer: int) -> list[tuple[str, ...]]:
    attention, mlp = f"model.layers.{layer}.self_attn", f"model.layers.{layer}.mlp"
    stacked = [tuple(f"{part}.{name}" for name in names) for part, names in ((attention, _ATTENTION), (mlp, _MLP))]
    return [*stacked, (f"{attention}.o_proj",), (f"{mlp}.down_proj",)]


class _Linear(nn.Linear):
    """A linear layer whose weights are read, not drawn: drawing imports torch's compiler."""

    def reset_parameters(self) -> None:
        pass


class _Embedding(nn.Embedding):
    def reset_parameters(self) -> None:
        pass


class Output(NamedTuple):
    """Results of a pass.

    Attributes:
        logits: [1, wanted rows, vocabulary].
    """

    logits: Tensor


class CommonModel(nn.Module):
    """A model without weights, for `quantized_weights.read_weights`.

    Args:
        config: of the model.
        dtype: type of norms and activations.
    """

    def __init__(self, config: Any, dtype: torch.dtype) -> None:
        super().__init__()
        self.config, self.dtype, self.device = config, dtype, torch.device("cpu")
        text = config.get_text_config()
        self.model = _Decoder(text)
        with torch.device("meta"):
            self.lm_head = _Linear(text.hidden_size, text.vocab_size, bias=False)

    def get_decoder(self) -> nn.Module:
        """Return the model without its head."""
        return self.model

    def get_output_embeddings(self) -> nn.Module:
        """Return the head."""
        return self.lm_head

    def fuse(self) -> None:
        """Replace the layers, once they have their weights, by compiled ones."""
        layers: Any = self.model.layers
        self.model.layers = nn.ModuleList([FusedLayer(layer, layer.options) for layer in layers])

    def forward(self, *, logits_to_keep: int | Tensor = 0, **inputs: Any) -> Output:
        """Run a pass over rows as `_Decoder.forward`; `logits_to_keep` has the wanted rows, or is 0 for all."""
        hidden = self.model(**inputs)
        return Output(self.lm_head(hidden if isinstance(logits_to_keep, int) else hidden[:, logits_to_keep]))


class _Decoder(nn.Module):
    def __init__(self, config: Any) -> None:
        super().__init__()
        with torch.device("meta"):
            self.embed_tokens = _Embedding(config.vocab_size, config.hidden_size)
            self.layers = nn.ModuleList([_Layer(config, index) for index in range(config.num_hidden_layers)])
            self.norm = FusedRMSNorm(torch.empty(config.hidden_size), config.rms_norm_eps)
        self.rotary_emb = Rotary(_head_dim(config), config.rope_parameters["rope_theta"])

    def forward(self, *, input_ids: Tensor, position_ids: Tensor, step: StepPlan, **_: Any) -> Tensor:
        """Run a pass: [1, rows] token ids and positions -> [1, rows, features]."""
        hidden = self.embed_tokens(input_ids)
        cos_sin = self.rotary_emb(hidden, position_ids)
        for layer in self.layers:
            hidden = layer(hidden, position_embeddings=cos_sin, step=step)
        normed: Tensor = self.norm(hidden)
        return normed


class _Layer(nn.Module):
    """The parts of a decoder layer.

    Attributes:
        options: of its attention.
    """

    def __init__(self, config: Any, index: int) -> None:
        super().__init__()
        size, features = _head_dim(config), config.hidden_size
        self.options = AttentionOptions(size**-0.5, None, None)
        queries, keys = config.num_attention_heads * size, config.num_key_value_heads * size
        biased = config.model_type == "qwen2"
        attention: Any = nn.Module()
        attention.layer_idx, attention.head_dim = index, size
        for name, outputs in zip(_ATTENTION, (queries, keys, keys), strict=True):
            attention.add_module(name, _Linear(features, outputs, bias=biased))
        attention.o_proj = _Linear(queries, features, bias=False)
        if config.model_type == "qwen3":
            attention.q_norm, attention.k_norm = (
                FusedRMSNorm(torch.empty(size), config.rms_norm_eps) for _ in range(2)
            )
        mlp: Any = nn.Module()
        for name in _MLP:
            mlp.add_module(name, _Linear(features, config.intermediate_size, bias=False))
        mlp.down_proj = _Linear(config.intermediate_size, features, bias=False)
        self.self_attn, self.mlp = attention, mlp
        self.input_layernorm = FusedRMSNorm(torch.empty(features), config.rms_norm_eps)
        self.post_attention_layernorm = FusedRMSNorm(torch.empty(features), config.rms_norm_eps)


def _head_dim(config: Any) -> int:
    return int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)
