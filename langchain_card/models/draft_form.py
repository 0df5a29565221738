"""Turn a loaded model into a faster, less exact draft. Answers stay exact: the target decides every token."""

from __future__ import annotations

from typing import Any

from torch import nn

HEAD = 98_304
"""Rows kept of a draft's head: ids of byte pairs are in the order of their frequency (docs/LOG.md, 2026-11-22)."""


def changes(config: Any, form: str) -> bool:
    """Return whether a model with this text config and form changes when it becomes a draft."""
    return form == "int8" or config.vocab_size > HEAD


def make_draft(model: Any, form: str) -> None:
    """Cut a model's head to the most frequent tokens, and round its int8 layers to 4 bits.

    Args:
        model: a causal language model, as loaded.
        form: form of its weights, "int8" or "float".
    """
    if model.config.get_text_config().vocab_size > HEAD:
        _cut_head(model)
    if form == "int8":
        from langchain_card.runtime.cpu import int4  # imports numba, which float weights do not need

        int4.to_4_bits(model)


def _cut_head(model: Any) -> None:
    """Keep the first rows of a head, if its kind can be cut."""
    head = model.get_output_embeddings()
    if type(head) is nn.Linear:
        cut = nn.Linear(head.in_features, HEAD, bias=head.bias is not None, device="meta")
        for name, parameter in head.named_parameters():
            setattr(cut, name, nn.Parameter(parameter[:HEAD], requires_grad=False))
        model.set_output_embeddings(cut)
    elif hasattr(head, "first_rows"):
        model.set_output_embeddings(head.first_rows(HEAD))
