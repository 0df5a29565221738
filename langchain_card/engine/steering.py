"""Steering: a transform of the target's logits, before anything else sees them."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import overload

import torch
from torch import Tensor

from langchain_card.errors import InvalidInputError
from langchain_card.ports import Steering


class Text(Sequence[int]):
    """What stands before a token that is to be chosen, without a copy.

    Args:
        committed: tokens that are; others may be added to them later.
        path: tokens behind them.
    """

    __slots__ = ("_committed", "_path", "_split")

    def __init__(self, committed: Sequence[int], path: tuple[int, ...]) -> None:
        self._committed, self._path, self._split = committed, path, len(committed)

    def __len__(self) -> int:
        return self._split + len(self._path)

    def __iter__(self) -> Iterator[int]:
        return itertools.chain(itertools.islice(self._committed, self._split), self._path)

    @overload
    def __getitem__(self, index: int) -> int: ...

    @overload
    def __getitem__(self, index: slice) -> list[int]: ...

    def __getitem__(self, index: int | slice) -> int | list[int]:
        if isinstance(index, slice):
            return [self[place] for place in range(*index.indices(len(self)))]
        place = range(len(self))[index]
        return self._committed[place] if place < self._split else self._path[place - self._split]


@torch.inference_mode()
def steered(steering: Steering, logits: Tensor, texts: Sequence[Text]) -> Tensor:
    """The logits [rows, vocabulary] that steering makes of these.

    Raises:
        InvalidInputError: they have another shape, or are no numbers with fractions.
    """
    found = steering(logits, texts)
    if not isinstance(found, Tensor) or found.shape != logits.shape or not found.is_floating_point():
        said = f"{found.dtype} {tuple(found.shape)}" if isinstance(found, Tensor) else type(found).__name__
        raise InvalidInputError("steering", said, f"must return logits of the shape {tuple(logits.shape)}")
    return found
