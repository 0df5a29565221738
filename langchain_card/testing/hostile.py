"""Drafters around a drafter: one that lies, and one that fails. Neither may change an answer."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from langchain_card.core.drafter_state import MAX_NUMBER
from langchain_card.core.messages import Proposal
from langchain_card.core.request import Request
from langchain_card.ports import Budget, Drafter, Setting
from langchain_card.testing.proposal_checks import drawing


class Wrapped:
    """Does what another drafter does.

    Args:
        drafter: the other.
    """

    def __init__(self, drafter: Drafter) -> None:
        self.drafter, self.name, self.paced = drafter, drafter.name, drafter.paced

    def begin(self, request: Request, output_ids: Sequence[int]) -> None:
        """As the other."""
        self.drafter.begin(request, output_ids)

    def correct(self, request_id: int, start: int, token_ids: Sequence[int]) -> None:
        """As the other."""
        self.drafter.correct(request_id, start, token_ids)

    def step(self, budgets: Sequence[Budget]) -> list[Proposal]:
        """As the other."""
        return self.drafter.step(budgets)

    def end(self, request_id: int) -> None:
        """As the other."""
        self.drafter.end(request_id)

    def close(self) -> None:
        """As the other."""
        self.drafter.close()


class Lying(Wrapped):
    """Makes lies of what a drafter says; where that is nothing, of what it might have said.

    Args:
        drafter: the other.
        setting: where it works.
        lie: one of `LIES`.
    """

    def __init__(self, drafter: Drafter, setting: Setting, lie: str) -> None:
        super().__init__(drafter)
        self.setting, self.rng = setting, drawing(lie)
        self.last: Proposal | None = None
        self._lie = LIES[lie]

    def step(self, budgets: Sequence[Budget]) -> list[Proposal]:
        """Lies."""
        said = [self._fill(proposal) for proposal in self.drafter.step(budgets)]
        lies = [lie for proposal in said for lie in self._lie(self, proposal)]
        self.last = said[-1] if said else self.last
        return lies

    def tokens(self, count: int) -> tuple[int, ...]:
        """Any."""
        return tuple(self.rng.randrange(self.setting.vocab_size) for _ in range(count))

    def _fill(self, p: Proposal) -> Proposal:
        return p if p.token_ids else chain(p, self.tokens(3))


def chain(p: Proposal, token_ids: Sequence[int]) -> Proposal:
    """The same with these tokens below its root."""
    count = len(token_ids)
    parents = (p.root, *range(p.first, p.first + count - 1))[:count]
    return replace(p, token_ids=tuple(token_ids), parents=parents, scores=(-0.1,) * count, expanded=())


def _longer(liar: Lying, p: Proposal) -> list[Proposal]:
    return [chain(p, (*p.token_ids, *liar.tokens(3000)))]


def _endless(liar: Lying, p: Proposal) -> list[Proposal]:
    return [chain(p, liar.tokens(1) * MAX_NUMBER)]


def _ends(liar: Lying, p: Proposal) -> list[Proposal]:
    stop = liar.setting.eos_ids[0]
    return [chain(p, [each for token in p.token_ids for each in (token, stop)]), chain(p, (stop,) * 3)]


def _parents(liar: Lying, p: Proposal) -> list[Proposal]:
    return [replace(p, parents=tuple(liar.rng.randrange(p.first + i) for i in range(len(p.token_ids))))]


def _ahead(liar: Lying, p: Proposal) -> list[Proposal]:
    return [replace(p, parents=tuple(range(p.first + 1, p.first + 1 + len(p.parents)))), replace(p, parents=())]


def _roots(liar: Lying, p: Proposal) -> list[Proposal]:
    return [replace(p, root=root) for root in (liar.rng.randrange(p.first), -1, 10**9)]


def _lengths(liar: Lying, p: Proposal) -> list[Proposal]:
    return [replace(p, applied_len=max(0, p.applied_len + n)) for n in (-1, 1, 10**9)]


def _epochs(liar: Lying, p: Proposal) -> list[Proposal]:
    return [replace(p, epoch=epoch) for epoch in (p.epoch + liar.rng.randrange(3), -1, 10**30)]


def _scores(liar: Lying, p: Proposal) -> list[Proposal]:
    odd = (math.nan, math.inf, 3.0, -math.inf, "likely", None)
    return [replace(p, scores=(score,) * len(p.scores)) for score in odd]  # type: ignore[arg-type]


def _requests(liar: Lying, p: Proposal) -> list[Proposal]:
    return [replace(p, request_id=p.request_id + liar.rng.randint(-1, 1))]


def _times(liar: Lying, p: Proposal) -> list[Proposal]:
    return [replace(p, elapsed=-1.0, forwarded=10**9, together=1, layers=0), replace(p, elapsed=1e30, reading=math.nan)]


def _types(liar: Lying, p: Proposal) -> list[Proposal]:
    odd: tuple[Any, ...] = (None, "x", 1.5, (1,))
    return [replace(p, token_ids=(each,) * len(p.parents)) for each in odd]


def _lists(liar: Lying, p: Proposal) -> list[Proposal]:
    """It goes on using what it has handed over."""
    said = replace(p, token_ids=[*p.token_ids], parents=[*p.parents], scores=[*p.scores])  # type: ignore[arg-type]
    for kept in (getattr(liar.last, "token_ids", ()), getattr(liar.last, "parents", ())):
        if isinstance(kept, list):
            kept += [liar.setting.vocab_size + 10**9] * 3
    liar.last = said
    return [said]


def _odd(p: Proposal, **fields: Any) -> Proposal:
    return replace(p, **fields)


LIES: Mapping[str, Callable[[Lying, Proposal], list[Any]]] = {
    "wrong tokens": lambda liar, p: [chain(p, [(t + 1) % liar.setting.vocab_size for t in p.token_ids])],
    "no tokens": lambda liar, p: [chain(p, ())],
    "too many": _longer,
    "endlessly many": _endless,
    "out of the vocabulary": lambda liar, p: [chain(p, (liar.setting.vocab_size,)), chain(p, (-1, 2**40))],
    "stop tokens": _ends,
    "repeated": lambda liar, p: [p, p, p],
    "reordered": lambda liar, p: [p, *([liar.last] if liar.last else [])],
    "late": lambda liar, p: [liar.last or chain(p, ())],
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
    "no sequences": lambda liar, p: [_odd(p, parents=None), _odd(p, token_ids=5), _odd(p, expanded=iter(()))],
    "huge numbers": lambda liar, p: [_odd(p, scores=(-(10**400),) * len(p.scores)), _odd(p, elapsed=10**400)],
    "odd sources": lambda liar, p: [_odd(p, source=["x"]), _odd(p, request_id=[1]), _odd(p, source=None)],
    "another's name": lambda liar, p: [_odd(p, source="another")],
    "no proposals": lambda liar, p: [None],
}
"""What may be wrong with proposals, by name: of one, what comes in its place."""

FAILURES: Mapping[str, tuple[str, type[Exception]]] = {
    "begin": ("begin", KeyError),
    "correct": ("correct", KeyError),
    "step": ("step", KeyError),
    "end": ("end", KeyError),
    "close": ("close", KeyError),
    "memory": ("step", MemoryError),
}
"""What a drafter may fail with, by name: where, and how."""


class Failing(Wrapped):
    """Raises at every third call of one method; `close` at each.

    Args:
        drafter: the other.
        failure: one of `FAILURES`.
    """

    def __init__(self, drafter: Drafter, failure: str) -> None:
        super().__init__(drafter)
        where, kind = FAILURES[failure]
        method, calls = getattr(drafter, where), 0

        def failing(*arguments: Any) -> Any:
            nonlocal calls
            calls += 1
            if where == "close" or not calls % 3:
                raise kind("planted by the conformance suite")
            return method(*arguments)

        setattr(self, where, failing)
