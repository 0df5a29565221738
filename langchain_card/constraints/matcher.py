"""`Matcher`: the state of a grammar after the tokens so far."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import TYPE_CHECKING

from typing_extensions import Self

from langchain_card.constraints.ending import ATTEMPTS, Vocabulary, find_ending
from langchain_card.constraints.hints import Hint

if TYPE_CHECKING:
    from llguidance import LLMatcher


class Matcher:
    """A `ports.Constraint` by llguidance.

    A grammar that reaches a bound of llguidance allows nothing from then on.

    Args:
        vocabulary: vocabulary of the answer's tokens.
        matcher: llguidance's matcher, owned by this object.
        hints: texts that the grammar may need within free text.
        ending: a text that once ended the grammar; it is tried first when an end is needed.
    """

    def __init__(
        self, vocabulary: Vocabulary, matcher: LLMatcher, hints: Sequence[Hint] = (), ending: bytes | None = None
    ) -> None:
        self._vocabulary, self._matcher = vocabulary, matcher
        self._hints, self._ending = hints, ending

    def fork(self) -> Self:
        """Return an independent copy."""
        return type(self)(self._vocabulary, self._matcher.deep_copy(), self._hints, self._ending)

    def accept(self, token_id: int) -> bool:
        """Advance by a token and return True, if it may come next and does not end the text; else change nothing."""
        if self._matcher.try_consume_tokens([token_id]) != 1:
            return False
        if self._ending:
            self._ending = self._ending.removeprefix(self._vocabulary.tokenizer.decode_bytes([token_id]))
        return True

    def allowed(self) -> bytes:
        """Return a mask: bit `i % 8` of byte `i // 8` is set if token i may come next."""
        mask = self._matcher.compute_bitmask()
        return bytes(len(mask)) if self._matcher.is_error() else mask

    def forced(self) -> list[int]:
        """Return the text that must come next, in the tokenizer's own tokens."""
        return list(self._matcher.compute_ff_tokens())

    def closing(self, most: int) -> tuple[int, ...] | None:
        """Return tokens that end the text: the first end of at most `most` tokens, else the shortest that was found.

        Args:
            most: number of tokens that there is room for.

        Returns:
            The tokens, without an end-of-text token; None if no attempt found an end.
        """
        best: tuple[int, ...] | None = None
        search = (find_ending(self._vocabulary, self._matcher, attempt, self._hints) for attempt in range(ATTEMPTS))
        for text in itertools.chain([self._ending], search):
            tokens = None if text is None else self._spell_ending(text)
            if tokens is not None and (best is None or len(tokens) < len(best)):
                best, self._ending = tokens, text
            if best is not None and len(best) <= most:
                break
        return best

    def _spell_ending(self, text: bytes) -> tuple[int, ...] | None:
        """Return the tokens of a text if it ends the grammar, else None."""
        matcher = self._matcher.deep_copy()
        tokens = self._vocabulary.consume(matcher, text)
        return tokens if tokens is not None and matcher.is_accepting() and not matcher.is_error() else None
