"""The exact rule: which rows of a window are committed.

The target owns every token. A row is committed when all rows above it are and it is the token that the target chose
there; the target's choice after the last such row is committed too. So the answer is the target's own whatever the
candidates were: they decide only how many tokens one pass yields. (CARD, arXiv 2508.04462; greedy and sampled alike
when the target's draw is a function of its logits, the seed and the position.)
"""

from __future__ import annotations

from collections.abc import Sequence

from langchain_card.core.messages import Window
from langchain_card.core.request import FinishReason, Request


def walk(window: Window, target_ids: Sequence[int]) -> tuple[list[int], list[int]]:
    """Follows the window's tree as long as a candidate equals the target's token.

    Args:
        window: rows and their parents.
        target_ids: [rows] the target's own token after each row.

    Returns:
        The committed rows, the first of the window included, and the committed tokens: one after each of them.
    """
    child = {(parent, token): row for row, (parent, token) in enumerate(zip(window.parents, window.token_ids))}  # noqa: B905
    row: int | None = 0
    rows, tokens = [], []
    while row is not None:
        rows.append(row)
        tokens.append(target_ids[row])
        row = child.get((row, target_ids[row]))
    return rows, tokens


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
