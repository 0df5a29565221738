"""What makes a model a faster draft, at the price of its own exactness: the target owns every token anyway."""

from __future__ import annotations

from typing import Any

from torch import nn

HEAD = 98_304
"""Tokens that a draft proposes, at most: byte-pair ids are in the order of their frequency (docs/LOG.md)."""


def changes(config: Any, form: str) -> bool:
    """Whether a model of this text config and form is another one as a draft."""
    return form == "int8" or config.vocab_size > HEAD


def make_draft(model: Any, form: str) -> None:
    """Cuts a model's head to the most frequent tokens, and rounds its int8 layers to 4 bits.

    Args:
        model: a causal language model, as it was loaded.
        form: of its weights, "int8" or "float".
    """
    if model.config.get_text_config().vocab_size > HEAD:
        _cut_head(model)
    if form == "int8":
        from langchain_card.runtime.cpu import int4  # with a compiler, which float weights do not need

        int4.to_4_bits(model)


def _cut_head(model: Any) -> None:
    """Leaves a head its first rows, where it is one that can be cut."""
    head = model.get_output_embeddings()
    if type(head) is nn.Linear:
        cut = nn.Linear(head.in_features, HEAD, bias=head.bias is not None, device="meta")
        for name, parameter in head.named_parameters():
            setattr(cut, name, nn.Parameter(parameter[:HEAD], requires_grad=False))
        model.set_output_embeddings(cut)
    elif hasattr(head, "first_rows"):
        model.set_output_embeddings(head.first_rows(HEAD))
