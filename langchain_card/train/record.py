"""`Recorder`: keeps the states of texts while an engine answers, for a head to be trained on."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from langchain_card.runtime.heads import ObservedRows
from langchain_card.runtime.runner import ModelRunner

STORED = torch.float16
"""Type in which states are kept."""

LARGEST = torch.finfo(STORED).max


@dataclass(slots=True)
class RecordedText:
    """A text that a target has read or written, and its states.

    Attributes:
        token_ids: [rows + 1].
        states: [taps, rows, features] in `STORED`, of all tokens but the last.
        num_prompt: tokens of the prompt.
    """

    token_ids: list[int]
    states: Tensor
    num_prompt: int

    @property
    def prompt_ids(self) -> tuple[int, ...]:
        """Tokens of the prompt."""
        return (*self.token_ids[: self.num_prompt],)


@dataclass(slots=True)
class _Open:
    token_ids: list[int]
    num_prompt: int = 0
    states: list[Tensor] = field(default_factory=list)


class Recorder:
    """A `PassObserver` that hands over each text when its request ends. Requests run without candidates.

    Args:
        taps: layers whose states are kept.
        take: takes a text.
    """

    num_layers, num_scratch, digest = 0, 0, ""

    def __init__(self, taps: Sequence[int], take: Callable[[RecordedText], None]) -> None:
        self.taps, self._take = taps, take
        self._open: dict[int, _Open] = {}
        self._target: ModelRunner | None = None

    def bind(self, target: ModelRunner) -> None:
        """Take the target's runner."""
        self._target = target

    def observe(self, batch: Sequence[ObservedRows]) -> None:
        """Keep the states of all rows of a pass."""
        assert self._target is not None and self._target.states is not None
        states = torch.split(
            self._target.states.clamp(-LARGEST, LARGEST).to(STORED), [len(each.next_ids) for each in batch], dim=1
        )
        for each, part in zip(batch, states, strict=True):
            if each.rows.start == 0:
                self._open[each.request_id] = _Open([each.rows.token_ids[0]])
            if (text := self._open.get(each.request_id)) is not None:
                if len(text.token_ids) - 1 != each.rows.start:  # an earlier part was not read but reused
                    del self._open[each.request_id]
                    continue
                text.token_ids += each.next_ids
                text.states.append(part.to("cpu", copy=True))
                if each.window is None:
                    text.num_prompt = len(text.token_ids)

    def end(self, request_id: int) -> None:
        """Hand over a text."""
        if (text := self._open.pop(request_id, None)) is not None:
            self._take(RecordedText(text.token_ids, torch.cat(text.states, dim=1), text.num_prompt))

    def close(self) -> None:
        """Hand over the texts whose requests have not ended."""
        for request_id in [*self._open]:
            self.end(request_id)
        self._target = None

    def forget(self) -> None:
        """Drop the texts that are not complete."""
        self._open.clear()
