"""The shortest end of a text under a grammar, from wherever it is: looked for byte by byte, in several ways.

Nothing tells how far an end is: a grammar says only what may come next. So each attempt takes what probably ends
something: a text that the grammar's own expressions ask for (`hints`), then a quote, a bracket. Where one goes in
circles another gets out: by taking what it took least where the same might come, or by always taking the same (which
leaves a recursion).
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
"""Attempts that take what they took least; the others take the same always."""
_MARKS = b'}]",:'
"""What ends a value or leads to its end, the best first. In a text that takes any character it is the quote."""
_QUOTE = b'"'
_FREE = 64
"""Bytes that may come next, more than any number, key or choice allows: it is a text that takes nearly all."""
_MAX_STEPS = 1000
"""Bytes that an attempt chooses, runs that the grammar forces counted as one: where it goes in circles it gives up."""
_STRIDES = (256, 16)
"""Bytes at once, where the same may come again and again: texts may have to be long."""
_MAX_BYTES = 10_000
"""Of an end."""
_MAX_TRIES = 4000
"""Hints that an attempt tries, each as often as it looks for one."""
_ORDER = bytes([*b"0123456789", *range(ord("a"), ord("z") + 1), *range(ord("A"), ord("Z") + 1), *b"-_.@/+[{ "])
"""What is tried next; all other bytes come after these."""
_SEPARATORS = b"@:./-"
"""Within an address or a code."""
_CONTROL = re.compile(rb"\xff\[(\d+)\]")


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """A tokenizer as grammars see it.

    Attributes:
        tokenizer: of llguidance.
        byte_tokens: [256] the token that stands for each byte alone; -1 where there is none.
    """

    tokenizer: LLTokenizer
    byte_tokens: tuple[int, ...]

    @classmethod
    def of(cls, tokenizer: LLTokenizer) -> Vocabulary:
        """Of a tokenizer of llguidance."""
        found: list[Sequence[int]] = [tokenizer.tokenize_bytes(bytes([byte])) for byte in range(256)]
        return cls(tokenizer, tuple(tokens[0] if len(tokens) == 1 else -1 for tokens in found))

    def say(self, matcher: LLMatcher, text: bytes) -> tuple[int, ...] | None:
        """Says a text in the tokenizer's own tokens, or byte by byte where it would read control tokens in it."""
        for tokens in (self.tokenizer.tokenize_bytes(text), [self.byte_tokens[byte] for byte in text]):
            if min(tokens, default=0) < 0:
                continue  # not every vocabulary has each byte
            said = matcher.try_consume_tokens(tokens)
            if said == len(tokens):
                return tuple(tokens)
            matcher.rollback(said)
        return None

    def allowed_bytes(self, mask: bytes) -> set[int]:
        """Bytes of which the token that is one byte is allowed."""
        tokens = enumerate(self.byte_tokens)
        return {byte for byte, token in tokens if token >= 0 and mask[token >> 3] >> (token & 7) & 1}

    def forced_text(self, matcher: LLMatcher) -> bytes:
        """What must come next; control tokens, of which llguidance gives the numbers, as their text."""
        return _CONTROL.sub(lambda found: self.tokenizer.decode_bytes([int(found[1])]), matcher.compute_ff_bytes())


def find_ending(vocabulary: Vocabulary, start: LLMatcher, attempt: int, hints: Sequence[Hint]) -> bytes | None:
    """A text that satisfies the grammar.

    Args:
        vocabulary: of the text.
        start: where it begins; not changed.
        attempt: of `ATTEMPTS`; always the same for the same place.
        hints: what the grammar may wait for where any text may come.
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
                text += (
                    said := _lead_on(vocabulary, matcher, mask, [hint for hint in hints if hint.quoted is in_text])
                )
                if said:
                    continue
            step = _choose(attempt, order, mask, allowed, taken)
            if before == (before := (mask, step)):
                step = _stride(vocabulary, matcher, mask, step)
        if not step or vocabulary.say(matcher, step) is None:
            return None
        text += step
        if _QUOTE in step:
            taken.clear()  # each text begins anew
    return None


def _lead_on(vocabulary: Vocabulary, matcher: LLMatcher, mask: bytes, hints: Sequence[Hint]) -> bytes:
    """Says the first hint that leads on; b"" where none does."""
    for text, quoted in hints:
        said = vocabulary.say(matcher, text)
        if said is None:
            continue
        behind = matcher.compute_bitmask()
        if _QUOTE[0] in vocabulary.allowed_bytes(behind) if quoted else matcher.is_accepting() or behind != mask:
            return text
        matcher.rollback(len(said))
    return b""


def _stride(vocabulary: Vocabulary, matcher: LLMatcher, mask: bytes, step: bytes) -> bytes:
    """The same step as often as leaves all as it is."""
    for times in _STRIDES:
        ahead = matcher.deep_copy()
        if vocabulary.say(ahead, step * times) is not None and ahead.compute_bitmask() == mask:
            return step * times
    return step


def _choose(attempt: int, order: bytes, mask: bytes, allowed: set[int], taken: Counter[tuple[bytes, int]]) -> bytes:
    """The next byte: what ends something, else the first in the order.

    Every other rotating attempt rotates what ends something, too.
    """
    marks = [byte for byte in (_QUOTE if len(allowed) > _FREE else _MARKS) if byte in allowed]
    choices = [*marks, *(byte for byte in order if byte in allowed and byte not in marks)]
    if not choices or attempt not in _ROTATING or (marks and attempt % 4 == 1):
        return bytes(choices[:1])
    best = min(choices, key=lambda byte: taken[mask, byte])
    taken[mask, best] += 1
    return bytes([best])


def _order(attempt: int) -> bytes:
    """All bytes, in the order in which an attempt tries them."""
    first = list(_ORDER)
    if attempt == 1:
        first = [*_SEPARATORS, *first]
    elif attempt == 3:
        first = first[::-1]
    elif attempt > 3:
        random.Random(attempt).shuffle(first)  # noqa: S311 - the same order always
    return bytes(dict.fromkeys([*first, *range(255, -1, -1)]))
