"""`HeadModel`: what heads have in common, so that a `ModelRunner` runs them like a model of transformers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from langchain_card.errors import UnsupportedModelError
from langchain_card.runtime.attention import ATTENTION_NAME, Rotary, register
from langchain_card.runtime.families import decoder_layers, kv_shape

NUM_LAYERS = 1
"""Decoder layers of a head."""


class HeadOutput(NamedTuple):
    """The outputs of a head's rows, [1, rows, features], where a model of transformers has logits."""

    logits: Tensor


class Fusion(nn.Module):
    """Features of the target's rows by its states: the last one, and what a matrix makes of the others.

    Args:
        size: features of a state.
        num_taps: tapped layers.
        eps: epsilon of the norms.
    """

    def __init__(self, size: int, num_taps: int, eps: float) -> None:
        super().__init__()
        self.matrix, self.eps = nn.Linear((num_taps - 1) * size, size, bias=False), eps

    def forward(self, states: Tensor) -> Tensor:
        """Fuse states, [taps, rows, features], into [rows, features]."""
        *others, last = F.rms_norm(states, states.shape[-1:], eps=self.eps)
        fused: Tensor = last + self.matrix(torch.cat(others, dim=-1))
        return fused


class Mixture(nn.Module):
    """What the layers of a head read: features, and what a matrix makes of them and of the token after.

    Args:
        size: features of a state.
        eps: epsilon of the norms.
    """

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.matrix, self.eps = nn.Linear(2 * size, size, bias=False), eps
        self.token_norm, self.feature_norm = nn.RMSNorm(size, eps), nn.RMSNorm(size, eps)

    def forward(self, features: Tensor, embedded: Tensor) -> Tensor:
        """Mix features and embeddings of tokens, both [1, rows, features], into the same."""
        normed = torch.cat([self.token_norm(embedded), self.feature_norm(features)], dim=-1)
        mixed: Tensor = features + self.matrix(normed)
        return mixed


class HeadModel(nn.Module):
    """A head: a decoder layer of Llama's kind over states of the target, one row for each of its rows.

    The row of position t has the target's states there and the token after it, and predicts the token after that. Its
    layer is layer L of the target's KV, if that has L. Before a head is trained, it predicts what the target's last
    state stands for.

    Args:
        target: a model of transformers; its embedding, its output layer and the shape of its layers are used.
        ids: tokens that the head proposes; None for all.
        intermediate_size: of gated layers; None for 4/3 of the size of a state.

    Attributes:
        taps: layers of the target whose states the head reads.
        digest: hash of its file; "" for a head that was not read from one.
    """

    kind = ""

    digest = ""
    num_slots = 0
    """Tokens that the head drafts at once; 0 for a head that drafts one after the other."""

    def __init__(
        self,
        target: Any,
        *,
        ids: Tensor | None = None,
        intermediate_size: int | None = None,
    ) -> None:
        super().__init__()
        config, decoder = target.config.get_text_config(), target.get_decoder()
        needed = [(config, "rope_parameters"), (config, "rms_norm_eps"), (decoder, "embed_tokens"), (decoder, "norm")]
        if lacking := [name for owner, name in needed if getattr(owner, name, None) is None]:
            limit = f"lacks {', '.join(lacking)}, which a head needs"
            raise UnsupportedModelError("model", config.model_type, limit, "heads are for Llama, Qwen, Gemma, ...")
        self.taps, first = self.taps_of(target), len(decoder_layers(target))
        self.config = _layer_config(config, intermediate_size)
        self._embedding: tuple[Any] = (decoder.embed_tokens,)  # in a tuple: no part of the head
        own = _decoder(self.config)
        self.layers, self.norm = own.layers, own.norm
        self.rotary_emb = Rotary(self.config.head_dim, self.config.rope_parameters["rope_theta"])
        self.layers[0].self_attn.layer_idx = first
        size, eps = self.config.hidden_size, self.config.rms_norm_eps
        self.fusion, self.mixture = Fusion(size, len(self.taps), eps), Mixture(size, eps)
        ones = torch.ones(1, size, dtype=target.dtype, device=target.device)
        with torch.no_grad():
            self.norm.weight.copy_(decoder.norm(ones)[0])
            out, down = self.layers[0].self_attn.o_proj, self.layers[0].mlp.down_proj
            for added in (self.fusion.matrix, self.mixture.matrix, out, down):
                added.weight.zero_()
        self.ids: Tensor | None
        self.register_buffer("ids", ids, persistent=False)
        self.rows, self._vocab_size = _rows_of(target, ids), config.vocab_size

    @staticmethod
    def taps_of(target: Any) -> list[int]:
        """Return the layers of a target whose states a head reads: a low one, a middle one and the last."""
        last = len(decoder_layers(target)) - 1
        return sorted({min(2, last), last // 2, last})

    @property
    def device(self) -> torch.device:
        """The device of its weights."""
        device: torch.device = self.norm.weight.device
        return device

    @property
    def dtype(self) -> torch.dtype:
        """The type of its weights."""
        dtype: torch.dtype = self.norm.weight.dtype
        return dtype

    def get_decoder(self) -> HeadModel:
        """Return the head itself: what transformers' models have around their decoder, this one has not."""
        return self

    def fuse(self, states: Tensor) -> Tensor:
        """Return features of the target's rows, [rows, features], by their states, [taps, rows, features]."""
        fused: Tensor = self.fusion(states)
        return fused

    def forward(
        self, input_ids: Tensor, position_ids: Tensor, features: Tensor, logits_to_keep: int | Tensor = 0, **step: Any
    ) -> HeadOutput:
        """Run the layers over rows.

        Args:
            input_ids: [1, rows] the token after each row.
            position_ids: [1, rows].
            features: [1, rows, features] of the target (`fuse`), or the output of the row before.
            logits_to_keep: rows whose outputs are returned, or 0 for all.
            step: arguments of the attention.
        """
        hidden = self.mixture(features, self._embedding[0](input_ids).to(features.dtype))
        angles = self.rotary_emb(hidden, position_ids)
        for layer in self.layers:
            hidden = layer(hidden, position_embeddings=angles, position_ids=position_ids, **step)
        return HeadOutput(hidden if isinstance(logits_to_keep, int) else hidden[:, logits_to_keep])

    def replay(self, token_ids: Tensor, positions: Tensor, features: Tensor, steps: int) -> Iterator[Tensor]:
        """Yield the scores of drafts over whole texts, step by step, with gradients.

        Args:
            token_ids: [rows] the token after each row.
            positions: [rows] places in their texts, which follow each other.
            features: [rows, features] of the target (`fuse`).
            steps: number of draft steps; heads of slots have one for each slot.

        Yields:
            [rows, tokens of the head]: in step s (from 0), row r has the node that hangs below row r - s, after the
            text's tokens up to `token_ids[r]`. The first s rows of each text have no such node.
        """
        raise NotImplementedError

    def logits(self, outputs: Tensor) -> Tensor:
        """Return logits of the head's tokens, [rows, tokens], by outputs [rows, features]."""
        found: Tensor = self.rows(self.norm(outputs))
        return found

    def spread(self, logits: Tensor) -> Tensor:
        """Return logits of the target's vocabulary by those of the head's tokens; -inf for tokens it leaves out."""
        if self.ids is None:
            return logits
        return logits.new_full((len(logits), self._vocab_size), -torch.inf).index_copy_(1, self.ids, logits)

    def slots(self, outputs: Tensor) -> Tensor:
        """Return states of the slots, [rows, num_slots, features], by outputs [rows, features]."""
        raise NotImplementedError

    def slot_logits(self, slots: Tensor, before: Tensor) -> Tensor:
        """Return logits of the head's tokens by states of slots, [rows, features], and the tokens before them."""
        raise NotImplementedError


def _rows_of(target: Any, ids: Tensor | None) -> nn.Linear:
    """Return the rows of a target's output layer for some tokens, or for all."""
    layer, size = target.get_output_embeddings(), target.config.get_text_config().hidden_size
    with torch.no_grad():
        weight = getattr(layer, "weight", None)
        if weight is not None:
            weight = weight if ids is None else weight[ids]
        else:  # its matrix is in blocks; the whole one in float32 may take more memory than there is
            pieces = map(layer, torch.split(torch.eye(size), 64))
            weight = torch.cat([piece if ids is None else piece[:, ids] for piece in pieces]).T
    rows = nn.Linear(size, len(weight), bias=False, device="meta")
    rows.weight = nn.Parameter(weight.contiguous(), requires_grad=False)
    return rows


def _layer_config(config: Any, intermediate_size: int | None) -> Any:
    """Return the configuration of a head's layers: Llama's, whose keys and values have the target's shape."""
    from transformers import LlamaConfig  # more than a second

    rope = config.rope_parameters
    shape = kv_shape(config)
    return LlamaConfig(
        vocab_size=config.hidden_size,  # outputs stand where a model has logits
        hidden_size=config.hidden_size,
        intermediate_size=intermediate_size or _round_up(config.hidden_size * 4 // 3),
        num_hidden_layers=NUM_LAYERS,
        num_attention_heads=config.num_attention_heads,
        num_key_value_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        max_position_embeddings=config.max_position_embeddings,
        rms_norm_eps=config.rms_norm_eps,
        rope_parameters={"rope_type": "default", "rope_theta": rope.get("full_attention", rope)["rope_theta"]},
    )


def _round_up(size: int) -> int:
    """Return a size of whole blocks of 256, or of 32 for tiny models."""
    block = 256 if size > 512 else 32
    return -(-size // block) * block


def _decoder(config: Any) -> Any:
    """Make a decoder of transformers with random weights."""
    from transformers import LlamaModel

    register()
    config._attn_implementation = ATTENTION_NAME
    return LlamaModel(config)
