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
    return RecordedText(torch.randint(0, 2, (length,)).tolist(), states, num_prompt)


@pytest.mark.parametrize("kind", KINDS)
def test_texts_do_not_see_each_other(kind: str) -> None:
    """Texts of several lengths, also where a draft step goes beyond a text's end. Half a second."""
    target = prompts.model("llama")
    torch.manual_seed(2)
    head = KINDS[kind](target, ids=torch.arange(2)).to(torch.float64)  # of two tokens, one is often right
    for weight in head.parameters():
        if weight.requires_grad:
            torch.nn.init.normal_(weight, std=0.15)
    replay, texts = Replay(head, target), [text_of(30, 5), text_of(12, 4), text_of(25, 20)]
    together, alone = replay(texts), [replay([text]) for text in texts]
    assert 0.2 < together.right.double().mean() < 0.8
    assert torch.equal(together.right, torch.cat([each.right for each in alone], dim=1))
    assert together.accepted.tolist() == [n for each in alone for n in each.accepted.tolist()]
    rows = [len(text.token_ids) - 2 for text in texts]
    tokens, features = torch.randint(0, 250, (sum(rows),)), torch.randn(sum(rows), target.config.hidden_size).double()
    positions = torch.cat([torch.arange(length) for length in rows])
    parts = zip(*(torch.split(each, rows) for each in (tokens, positions, features)), strict=True)
    own = [[*head.replay(*part, steps=3)] for part in parts]
    for step, scores in enumerate(head.replay(tokens, positions, features, steps=3)):
        for found, wanted in zip(torch.split(scores, rows), own, strict=True):
            torch.testing.assert_close(found[step:], wanted[step][step:], rtol=0, atol=1e-9)
