"""Wrappers that corrupt a drafter's proposals or make its methods fail; neither may change an answer."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from langchain_card.core.drafter_state import MAX_NUMBER
from langchain_card.core.messages import Proposal
from langchain_card.core.request import Request
from langchain_card.ports import Budget, Drafter, Setting
from langchain_card.testing.proposal_checks import seeded


class WrappedDrafter:
    """Passes every call on to another drafter.

    Args:
        drafter: the other drafter.
    """

    def __init__(self, drafter: Drafter) -> None:
        self.drafter, self.name, self.paced = drafter, drafter.name, drafter.paced
        self.from_model = getattr(drafter, "from_model", False)

    def begin(self, request: Request, output_ids: Sequence[int]) -> None:
        """Pass the call on."""
        self.drafter.begin(request, output_ids)

    def correct(self, request_id: int, start: int, token_ids: Sequence[int]) -> None:
        """Pass the call on."""
        self.drafter.correct(request_id, start, token_ids)

    def step(self, budgets: Sequence[Budget]) -> list[Proposal]:
        """Pass the call on."""
        return self.drafter.step(budgets)

    def end(self, request_id: int) -> None:
        """Pass the call on."""
        self.drafter.end(request_id)

    def close(self) -> None:
        """Pass the call on."""
        self.drafter.close()


class CorruptingDrafter(WrappedDrafter):
    """Corrupts the proposals of a drafter; a proposal without nodes gets random ones first.

    Args:
        drafter: the other drafter.
        setting: of the engine.
        corruption: one of `CORRUPTIONS`.

    Attributes:
        last: the previous proposal.
    """

    def __init__(self, drafter: Drafter, setting: Setting, corruption: str) -> None:
        super().__init__(drafter)
        self.setting, self.rng = setting, seeded(corruption)
        self.last: Proposal | None = None
        self._corrupt = CORRUPTIONS[corruption]

    def step(self, budgets: Sequence[Budget]) -> list[Proposal]:
        """Take a step, and corrupt its proposals."""
        proposals = [self._fill(proposal) for proposal in self.drafter.step(budgets)]
        corrupted = [wrong for proposal in proposals for wrong in self._corrupt(self, proposal)]
        self.last = proposals[-1] if proposals else self.last
        return corrupted

    def tokens(self, count: int) -> tuple[int, ...]:
        """Return random tokens."""
        return tuple(self.rng.randrange(self.setting.vocab_size) for _ in range(count))

    def _fill(self, p: Proposal) -> Proposal:
        return p if p.token_ids else chain(p, self.tokens(3))


def chain(p: Proposal, token_ids: Sequence[int]) -> Proposal:
    """Return the proposal with these tokens in a chain below its root, instead of its own."""
    count = len(token_ids)
    parents = (p.root, *range(p.first, p.first + count - 1))[:count]
    return replace(p, token_ids=tuple(token_ids), parents=parents, scores=(-0.1,) * count, expanded=())


def _longer(drafter: CorruptingDrafter, p: Proposal) -> list[Proposal]:
    return [chain(p, (*p.token_ids, *drafter.tokens(3000)))]


def _endless(drafter: CorruptingDrafter, p: Proposal) -> list[Proposal]:
    return [chain(p, drafter.tokens(1) * MAX_NUMBER)]


def _ends(drafter: CorruptingDrafter, p: Proposal) -> list[Proposal]:
    stop = drafter.setting.eos_ids[0]
    return [chain(p, [each for token in p.token_ids for each in (token, stop)]), chain(p, (stop,) * 3)]


def _parents(drafter: CorruptingDrafter, p: Proposal) -> list[Proposal]:
    return [replace(p, parents=tuple(drafter.rng.randrange(p.first + i) for i in range(len(p.token_ids))))]


def _ahead(drafter: CorruptingDrafter, p: Proposal) -> list[Proposal]:
    return [replace(p, parents=tuple(range(p.first + 1, p.first + 1 + len(p.parents)))), replace(p, parents=())]


def _roots(drafter: CorruptingDrafter, p: Proposal) -> list[Proposal]:
    return [replace(p, root=root) for root in (drafter.rng.randrange(p.first), -1, 10**9)]


def _lengths(drafter: CorruptingDrafter, p: Proposal) -> list[Proposal]:
    return [replace(p, applied_len=max(0, p.applied_len + n)) for n in (-1, 1, 10**9)]


def _epochs(drafter: CorruptingDrafter, p: Proposal) -> list[Proposal]:
    return [replace(p, epoch=epoch) for epoch in (p.epoch + drafter.rng.randrange(3), -1, 10**30)]


def _scores(drafter: CorruptingDrafter, p: Proposal) -> list[Proposal]:
    odd = (math.nan, math.inf, 3.0, -math.inf, "likely", None)
    return [replace(p, scores=(score,) * len(p.scores)) for score in odd]  # type: ignore[arg-type]


def _requests(drafter: CorruptingDrafter, p: Proposal) -> list[Proposal]:
    return [replace(p, request_id=p.request_id + drafter.rng.randint(-1, 1))]


def _times(drafter: CorruptingDrafter, p: Proposal) -> list[Proposal]:
    return [replace(p, elapsed=-1.0, forwarded=10**9, together=1, layers=0), replace(p, elapsed=1e30, reading=math.nan)]


def _types(drafter: CorruptingDrafter, p: Proposal) -> list[Proposal]:
    odd: tuple[Any, ...] = (None, "x", 1.5, (1,))
    return [replace(p, token_ids=(each,) * len(p.parents)) for each in odd]


def _lists(drafter: CorruptingDrafter, p: Proposal) -> list[Proposal]:
    """Send lists, and change them after they were sent."""
    sent = replace(p, token_ids=[*p.token_ids], parents=[*p.parents], scores=[*p.scores])  # type: ignore[arg-type]
    for kept in (getattr(drafter.last, "token_ids", ()), getattr(drafter.last, "parents", ())):
        if isinstance(kept, list):
            kept += [drafter.setting.vocab_size + 10**9] * 3
    drafter.last = sent
    return [sent]


def _odd(p: Proposal, **fields: Any) -> Proposal:
    return replace(p, **fields)


CORRUPTIONS: Mapping[str, Callable[[CorruptingDrafter, Proposal], list[Any]]] = {
    "wrong tokens": lambda drafter, p: [chain(p, [(t + 1) % drafter.setting.vocab_size for t in p.token_ids])],
    "no tokens": lambda drafter, p: [chain(p, ())],
    "too many": _longer,
    "endlessly many": _endless,
    "out of the vocabulary": lambda drafter, p: [chain(p, (drafter.setting.vocab_size,)), chain(p, (-1, 2**40))],
    "stop tokens": _ends,
    "repeated": lambda drafter, p: [p, p, p],
    "reordered": lambda drafter, p: [p, *([drafter.last] if drafter.last else [])],
    "late": lambda drafter, p: [drafter.last or chain(p, ())],
    "wrong parents": _parents,
    "parents ahead": _ahead,
    "wrong roots": _roots,
    "wrong lengths": _lengths,
    "wrong epochs": _epochs,
    "wrong scores": _scores,
    "other requests": _requests,
    "absurd times": _times,
    "other types": _types,
    "lists": _lists,
    "no sequences": lambda drafter, p: [_odd(p, parents=None), _odd(p, token_ids=5), _odd(p, expanded=iter(()))],
    "huge numbers": lambda drafter, p: [_odd(p, scores=(-(10**400),) * len(p.scores)), _odd(p, elapsed=10**400)],
    "odd sources": lambda drafter, p: [_odd(p, source=["x"]), _odd(p, request_id=[1]), _odd(p, source=None)],
    "another's name": lambda drafter, p: [_odd(p, source="another")],
    "no proposals": lambda drafter, p: [None],
}
"""Ways to corrupt proposals, by name: each maps a proposal to those that are sent instead."""

FAILURES: Mapping[str, tuple[str, type[Exception]]] = {
    "begin": ("begin", KeyError),
    "correct": ("correct", KeyError),
    "step": ("step", KeyError),
    "end": ("end", KeyError),
    "close": ("close", KeyError),
    "memory": ("step", MemoryError),
}
"""Failures of a drafter, by name: the method that fails, and its exception."""


class FailingDrafter(WrappedDrafter):
    """Raises at every third call of one method; `close` raises at each call.

    Args:
        drafter: the other drafter.
        failure: one of `FAILURES`.
    """

    def __init__(self, drafter: Drafter, failure: str) -> None:
        super().__init__(drafter)
        name, error = FAILURES[failure]
        method, calls = getattr(drafter, name), 0

        def failing(*arguments: Any) -> Any:
            nonlocal calls
            calls += 1
            if name == "close" or not calls % 3:
                raise error("planted by the conformance suite")
            return method(*arguments)

        setattr(self, name, failing)
