"""`HeadDrafter`: a tree of candidates by a head on the target's own states.

The target's passes are the head's reading: after each, the root's children are known without a step of their own. A
step reads the nodes that it expands, with the head's own output in place of the target's states.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor

from langchain_card.drafters.draft_step import DraftStep
from langchain_card.drafters.model import DraftSequence, ModelDrafter, StepPart
from langchain_card.errors import InvalidInputError
from langchain_card.heads.folder import find_head, head_bytes, head_digest, load_head
from langchain_card.heads.model import NUM_LAYERS
from langchain_card.ports import Budget, Setting
from langchain_card.runtime.heads import NUM_SCRATCH, HeadRunner, ObservedWindow, ObserverNeeds, TargetView
from langchain_card.runtime.rows import Rows
from langchain_card.runtime.sampling import likeliest


@dataclass(slots=True)
class _Drafted:
    """What the head has of a request between two windows.

    Attributes:
        window: the last window of the target.
        rows: those of it that were committed.
        outputs: of drafted nodes, by slot.
        slots: states of a head that drafts several tokens at once, [slots, features].
    """

    window: ObservedWindow
    rows: list[int]
    outputs: dict[int, Tensor] = field(default_factory=dict)
    slots: Tensor | None = None


class HeadDrafter(ModelDrafter):
    """Drafts with a head.

    Args:
        setting: of the engine.
        file: folder of the head; "" for the package's own head for this target.
    """

    name = "head"
    looks_ahead = False
    reads_target = True

    def __init__(self, setting: Setting, *, file: str = "") -> None:
        if setting.target is None:
            limit = "reads the target's states, which are in another process"
            raise InvalidInputError("drafters", self.name, limit, 'draft_transport="thread" keeps it here')
        runner = setting.target.read(f"head {file}", functools.partial(_load, str(file)))
        super().__init__(cast(Any, runner), vocab_size=setting.vocab_size, constrain=setting.constrain)
        self._head: HeadRunner = runner
        self._drafted: dict[int, _Drafted] = {}

    @classmethod
    def needs(cls, file: str = "") -> ObserverNeeds:
        """Return the memory that it takes. Matrices in blocks take less than their file."""
        return ObserverNeeds(head_bytes(str(file)), NUM_LAYERS, NUM_SCRATCH)

    @classmethod
    def digest(cls, file: str = "") -> str:
        """Return a hash of its weights; "" for those of the package, whose version stands for them."""
        return head_digest(str(file)) if file else ""

    def end(self, request_id: int) -> None:
        """Free the sequence."""
        self._drafted.pop(request_id, None)
        super().end(request_id)

    def _plan(self, budget: Budget, sequence: DraftSequence) -> StepPart:
        """Plan a request's part of a step; nothing before the target has read the text up to the root."""
        tree, drafted = sequence.tree, self._find(sequence)
        if drafted is None:
            return StepPart(sequence, DraftStep(tree, budget))
        return StepPart(sequence, DraftStep.plan(tree, budget, sequence.text[-1:], self._in_vocabulary))

    def _find(self, sequence: DraftSequence) -> _Drafted | None:
        """Return what the head has of a request; None if the target has not read it up to the root."""
        window = self._head.windows.get(sequence.request_id)
        if window is None or window.observed.window is None:
            return None
        known = self._drafted.get(sequence.request_id)
        new = len(sequence.text) - 1 - window.observed.window.start_position
        if known is None or known.window is not window:
            rows = window.path(sequence.text[-new:]) if new > 0 else None
            if rows is None:
                return None
            outputs = {} if known is None else known.outputs
            known = self._drafted[sequence.request_id] = _Drafted(window, rows, outputs)
        return known if len(known.rows) == new else None

    def _forward(self, parts: Sequence[StepPart]) -> Tensor:
        """Run one pass over the nodes of all parts; return logits of the head's tokens for all nodes, in order."""
        if self._head.num_slots:
            return torch.cat([self._slot_logits(part) for part in parts])
        outputs = [self._outputs_of_root(part) for part in parts]
        reading = [(number, part) for number, part in enumerate(parts) if outputs[number] is None]
        if reading:
            batch = [self._rows(part) for _, part in reading]
            found = torch.split(self._head.step(batch), [len(rows.token_ids) for rows in batch])
            for (number, part), own, rows in zip(reading, found, batch, strict=True):
                outputs[number] = own
                kept = self._drafted[part.sequence.request_id].outputs
                kept.update((path[-1], output) for path, output in zip(rows.paths or (), own, strict=True))
        return self._head.logits(torch.cat([output for output in outputs if output is not None]))

    def _best_children(
        self, sequence: DraftSequence, token_paths: Sequence[tuple[int, ...]], logits: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return chances and tokens; the whole vocabulary counts only where logits are processed."""
        if not sequence.sampler.idle:
            return super()._best_children(sequence, token_paths, self._head.spread(logits))
        values, places = likeliest(logits, min(self._num_children, logits.shape[1]))
        chances = values - logits.logsumexp(dim=-1, keepdim=True)
        return chances.where(values > -torch.inf, -torch.inf), self._head.token_ids(places)

    def _slot_logits(self, part: StepPart) -> Tensor:
        """Return logits of a part's nodes by the slots of their depths; nothing follows the last slot."""
        if part.step.heads != [part.step.tree.root]:
            part.step.place(self._read)
        drafted, paths = self._drafted[part.sequence.request_id], part.step.token_paths
        if drafted.slots is None:
            drafted.slots = self._head.slots(drafted.window.outputs[drafted.rows[-1:]])
        before = [path[-1] if path else part.sequence.text[-1] for path in paths]
        depths = torch.tensor([len(path) for path in paths], device=drafted.slots.device)
        states = drafted.slots[depths.clamp(max=len(drafted.slots) - 1)]
        return self._head.slot_logits(states, before).masked_fill((depths >= len(drafted.slots))[:, None], -torch.inf)

    def _outputs_of_root(self, part: StepPart) -> Tensor | None:
        """Return the output of the root, [1, features], if it is what a part expands."""
        if part.step.heads != [part.step.tree.root]:
            return None
        drafted = self._drafted[part.sequence.request_id]
        return drafted.window.outputs[drafted.rows[-1:]]

    def _rows(self, part: StepPart) -> Rows:
        """Return the rows of a part's nodes: below the committed rows of the target's last window."""
        drafted = self._drafted[part.sequence.request_id]
        token_ids, paths = part.step.place(self._read)
        assert paths is not None
        before, first = drafted.window.slots(drafted.rows), self._head.first_slot
        own = [tuple(first + slot for slot in path) for path in paths]
        root = drafted.window.outputs[drafted.rows[-1]]
        features = torch.stack([drafted.outputs[path[-2]] if len(path) > 1 else root for path in own])
        start = drafted.window.observed.rows.start
        whole = [(*before, *path) for path in own]
        return Rows(drafted.window.cache, token_ids, start, whole, features=features)


def _load(file: str, view: TargetView) -> HeadRunner:
    """Load a head for a target."""
    return HeadRunner(load_head(find_head(file, view.hash_model), view.model))
