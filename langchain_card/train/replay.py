"""Replay of a head over recorded texts: its loss, and how many of its tokens the target would take."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from langchain_card.heads.model import HeadModel
from langchain_card.train.record import RecordedText

NUM_STEPS = 3
"""Draft steps that are replayed, each on the output of the one before (training-time test, arXiv 2503.01840)."""

STEP_WEIGHT = 0.8
"""Weight of a step's loss against that of the step before."""

CROSS_ENTROPY = 0.1
"""Weight of the cross-entropy beside the total variation distance, which is the chance of a rejection."""


@dataclass(frozen=True, slots=True)
class Replayed:
    """A text's replay.

    Attributes:
        loss: to be minimised.
        right: [steps, rows] whether the head's first choice was the text's token, for the rows of the answer; in step s
            for the node that hangs s below the row.
    """

    loss: Tensor
    right: Tensor

    @property
    def accepted(self) -> Tensor:
        """Tokens of a pass over a chain of all steps, the target's own included, [rows]."""
        return 1 + self.right.long().cumprod(dim=0).sum(dim=0)


class Replay:
    """Replays texts with a head.

    Args:
        head: of the target.
        target: a model of transformers.
    """

    def __init__(self, head: HeadModel, target: Any) -> None:
        self._head, self._target = head, target
        size = target.config.get_text_config().vocab_size
        places = torch.arange(len(head.rows.weight), device=head.device)
        ids = head.ids if head.ids is not None else places
        self._place = torch.full((size,), -1, device=head.device).index_copy(0, ids, places)
        self._rows = head.rows.weight

    def __call__(self, text: RecordedText, steps: int = NUM_STEPS) -> Replayed:
        """Replay a text with so many draft steps; a head of slots has one for each slot."""
        states = text.states.to(self._head.device, self._head.dtype)
        rows = states.shape[1] - 1  # a row's label is the token after the next
        tokens = torch.tensor(text.token_ids, device=self._head.device)
        with torch.no_grad():
            last = self._target.get_decoder().norm(states[-1, 1:][None].to(self._target.dtype))[0]
            wanted = F.linear(last.to(self._rows.dtype), self._rows).softmax(dim=-1)
        labels = self._places(tokens[2:])
        first, steps = max(0, text.num_prompt - 2), self._head.num_slots or steps
        losses, right = list[Tensor](), list[Tensor]()
        for step, scores in enumerate(self._head.replay(tokens[1:-1], self._head.fuse(states)[:rows], steps)):
            begin = first + step
            losses.append(STEP_WEIGHT**step * _loss(scores[begin:], wanted[begin:], labels[begin:]))
            right.append(F.pad(scores[begin:].argmax(dim=-1) == labels[begin:], (0, step)))
        return Replayed(torch.stack(losses).sum(), torch.stack(right))

    def _places(self, tokens: Tensor) -> Tensor:
        """Return the places of tokens among the head's; -1 for those that it leaves out."""
        return self._place[tokens]


def _loss(scores: Tensor, wanted: Tensor, labels: Tensor) -> Tensor:
    """Return the loss of rows: [rows, tokens] scores and the target's chances, [rows] places of labels or -1."""
    distance = 0.5 * (scores.softmax(dim=-1) - wanted).abs().sum(dim=-1)
    entropy = F.cross_entropy(scores, labels, ignore_index=-1, reduction="none")
    return (distance + CROSS_ENTROPY * entropy).mean()


def mean_accepted(replay: Replay, texts: Sequence[RecordedText]) -> float:
    """Return the mean number of tokens of a pass over all rows of texts."""
    with torch.no_grad():
        accepted = torch.cat([replay(text).accepted for text in texts])
    return float(accepted.double().mean())
