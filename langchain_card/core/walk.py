"""The exact rule: which rows of a window are committed. The seam for other rules.

The target owns every token. A row is committed when all rows above it are and it is the token that the target chose
there; the target's choice after the last such row is committed too. So the answer is the target's own whatever the
candidates were: they decide only how many tokens one pass yields. (CARD, arXiv 2508.04462; greedy and sampled alike
when the target's draw is a function of its logits, the seed and the position.)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from typing_extensions import Self

from langchain_card.core.messages import ROOT, Verdict, Window
from langchain_card.core.request import FinishReason, Request
from langchain_card.errors import EngineError


class AcceptanceRule(Protocol):
    """Which rows of a window are committed. Called by one thread at a time; a function of what it was given so far.

    A rule is part of the core: no clock and no randomness. `measure` and `is_exact` alone are called beside the target
    as well. What it raises, or says wrongly, ends the request alone: see `committed`.

    Attributes:
        name: of the rule.
        lossy: whether it may commit a token that the target did not choose.
    """

    name: str
    lossy: bool

    @property
    def measure(self) -> Callable[[Any], Sequence[float]] | None:
        """What the rule wants to know of logits [rows, vocabulary], a torch tensor: a number a row. None for nothing.

        Asked for the rows at which candidates stand and none is the target's own; `Verdict.measured` brings it. It
        keeps no state.
        """

    def is_exact(self, request: Request) -> bool:
        """Whether this answer is the target's own all the same: nothing is measured for it then. Keeps no state."""

    def walk(self, window: Window, verdict: Verdict, request: Request) -> tuple[list[int], list[int]]:
        """Says what one pass commits.

        Args:
            window: rows and their parents.
            verdict: the target's own token after each row, and what was measured there.
            request: whose window it is.

        Returns:
            The committed rows, the first of the window included, each below the one before it; and the committed
            tokens, one after each of them: those of the rows but the first, and at last the target's own.
        """

    def copy(self) -> Self:
        """An independent copy."""


class ExactRule:
    """Follows the window's tree as long as a candidate equals the target's token.

    Args:
        setting: a `ports.Setting`, as every rule gets one; there is nothing to be known.
    """

    name, lossy, measure = "exact", False, None

    def __init__(self, setting: object = None) -> None:
        del setting

    def is_exact(self, request: Request) -> bool:
        """Always."""
        return True

    def walk(self, window: Window, verdict: Verdict, request: Request) -> tuple[list[int], list[int]]:
        """The answer is the target's own."""
        child, target_ids = children(window), verdict.target_ids
        row: int | None = 0
        rows, tokens = [], []
        while row is not None:
            rows.append(row)
            tokens.append(target_ids[row])
            row = child.get((row, target_ids[row]))
        return rows, tokens

    def copy(self) -> Self:
        """Itself: it keeps nothing."""
        return self


def is_lossy(rule: AcceptanceRule, request: Request) -> bool:
    """Whether a rule may commit a token in this answer that the target did not choose."""
    return rule.lossy and not rule.is_exact(request)


def committed(
    rule: AcceptanceRule, window: Window, verdict: Verdict, request: Request
) -> tuple[list[int], list[int], bool]:
    """What a rule commits, checked, and whether it was free to be lossy. Rules are plug-ins: what they say is input.

    Raises:
        EngineError: the rule raised, or said something else than `AcceptanceRule.walk` may.
    """
    try:
        rows, tokens = map(list, rule.walk(window, verdict, request))
        in_line = all(row >= 0 for row in rows) and [window.parents[row] for row in rows] == [ROOT, *rows[:-1]]
        own = [verdict.target_ids[row] for row in rows]
        lossy = is_lossy(rule, request)
    except Exception as error:
        raise _broken(rule, f"failed ({type(error).__name__}: {error})") from error
    if not in_line:
        raise _broken(rule, f"committed rows {rows} that do not lie below one another")
    if tokens != [*(window.token_ids[row] for row in rows[1:]), own[-1]] or (tokens != own and not lossy):
        raise _broken(rule, f"committed {tokens} where the target had chosen {own}")
    return rows, tokens, lossy


def _broken(rule: AcceptanceRule, limit: str) -> EngineError:
    name = getattr(rule, "name", type(rule).__name__)
    return EngineError("acceptance", name, limit, 'mend the rule, or take acceptance="exact"')


def children(window: Window) -> dict[tuple[int, int], int]:
    """The rows of a window by parent and token."""
    return {(parent, token): row for row, (parent, token) in enumerate(zip(window.parents, window.token_ids))}  # noqa: B905


def mismatches(window: Window, target_ids: Sequence[int]) -> list[int]:
    """Rows at which candidates stand, none of them the target's own token."""
    child = children(window)
    return [row for row in sorted({*window.parents} - {ROOT}) if (row, target_ids[row]) not in child]


def cut(tokens: list[int], request: Request, num_output: int) -> tuple[list[int], FinishReason | None]:
    """Cuts a round's tokens at end of text and at `max_tokens`; nothing behind the cut counts.

    Args:
        tokens: committed in this round.
        request: its bounds.
        num_output: tokens of the answer before this round.

    Returns:
        The tokens that count, and why the request ends with them, or None when it goes on.
    """
    left = request.params.max_tokens - num_output
    for i, token in enumerate(tokens[:left]):
        if token in request.eos_ids:
            return tokens[: i + 1], FinishReason.STOP
    return (tokens[:left], FinishReason.LENGTH) if len(tokens) >= left else (tokens, None)
