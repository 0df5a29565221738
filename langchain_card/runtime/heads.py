"""`HeadRunner`: a head over the sequences of its target, of which it observes every pass."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any, Protocol, TypeVar, cast

import torch
from torch import Tensor

from langchain_card import plugins
from langchain_card.core.messages import Window
from langchain_card.core.walk import children
from langchain_card.errors import InvalidInputError
from langchain_card.runtime.kv_cache import KVCache
from langchain_card.runtime.rows import Rows
from langchain_card.runtime.runner import ModelRunner

NUM_SCRATCH = 64
"""Nodes of a tree that a head holds keys and values for."""


@dataclass(frozen=True, slots=True)
class ObservedRows:
    """Rows of a sequence in a pass of the target.

    Attributes:
        request_id: of the sequence.
        rows: those of the pass.
        next_ids: [rows] the token after each: of a text, the next one; of a window, the one that the target chose.
        window: the window that they are; None for a text.
    """

    request_id: int
    rows: Rows
    next_ids: Sequence[int]
    window: Window | None = None


def observed_windows(
    windows: Sequence[Window], rows: Sequence[Rows], target_ids: Sequence[Sequence[int]]
) -> list[ObservedRows]:
    """Return the windows of a pass: each row with the token that the target chose."""
    return [
        ObservedRows(window.request_id, own, [max(token, 0) for token in ids], window)
        for window, own, ids in zip(windows, rows, target_ids, strict=True)
    ]


@contextlib.contextmanager
def unread_on_failure(texts: Sequence[Rows]) -> Iterator[None]:
    """Count texts of a pass as unread if it is repeated: memory ran out before it could be observed."""
    try:
        yield
    except Exception:
        for rows in texts:
            del rows.cache.token_ids[rows.start :]
        raise


@dataclass(frozen=True, slots=True)
class ObservedWindow:
    """The last window of a sequence, and what the head makes of it.

    Attributes:
        observed: its rows.
        outputs: [rows, features] of the head.
    """

    observed: ObservedRows
    outputs: Tensor

    @property
    def cache(self) -> KVCache:
        """The sequence's KV."""
        return self.observed.rows.cache

    def path(self, token_ids: Sequence[int]) -> list[int] | None:
        """Return the rows that were committed with these tokens; None if the target did not choose the last one."""
        window = self.observed.window
        if window is None or not token_ids:
            return None
        rows, below = [0], children(window)
        for token in token_ids[:-1]:
            if (row := below.get((rows[-1], token))) is None:
                return None
            rows.append(row)
        return rows if self.observed.next_ids[rows[-1]] == token_ids[-1] else None

    def slots(self, rows: Sequence[int]) -> list[int]:
        """Return the slots of rows."""
        assert self.observed.rows.paths is not None
        return [self.observed.rows.paths[row][-1] for row in rows]


class HeadRunner:
    """A runner of a head. Its rows lie in slots behind those of the target's windows.

    Args:
        head: a `heads.model.HeadModel`.

    Attributes:
        num_scratch: nodes of a tree that the head holds keys and values for.
        first_slot: number of scratch slots that are the target's.
        windows: the last window of each sequence.
    """

    num_scratch = NUM_SCRATCH

    def __init__(self, head: Any) -> None:
        self._head, self.first_slot = head, 0
        self.taps, self.num_layers, self.digest = head.taps, len(head.layers), str(head.digest)
        self.windows: dict[int, ObservedWindow] = {}
        self._target: ModelRunner | None = None
        self._runner: ModelRunner | None = None

    def bind(self, target: ModelRunner) -> None:
        """Take a target, whose pool has room for the head's layers and nodes, and whose taps are the head's."""
        self._target = target
        self.first_slot = target.num_scratch - self.num_scratch
        self._runner = ModelRunner(
            self._head,
            max_len=target.max_len,
            num_scratch=target.num_scratch,
            execution="eager" if target.in_grids else None,
            target=target,
        )

    def on_stream(self) -> AbstractContextManager[None]:
        """Queue work on the target's stream."""
        assert self._target is not None
        return self._target.on_stream()

    @torch.inference_mode()
    def observe(self, batch: Sequence[ObservedRows]) -> None:
        """Write the head's keys and values for the rows of the target's last pass, and keep its outputs of windows.

        Args:
            batch: all rows of the pass, in order.
        """
        assert self._target is not None and self._runner is not None and self._target.states is not None
        sizes, features = [len(each.next_ids) for each in batch], self._head.fuse(self._target.states)
        rows = [
            replace(each.rows, token_ids=each.next_ids, features=part, ask=False)
            for each, part in zip(batch, torch.split(features, sizes), strict=True)
        ]
        outputs = torch.split(self._runner.step(rows), [len(each.wanted) for each in rows])
        for each, output in zip(batch, outputs, strict=True):
            if each.window is not None:
                self.windows[each.request_id] = ObservedWindow(each, output.clone())

    def end(self, request_id: int) -> None:
        """Forget a sequence."""
        self.windows.pop(request_id, None)

    def forget(self) -> None:
        """Forget all sequences."""
        self.windows.clear()

    @torch.inference_mode()
    def step(self, batch: Sequence[Rows]) -> Tensor:
        """Return the head's outputs of drafted rows, [rows, features]; each has features."""
        assert self._runner is not None
        return self._runner.step(batch)

    @property
    def num_slots(self) -> int:
        """Tokens that the head drafts at once; 0 for one after the other."""
        return int(self._head.num_slots)

    @torch.inference_mode()
    def slots(self, output: Tensor) -> Tensor:
        """Return states of the slots, [num_slots, features], by an output [1, features]."""
        found: Tensor = self._head.slots(output)[0]
        return found

    @torch.inference_mode()
    def slot_logits(self, slots: Tensor, before: Sequence[int]) -> Tensor:
        """Return logits of the head's tokens by states of slots, [rows, features], and the tokens before them."""
        found: Tensor = self._head.slot_logits(slots, torch.tensor(before, device=slots.device))
        return found

    @torch.inference_mode()
    def logits(self, outputs: Tensor) -> Tensor:
        """Return logits of the head's tokens, [rows, tokens]."""
        found: Tensor = self._head.logits(outputs)
        return found

    def spread(self, logits: Tensor) -> Tensor:
        """Return logits of the target's vocabulary by those of the head's tokens."""
        found: Tensor = self._head.spread(logits)
        return found

    def token_ids(self, places: Tensor) -> Tensor:
        """Return the target's ids of the head's tokens."""
        found: Tensor = places if self._head.ids is None else self._head.ids[places]
        return found


@dataclass(frozen=True, slots=True)
class ObserverNeeds:
    """Memory that an observer takes beside the target.

    Attributes:
        weights: bytes.
        layers: that it adds to the target's KV.
        scratch: slots of each sequence behind those of the target's windows.
    """

    weights: int = 0
    layers: int = 0
    scratch: int = 0


NO_OBSERVER = ObserverNeeds()


def observer_needs(drafters: Iterable[str]) -> ObserverNeeds:
    """Return what the one of some drafters needs that reads the target; nothing if none does.

    Args:
        drafters: specs of plug-ins. Those whose class has a method `needs`, which takes the options, are counted.
    """
    for spec in drafters:
        plugin = plugins.find("drafters", spec)
        if (needs := getattr(plugin.factory, "needs", None)) is not None:
            found: ObserverNeeds = needs(**plugin.options)
            return found
    return NO_OBSERVER


class PassObserver(Protocol):
    """What sees each pass of a target, such as a head."""

    @property
    def taps(self) -> Sequence[int]:
        """Layers of the target whose states it reads."""

    @property
    def num_layers(self) -> int:
        """Layers that it adds to the target's KV."""

    @property
    def num_scratch(self) -> int:
        """Slots of each sequence that it needs behind those of the target's windows."""

    @property
    def digest(self) -> str:
        """Hash of what the keys and values in its layers depend on; "" without layers."""

    def bind(self, target: ModelRunner) -> None:
        """Take the target's runner, which has the taps, the layers and the slots."""

    def observe(self, batch: Sequence[ObservedRows]) -> None:
        """Take all rows of a pass, in order."""

    def end(self, request_id: int) -> None:
        """Forget a sequence."""

    def forget(self) -> None:
        """Forget all sequences."""


Observing = TypeVar("Observing", bound=PassObserver)


class TargetView:
    """The target as plug-ins may read it: its model, and from then on the states of its passes.

    Args:
        hash_model: returns the hash of its files; without one, heads are not compared with it.

    Attributes:
        model: of transformers.
        observer: what reads its states, if anything does.
    """

    def __init__(self, hash_model: Callable[[], str] | None = None) -> None:
        self.hash_model, self.model = hash_model, cast(Any, None)
        self.observer: PassObserver | None = None
        self._name = ""

    def read(self, name: str, make: Callable[[TargetView], Observing]) -> Observing:
        """Return what reads the target's states under a name: `make(view)`, made once.

        Raises:
            InvalidInputError: something else reads them.
        """
        if self.observer is None:
            self._name, self.observer = name, make(self)
        if name != self._name:
            raise InvalidInputError("drafters", name, f"reads the target's states beside {self._name}", "name one")
        return cast(Observing, self.observer)
