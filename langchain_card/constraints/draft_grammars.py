"""`DraftGrammars`: the grammars of requests as drafters follow them. A failure ends neither a drafter nor a request."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import TypeVar

from langchain_card.ports import Constraint

log = logging.getLogger(__name__)

_T = TypeVar("_T")


class DraftGrammars:
    """Opens grammars for drafters.

    Args:
        constrain: opens a grammar at the start of an answer; it may raise.
    """

    def __init__(self, constrain: Callable[[str], Constraint]) -> None:
        self._constrain, self._warned = constrain, False

    def start(self, grammar: str) -> DraftConstraint:
        """Return a grammar at the start of an answer."""
        try:
            return DraftConstraint(self, self._constrain(grammar))
        except Exception as error:
            self.report(error)
            return DraftConstraint(self, None)

    def report(self, error: Exception | None) -> None:
        """Log the first failure."""
        if not self._warned:
            self._warned = True
            log.warning(
                "a draft cannot follow the grammar of a request, and drafts without it: answers stay the same, but "
                "more candidates are refused (%s); this is logged once",
                "the grammar reached a limit" if error is None else f"{type(error).__name__}: {error}",
            )


class DraftConstraint:
    """A `ports.Constraint` that allows everything after a failure.

    Args:
        grammars: receives the first failure.
        constraint: the state of the grammar; None if it has failed.
    """

    def __init__(self, grammars: DraftGrammars, constraint: Constraint | None) -> None:
        self._grammars, self._constraint = grammars, constraint

    @property
    def failed(self) -> bool:
        """Whether it allows everything."""
        return self._constraint is None

    def fork(self) -> DraftConstraint:
        """Return an independent copy."""
        return DraftConstraint(self._grammars, self._call(lambda constraint: constraint.fork(), None))

    def accept(self, token_id: int) -> bool:
        """Append a token and return True, if it may come next and does not end the text; else change nothing."""
        return self._call(lambda constraint: constraint.accept(token_id), True)

    def fitting(self, token_ids: Sequence[int]) -> int:
        """Return how many of these tokens may come next, one after the other; an end of text may be the last."""
        return self._call(lambda constraint: constraint.fitting(token_ids), len(token_ids))

    def allowed(self) -> bytes:
        """Return the bit mask of the tokens that may come next; all 0 after a failure."""
        return self._call(lambda constraint: constraint.allowed(), bytes(1))

    def forced(self) -> list[int]:
        """Return the tokens of the text that must come next; none after a failure."""
        return self._call(lambda constraint: constraint.forced(), [])

    def closing(self, most: int) -> tuple[int, ...] | None:
        """Return tokens that complete the text; None after a failure."""
        return self._call(lambda constraint: constraint.closing(most), None)

    def _call(self, method: Callable[[Constraint], _T], otherwise: _T) -> _T:
        """Call a method; return `otherwise` if the grammar has failed, or fails now."""
        constraint, error = self._constraint, None
        if constraint is None:
            return otherwise
        try:
            result = method(constraint)
            if not constraint.failed:
                return result
        except Exception as raised:
            error = raised
        self._constraint = None
        self._grammars.report(error)
        return otherwise
