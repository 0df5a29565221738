"""Steering: a plug-in's transform of the target's logits, applied before any other processing."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import overload

import torch
from torch import Tensor

from langchain_card.errors import InvalidInputError
from langchain_card.ports import Steering


class TokenHistory(Sequence[int]):
    """The tokens before the next one: a view, not a copy.

    Args:
        committed: committed tokens; tokens appended later are not part of the view.
        path: candidates after them.
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
def apply_steering(steering: Steering, logits: Tensor, histories: Sequence[TokenHistory]) -> Tensor:
    """Return the steered logits, [rows, vocabulary].

    Raises:
        InvalidInputError: steering returned another shape, or no floating-point tensor.
    """
    steered = steering(logits, histories)
    if not isinstance(steered, Tensor) or steered.shape != logits.shape or not steered.is_floating_point():
        got = f"{steered.dtype} {tuple(steered.shape)}" if isinstance(steered, Tensor) else type(steered).__name__
        raise InvalidInputError("steering", got, f"must return logits of the shape {tuple(logits.shape)}")
    return steered
