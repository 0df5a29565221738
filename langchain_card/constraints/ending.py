"""`find_ending`: a short end for a text under a grammar, searched byte by byte in several attempts.

A grammar gives only the bytes that may come next, not the distance to an end. So each attempt prefers bytes that
probably end something: a text from the grammar's own expressions (`hints`), then a quote or a bracket. The attempts
differ so that one succeeds where another runs in circles: some take the byte that they took least in the same state,
others always take the same byte, which leaves a recursion.
"""

from __future__ import annotations

import random
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from langchain_card.constraints.hints import Hint

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

ATTEMPTS = 8
_ROTATING = (1, 2, 5, 6)
"""Attempts that take the byte that they took least; the others always take the same."""
_MARKS = b'}]",:'
"""Bytes that end a value or lead to its end, the best first; within free text only the quote does."""
_QUOTE = b'"'
_FREE = 64
"""Number of allowed bytes above which the place is within free text: numbers, keys and choices allow fewer."""
_MAX_STEPS = 1000
"""Steps after which an attempt gives up; a run of bytes that the grammar forces is one step."""
_STRIDES = (256, 16)
"""Repetitions of a byte that are tried at once, for texts with a large minimum length."""
_MAX_BYTES = 10_000
"""Most bytes of an end."""
_MAX_TRIES = 4000
"""Most hints that an attempt tries, repetitions counted."""
_ORDER = bytes([*b"0123456789", *range(ord("a"), ord("z") + 1), *range(ord("A"), ord("Z") + 1), *b"-_.@/+[{ "])
"""Bytes that are tried after the marks; all other bytes come later."""
_SEPARATORS = b"@:./-"
"""Separators within addresses and codes."""
_CONTROL = re.compile(rb"\xff\[(\d+)\]")
_PADDING = re.compile(rb"([0-9A-Za-z ])\1{4,}")
"""A run of one byte, which fills a text up to its least length. Rulers of other signs are constants of a schema."""
_PADDING_BYTES = 4
"""Bytes of a token of padding, as many as ordinary text has: a token of 64 blanks would make long texts seem to fit."""


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """A tokenizer for grammars.

    Attributes:
        tokenizer: a tokenizer of llguidance.
        byte_tokens: [256] the token that stands for each byte alone; -1 where there is none.
    """

    tokenizer: LLTokenizer
    byte_tokens: tuple[int, ...]

    @classmethod
    def of(cls, tokenizer: LLTokenizer) -> Vocabulary:
        """Return the vocabulary of a tokenizer of llguidance."""
        per_byte: list[Sequence[int]] = [tokenizer.tokenize_bytes(bytes([byte])) for byte in range(256)]
        return cls(tokenizer, tuple(tokens[0] if len(tokens) == 1 else -1 for tokens in per_byte))

    def consume(self, matcher: LLMatcher, text: bytes) -> tuple[int, ...] | None:
        """Advance a matcher by a text, in the tokenizer's tokens or, if those would be control tokens, byte by byte."""
        for tokens in (self._tokenized(text), [self.byte_tokens[byte] for byte in text]):
            if min(tokens, default=0) < 0:
                continue  # not every vocabulary has each byte
            consumed = matcher.try_consume_tokens(tokens)
            if consumed == len(tokens):
                return tuple(tokens)
            matcher.rollback(consumed)
        return None

    def _tokenized(self, text: bytes) -> list[int]:
        """Return the tokenizer's tokens of a text, those of padding with at most `_PADDING_BYTES` bytes each."""
        tokens, done = list[int](), 0
        for padding in _PADDING.finditer(text):
            tokens += self.tokenizer.tokenize_bytes(text[done : padding.start()])
            done = padding.end()
            for start in range(padding.start(), done, _PADDING_BYTES):
                tokens += self.tokenizer.tokenize_bytes(text[start : min(start + _PADDING_BYTES, done)])
        return [*tokens, *self.tokenizer.tokenize_bytes(text[done:])]

    def allowed_bytes(self, mask: bytes) -> set[int]:
        """Return the bytes whose one-byte token is allowed."""
        tokens = enumerate(self.byte_tokens)
        return {byte for byte, token in tokens if token >= 0 and mask[token >> 3] >> (token & 7) & 1}

    def forced_text(self, matcher: LLMatcher) -> bytes:
        """Return the text that must come next; llguidance gives control tokens by number, here they are text."""
        return _CONTROL.sub(lambda match: self.tokenizer.decode_bytes([int(match[1])]), matcher.compute_ff_bytes())


def find_ending(vocabulary: Vocabulary, start: LLMatcher, attempt: int, hints: Sequence[Hint]) -> bytes | None:
    """Return a text that satisfies the grammar from a state on, None if this attempt finds none.

    Args:
        vocabulary: vocabulary of the text.
        start: matcher in the state where the text begins; it is not changed.
        attempt: index below `ATTEMPTS`; an attempt is deterministic.
        hints: texts that the grammar may need within free text.
    """
    matcher, order = start.deep_copy(), _order(attempt)
    text, taken, tries = b"", Counter[tuple[bytes, int]](), 0
    before = (b"", b"")
    for _ in range(_MAX_STEPS):
        if matcher.is_accepting():
            return text
        if len(text) > _MAX_BYTES:
            return None
        step = vocabulary.forced_text(matcher)
        if not step:
            mask = matcher.compute_bitmask()
            allowed = vocabulary.allowed_bytes(mask)
            in_text = _QUOTE[0] not in allowed
            if (in_text or (attempt and len(allowed) > _FREE)) and tries < _MAX_TRIES:
                tries += len(hints)
                hint = _take_hint(vocabulary, matcher, mask, [hint for hint in hints if hint.quoted is in_text])
                text += hint
                if hint:
                    continue
            step = _choose(attempt, order, mask, allowed, taken)
            if before == (before := (mask, step)):
                step = _stride(vocabulary, matcher, mask, step)
        if not step or vocabulary.consume(matcher, step) is None:
            return None
        text += step
        if _QUOTE in step:
            taken.clear()  # each quoted text counts anew
    return None


def _take_hint(vocabulary: Vocabulary, matcher: LLMatcher, mask: bytes, hints: Sequence[Hint]) -> bytes:
    """Advance the matcher by the first hint that makes progress, and return it; b"" if none does."""
    for text, quoted in hints:
        tokens = vocabulary.consume(matcher, text)
        if tokens is None:
            continue
        after = matcher.compute_bitmask()
        if _QUOTE[0] in vocabulary.allowed_bytes(after) if quoted else matcher.is_accepting() or after != mask:
            return text
        matcher.rollback(len(tokens))
    return b""


def _stride(vocabulary: Vocabulary, matcher: LLMatcher, mask: bytes, step: bytes) -> bytes:
    """Return the step repeated as often as leaves the state unchanged."""
    for times in _STRIDES:
        ahead = matcher.deep_copy()
        if vocabulary.consume(ahead, step * times) is not None and ahead.compute_bitmask() == mask:
            return step * times
    return step


def _choose(attempt: int, order: bytes, mask: bytes, allowed: set[int], taken: Counter[tuple[bytes, int]]) -> bytes:
    """Return the next byte: one that ends something, else the first in the order.

    Every other rotating attempt also rotates the bytes that end something.
    """
    marks = [byte for byte in (_QUOTE if len(allowed) > _FREE else _MARKS) if byte in allowed]
    choices = [*marks, *(byte for byte in order if byte in allowed and byte not in marks)]
    if not choices or attempt not in _ROTATING or (marks and attempt % 4 == 1):
        return bytes(choices[:1])
    best = min(choices, key=lambda byte: taken[mask, byte])
    taken[mask, best] += 1
    return bytes([best])


def _order(attempt: int) -> bytes:
    """Return all bytes, in the order in which an attempt tries them."""
    first = list(_ORDER)
    if attempt == 1:
        first = [*_SEPARATORS, *first]
    elif attempt == 3:
        first = first[::-1]
    elif attempt > 3:
        random.Random(attempt).shuffle(first)  # noqa: S311 - a fixed order
    return bytes(dict.fromkeys([*first, *range(255, -1, -1)]))
