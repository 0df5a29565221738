"""Texts that are replayed together have the scores that each has alone."""

from __future__ import annotations

import pytest
import torch

from langchain_card.heads.folder import KINDS
from langchain_card.heads.model import HeadModel
from langchain_card.testing import prompts
from langchain_card.train.record import RecordedText
from langchain_card.train.replay import Replay


def text_of(length: int, num_prompt: int) -> RecordedText:
    target = prompts.model("llama")
    shape = len(HeadModel.taps_of(target)), length - 1, target.config.hidden_size
    states = torch.randn(shape, dtype=torch.float64)
    return RecordedText(torch.randint(0, 250, (length,)).tolist(), states, num_prompt)


@pytest.mark.parametrize("kind", KINDS)
def test_texts_do_not_see_each_other(kind: str) -> None:
    """Texts of several lengths; the loss is that of all rows that have a node. Half a second."""
    target = prompts.model("llama")
    torch.manual_seed(2)
    head = KINDS[kind](target).to(torch.float64)
    for weight in head.parameters():
        if weight.requires_grad:
            torch.nn.init.normal_(weight, std=0.15)
    replay, texts = Replay(head, target), [text_of(30, 5), text_of(12, 4), text_of(25, 20)]
    together, alone = replay(texts), [replay([text]) for text in texts]
    assert torch.equal(together.right, torch.cat([each.right for each in alone], dim=1))
    assert together.accepted.tolist() == [n for each in alone for n in each.accepted.tolist()]
    lengths, steps = [len(text.token_ids) - 2 for text in texts], len(together.right)
    parts = [[replay([text], steps=step).loss for step in range(1, steps + 1)] for text in texts]
    if kind == "eagle":  # its steps can be replayed one by one
        wanted = torch.zeros((), dtype=torch.float64)
        for step in range(steps):
            rows = torch.tensor([length - step for length in lengths], dtype=torch.float64)
            own = torch.stack([part[step] - (part[step - 1] if step else 0.0) for part in parts])
            wanted = wanted + (own * rows).sum() / rows.sum()
        assert abs(together.loss - wanted) < 1e-9
