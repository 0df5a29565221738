"""Turn a loaded model into a faster, less exact draft. Answers stay exact: the target decides every token."""

from __future__ import annotations

from typing import Any

from torch import nn

HEAD = 98_304
"""Rows kept of a draft's head: ids of byte pairs are in the order of their frequency (docs/LOG.md, 2026-11-22)."""


def changes(config: Any, form: str) -> bool:
    """Return whether a model with this text config and form changes when it becomes a draft."""
    return form != "float" or config.vocab_size > HEAD


def cut_head(model: Any) -> None:
    """Keep the most frequent tokens of the head of a model with float weights, if its kind can be cut."""
    head = model.get_output_embeddings()
    if model.config.get_text_config().vocab_size > HEAD and type(head) is nn.Linear:
        cut = nn.Linear(head.in_features, HEAD, bias=head.bias is not None, device="meta")
        for name, parameter in head.named_parameters():
            setattr(cut, name, nn.Parameter(parameter[:HEAD], requires_grad=False))
        model.set_output_embeddings(cut)
