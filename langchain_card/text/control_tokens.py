"""`ControlTokens`: text in a message that spells a control token is read as ordinary characters.

A *mark*, a random word, is inserted after the first character of such a spelling. Tokenizers search for added tokens
first and find none there; a copy of the tokenizer then removes the marks, between its pre-tokenizer and its model, so
that the characters around a mark are never read as one token. Control tokens that the template writes are unaffected.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Callable
from functools import cached_property
from string import ascii_lowercase
from typing import Any
from weakref import WeakKeyDictionary

from tokenizers import AddedToken, Encoding, Tokenizer, models, pre_tokenizers

from langchain_card.errors import InvalidInputError

_LETTERS = str.maketrans("0123456789abcdef", "ghijklmnopabcdef")


class ControlTokens:
    """The control tokens of a tokenizer: its added tokens, except those of white space that are not special.

    Args:
        tokenizer: a tokenizer of transformers; no reference to it is kept.

    Attributes:
        ids: ids of the control tokens.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._added: dict[int, AddedToken] = dict(sorted(tokenizer.added_tokens_decoder.items()))
        self._backend: Tokenizer | None = getattr(tokenizer, "backend_tokenizer", None)
        # Letters, which tokenizers keep together. The first occurs only once, so that marks cannot overlap.
        self._mark = "z" + secrets.token_hex(8).translate(_LETTERS)
        self._finder = self._with_added_tokens(models.WordLevel(vocab={"": 0}, unk_token=""))
        control = {number: token.content for number, token in self._added.items() if _is_control(token)}
        self._ids = {self._finder.token_to_id(content): number for number, content in control.items()}
        self.ids = frozenset(control)
        self._compared = self.ids - {_unknown_id(tokenizer, self._backend)}
        signs = {content[0] for content in control.values() if not re.match(r"\w", content)}
        self._signs = re.compile("|".join(map(re.escape, signs)) or "(?!)")
        seconds = {content[1:2].lower() for content in control.values()}
        self._stop = next((letter for letter in reversed(ascii_lowercase) if letter not in seconds), self._mark)

    def mark(self, text: str) -> str:
        """Return the text with a mark in every spelling of a control token, overlapping ones included.

        Raises:
            InvalidInputError: a spelling has only one character, or the tokenizer ignores marks.
        """
        while places := self._places(text):
            pieces = [text[start:end] for start, end in zip([0, *places], [*places, len(text)], strict=True)]
            text = self._mark.join(pieces)
        return text

    def defuse(self, text: str) -> str:
        """Return a text from which no control token can arise: a letter follows each sign that may begin one."""
        return self._signs.sub(rf"\g<0>{self._stop}", text)

    def fence(self, text: str) -> str:
        """Return the text between two marks; white space at its ends stays outside, where templates may strip it."""
        body = text.strip()
        return text.replace(body, self._mark + body + self._mark, 1) if body else text

    def unmark(self, text: str) -> str:
        """Return the text without marks."""
        return text.replace(self._mark, "")

    def found_in(self, text: str) -> list[int]:
        """Return the ids of the control tokens that the tokenizer finds in a text, in order."""
        ids = _encode(self._finder, text).ids
        return self.among([self._ids[number] for number in ids if number in self._ids])

    def among(self, ids: list[int]) -> list[int]:
        """Return the ids that are control tokens, without the one for unknown characters."""
        return [number for number in ids if number in self._compared]

    def encode(self, text: str) -> list[int]:
        """Return the token ids of a marked text without its marks; no token spans the place of a mark.

        Raises:
            InvalidInputError: the tokenizer is not of the tokenizers library, or splits marks.
        """
        if self._backend is None:
            limit = "the tokenizer, which is not of the tokenizers library, cannot read control tokens as text"
            raise InvalidInputError("messages", self.unmark(text), limit)
        ids = list(_encode(self._reader, text).ids)
        if self._mark in self._backend.decode(ids, skip_special_tokens=False):
            raise InvalidInputError("messages", self.unmark(text), "the tokenizer cannot read control tokens as text")
        return ids

    @cached_property
    def _reader(self) -> Tokenizer:
        """The tokenizer, with a step that removes marks before its model."""
        assert self._backend is not None
        reader = self._with_added_tokens(self._backend.model)  # shared; tokens are added in order and get the same ids
        steps = [self._backend.pre_tokenizer, pre_tokenizers.Split(self._mark, "removed")]
        reader.pre_tokenizer = pre_tokenizers.Sequence([step for step in steps if step is not None])
        return reader

    def _with_added_tokens(self, model: models.Model) -> Tokenizer:
        """Return a tokenizer that finds added tokens like the original and reads the rest with this model."""
        tokenizer = Tokenizer(model)
        if self._backend is not None and self._backend.normalizer is not None:
            tokenizer.normalizer = self._backend.normalizer  # before tokens are added, because it is applied to them
        tokenizer.add_tokens(list(self._added.values()))
        return tokenizer

    def _places(self, text: str) -> list[int]:
        """Return the positions for marks: after the first character of each control token, spaces before it skipped."""
        encoding = _encode(self._finder, text)
        places = []
        for number, (start, end) in zip(encoding.ids, encoding.offsets, strict=True):
            if number in self._ids:
                place = end - len(text[start:end].lstrip()) + 1
                if text.startswith(self._mark, place):  # found in spite of its mark
                    limit = "spells a control token that this tokenizer cannot take apart"
                    raise InvalidInputError("messages", self.unmark(text[start:end]), limit, "leave it out")
                places.append(place)
        return places


_known: WeakKeyDictionary[Any, ControlTokens] = WeakKeyDictionary()


def control_tokens(tokenizer: Any) -> ControlTokens:
    """Return the control tokens of a tokenizer of transformers, cached."""
    if tokenizer not in _known:
        _known[tokenizer] = ControlTokens(tokenizer)
    return _known[tokenizer]


def map_texts(value: Any, change: Callable[[str], str]) -> Any:
    """Return a value of dicts, lists, tuples and strings with every string changed, keys included."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, dict):
        return {map_texts(key, change): map_texts(item, change) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        items = [map_texts(item, change) for item in value]
        return items if isinstance(value, list) else tuple(items)
    return value


def _encode(tokenizer: Tokenizer, text: str) -> Encoding:
    """Encode a text as a batch of one: other threads may run meanwhile, unlike in `Tokenizer.encode`."""
    (encoding,) = tokenizer.encode_batch([text], add_special_tokens=False)
    return encoding


def _is_control(token: AddedToken) -> bool:
    """Return whether an added token is a control token; some tokenizers add runs of white space, which are text."""
    return token.special or bool(token.content.replace("▁", " ").strip())


def _unknown_id(tokenizer: Any, backend: Tokenizer | None) -> int | None:
    """Return the id that the tokenizer's model gives to unknown characters, if any."""
    model = backend.model if backend is not None else None
    token = getattr(model, "unk_token", tokenizer.unk_token)
    return None if token is None else tokenizer.convert_tokens_to_ids(token)
