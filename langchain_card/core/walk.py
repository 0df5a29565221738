"""The exact acceptance rule, which decides which rows of a window are committed, and the seam for other rules.

The target owns every token. A row is committed when all rows above it are committed and its token is the one that the
target chose there. The target's choice after the last such row is committed too. So the answer is the target's own
whatever the candidates were: they decide only how many tokens one pass yields. This holds for greedy decoding and for
sampling, because the target's draw is a function of its logits, the seed and the position. (CARD, arXiv 2508.04462.)
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from typing_extensions import Self

from langchain_card.core.messages import NO_TOKEN, ROOT, Verdict, Window
from langchain_card.core.request import FinishReason, Request
from langchain_card.errors import EngineError


class AcceptanceRule(Protocol):
    """Decides which rows of a window are committed. Called by one thread at a time.

    A rule is part of the core: it has no clock and no randomness, and depends on its arguments so far alone. Only
    `measure` and `is_exact` are called on the target's side as well. An exception or a wrong result ends one request:
    see `committed`.

    Attributes:
        name: name of the rule.
        lossy: whether it may commit a token that the target did not choose.
    """

    name: str
    lossy: bool

    @property
    def measure(self) -> Callable[[Any], Sequence[float]] | None:
        """Function from logits [rows, vocabulary], a torch tensor, to one number a row; None to measure nothing.

        Called for the rows that have candidates of which none is the target's choice. The numbers come back in
        `Verdict.measured`. It keeps no state.
        """

    def is_exact(self, request: Request) -> bool:
        """Return whether the rule answers this request exactly; nothing is measured for it then. Keeps no state."""

    def walk(self, window: Window, verdict: Verdict, request: Request) -> tuple[list[int], list[int]]:
        """Return what one pass commits.

        Args:
            window: rows and their parents.
            verdict: the target's own token after each row, and what was measured there.
            request: the request of the window.

        Returns:
            The committed rows, beginning with the first of the window, each below the one before it; and the committed
            tokens, one after each row: the tokens of all rows but the first, then the target's own.
        """

    def copy(self) -> Self:
        """Return an independent copy."""


class ExactRule:
    """Follows the window's tree as long as a candidate equals the target's token.

    Args:
        setting: a `ports.Setting`, which every rule is given; not used.
    """

    name, lossy, measure = "exact", False, None

    def __init__(self, setting: object = None) -> None:
        del setting

    def is_exact(self, request: Request) -> bool:
        """Return True."""
        return True

    def walk(self, window: Window, verdict: Verdict, request: Request) -> tuple[list[int], list[int]]:
        """Commit the target's own tokens."""
        child, target_ids = children(window), verdict.target_ids
        row: int | None = 0
        rows, tokens = [], []
        while row is not None:
            rows.append(row)
            tokens.append(target_ids[row])
            row = child.get((row, target_ids[row]))
        return rows, tokens

    def copy(self) -> Self:
        """Return itself: it keeps no state."""
        return self


def is_lossy(rule: AcceptanceRule, request: Request) -> bool:
    """Return whether a rule may commit a token in this answer that the target did not choose."""
    return rule.lossy and not rule.is_exact(request)


def committed(
    rule: AcceptanceRule, window: Window, verdict: Verdict, request: Request
) -> tuple[list[int], list[int], bool]:
    """Return the rows and tokens that a rule commits, checked, and whether it may be lossy here. Rules are plug-ins.

    Raises:
        EngineError: the rule raised, or returned something that `AcceptanceRule.walk` may not; the target's logits are
            not finite numbers.
    """
    try:
        rows, tokens = map(list, rule.walk(window, verdict, request))
        in_line = all(row >= 0 for row in rows) and [window.parents[row] for row in rows] == [ROOT, *rows[:-1]]
        own = [verdict.target_ids[row] for row in rows]
        lossy = is_lossy(rule, request)
    except Exception as error:
        raise _broken(rule, f"failed ({type(error).__name__}: {error})") from error
    if NO_TOKEN in own:
        raise damaged_logits()
    if not in_line:
        raise _broken(rule, f"committed rows {rows} that do not lie below one another")
    if tokens != [*(window.token_ids[row] for row in rows[1:]), own[-1]] or (tokens != own and not lossy):
        raise _broken(rule, f"committed {tokens} where the target had chosen {own}")
    return rows, tokens, lossy


def damaged_logits() -> EngineError:
    """Return the error of a request whose logits are not finite numbers."""
    hint = "the weights, or their configuration, are damaged"
    return EngineError("logits", math.nan, "must be finite numbers", hint)


def _broken(rule: AcceptanceRule, limit: str) -> EngineError:
    name = getattr(rule, "name", type(rule).__name__)
    return EngineError("acceptance", name, limit, 'mend the rule, or take acceptance="exact"')


def children(window: Window) -> dict[tuple[int, int], int]:
    """Return the rows of a window by parent and token."""
    return dict(zip(zip(window.parents, window.token_ids), itertools.count()))  # noqa: B905


def mismatches(window: Window, target_ids: Sequence[int]) -> list[int]:
    """Return the rows that have candidates of which none is the target's own token."""
    child = children(window)
    return [row for row in sorted({*window.parents} - {ROOT}) if (row, target_ids[row]) not in child]


def cut(tokens: list[int], request: Request, num_output: int) -> tuple[list[int], FinishReason | None]:
    """Cut a round's tokens at end of text and at `max_tokens`.

    Args:
        tokens: tokens committed in this round.
        request: its bounds.
        num_output: tokens of the answer before this round.

    Returns:
        The tokens before the cut, and the reason why the request ends with them, or None when it goes on.
    """
    left = request.params.max_tokens - num_output
    for i, token in enumerate(tokens[:left]):
        if token in request.eos_ids:
            return tokens[: i + 1], FinishReason.STOP
    return (tokens[:left], FinishReason.LENGTH) if len(tokens) >= left else (tokens, None)
