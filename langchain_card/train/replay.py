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
    """A replay of texts.

    Attributes:
        loss: to be minimised; over the rows of the prompts as well, where the target has chances too.
        right: [steps, rows] whether the head's first choice was the text's token, for the rows of the answers; in step
            s for the node that hangs s below the row.
    """

    loss: Tensor
    right: Tensor

    @property
    def accepted(self) -> Tensor:
        """Tokens of a pass over a chain of `NUM_STEPS`, the target's own included, [rows]."""
        return 1 + self.right[:NUM_STEPS].long().cumprod(dim=0).sum(dim=0)


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

    def __call__(self, texts: Sequence[RecordedText], steps: int = NUM_STEPS) -> Replayed:
        """Replay texts, all in one pass, with so many draft steps; a head of slots has one for each slot."""
        device, steps = self._head.device, self._head.num_slots or steps
        states = [text.states.to(device, self._head.dtype) for text in texts]  # autocast joins no float16
        features = self._head.fuse(torch.cat([each[:, :-1] for each in states], dim=1))
        tokens, labels, positions, is_answer = (
            torch.tensor([each for text in texts for each in find(text)], device=device)
            for find in (_next_tokens, _labels, _positions, _is_answer)
        )
        labels = self._place[labels]
        wanted = self._wanted(torch.cat([each[-1, 1:] for each in states]))
        losses, right = list[Tensor](), list[Tensor]()
        for step, scores in enumerate(self._head.replay(tokens, positions, features, steps)):
            has_node = positions >= step
            loss = _loss(scores, wanted, labels)[has_node].mean()
            losses.append(STEP_WEIGHT**step * loss)
            hits = (scores.argmax(dim=-1) == labels) & has_node
            right.append(F.pad(hits[step:], (0, step))[is_answer])
        return Replayed(torch.stack(losses).sum(), torch.stack(right))

    @torch.no_grad()
    def _wanted(self, states: Tensor) -> Tensor:
        """Return the target's chances of the head's tokens, [rows, tokens], by its last states [rows, features]."""
        last = self._target.get_decoder().norm(states[None].to(self._target.dtype))[0]
        return F.linear(last.to(self._rows.dtype), self._rows).softmax(dim=-1)


def _next_tokens(text: RecordedText) -> Sequence[int]:
    """Return the token after each row. The last state is no row: its label would be the token after the next."""
    return text.token_ids[1:-1]


def _labels(text: RecordedText) -> Sequence[int]:
    """Return what the head is to predict after each row: the token after the next."""
    return text.token_ids[2:]


def _positions(text: RecordedText) -> Sequence[int]:
    """Return the positions of rows."""
    return range(len(text.token_ids) - 2)


def _is_answer(text: RecordedText) -> Sequence[bool]:
    """Return whether a row's label is a token of the answer."""
    return [row >= text.num_prompt - 2 for row in _positions(text)]


def _loss(scores: Tensor, wanted: Tensor, labels: Tensor) -> Tensor:
    """Return the loss of each row: [rows, tokens] scores and the target's chances, [rows] places of labels or -1."""
    distance = 0.5 * (scores.softmax(dim=-1) - wanted).abs().sum(dim=-1)
    return distance + CROSS_ENTROPY * F.cross_entropy(scores, labels, ignore_index=-1, reduction="none")


def mean_accepted(replay: Replay, texts: Sequence[RecordedText]) -> float:
    """Return the mean number of tokens of a pass over all rows of texts."""
    with torch.no_grad():
        accepted = torch.cat([replay([text]).accepted for text in texts])
    return float(accepted.double().mean())
