"""Bounds that inputs are checked against, and the errors that name them."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from typing import Any

from langchain_card.errors import InvalidInputError


def check_choice(name: str, value: Any, choices: tuple[str, ...], hint: str = "") -> None:
    """Raises `InvalidInputError` naming the nearest choice, or else a hint, unless `value` is one of `choices`."""
    if value not in choices:
        near = difflib.get_close_matches(str(value), choices, n=1)
        raise InvalidInputError(
            name, value, f"must be one of {', '.join(choices)}", f"did you mean {near[0]}" if near else hint
        )


def check_range(name: str, value: Any, low: float, high: float, hint: str = "") -> None:
    """Raises `InvalidInputError` unless `low <= value <= high` and `value` is a number; whole when `low` is an int."""
    kinds, word = (int, "a whole number") if isinstance(low, int) else ((int, float), "a number")
    if isinstance(value, bool) or not isinstance(value, kinds) or not low <= value <= high:
        raise InvalidInputError(name, value, f"must be {word} between {low:,} and {high:,}", hint)


def check_ids(name: str, token_ids: Sequence[Any], most: int, vocab_size: int = 2**31) -> None:
    """Raises `InvalidInputError` unless there are at most `most` token ids, all different and in the vocabulary."""
    if len(token_ids) > most:
        raise InvalidInputError(name, len(token_ids), f"at most {most:,} tokens", "name fewer")
    for token in token_ids:
        check_range(name, token, 0, vocab_size - 1, "token ids are the target tokenizer's")
    if len(set(token_ids)) < len(token_ids):
        raise InvalidInputError(name, token_ids, "names a token twice", "name each token once")
