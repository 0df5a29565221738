"""Text stays text: what spells a control token inside a message is read as ordinary characters.

A *mark*, a random word, goes behind the first character of such a spelling. Tokenizers look for added tokens before
all else and find none there; a copy of the tokenizer then takes the marks out, between its pre-tokenizer and its model,
so that the characters around a mark are never read as one token. The tokens that the template writes stay as they are.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Callable
from functools import cached_property
from string import ascii_lowercase
from typing import Any
from weakref import WeakKeyDictionary

from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers

from langchain_card.errors import InvalidInputError

_LETTERS = str.maketrans("0123456789abcdef", "ghijklmnopabcdef")


class ControlTokens:
    """The added tokens of a tokenizer: all special ones, and the others unless they are white space.

    Args:
        tokenizer: of transformers; it is not kept.

    Attributes:
        ids: all of their ids.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._added: dict[int, AddedToken] = dict(sorted(tokenizer.added_tokens_decoder.items()))
        self._backend: Tokenizer | None = getattr(tokenizer, "backend_tokenizer", None)
        # Letters, which tokenizers leave together; the first is not among the others, so that marks cannot overlap.
        self._mark = "z" + secrets.token_hex(8).translate(_LETTERS)
        self._finder = self._equipped(models.WordLevel(vocab={"": 0}, unk_token=""))
        control = {number: token.content for number, token in self._added.items() if _controls(token)}
        self._ids = {self._finder.token_to_id(content): number for number, content in control.items()}
        self.ids = frozenset(control)
        self._compared = self.ids - {_unknown_id(tokenizer, self._backend)}
        signs = {content[0] for content in control.values() if not re.match(r"\w", content)}
        self._signs = re.compile("|".join(map(re.escape, signs)) or "(?!)")
        seconds = {content[1:2].lower() for content in control.values()}
        self._stop = next((letter for letter in reversed(ascii_lowercase) if letter not in seconds), self._mark)

    def mark(self, text: str) -> str:
        """The text with a mark in every spelling of a control token, overlapping ones included.

        Raises:
            InvalidInputError: a spelling has one character only, or the tokenizer overlooks marks.
        """
        while places := self._places(text):
            pieces = [text[start:end] for start, end in zip([0, *places], [*places, len(text)], strict=True)]
            text = self._mark.join(pieces)
        return text

    def defuse(self, text: str) -> str:
        """A text in its place of which no control token can arise: no sign that begins one goes on like one."""
        return self._signs.sub(rf"\g<0>{self._stop}", text)

    def fence(self, text: str) -> str:
        """The text between two marks; white space at its ends stays outside, where templates may trim it."""
        body = text.strip()
        return text.replace(body, self._mark + body + self._mark, 1) if body else text

    def unmark(self, text: str) -> str:
        """The text without marks."""
        return text.replace(self._mark, "")

    def found_in(self, text: str) -> list[int]:
        """Ids of the control tokens that the tokenizer finds in a text, in order."""
        found = self._finder.encode(text, add_special_tokens=False).ids
        return self.among([self._ids[number] for number in found if number in self._ids])

    def among(self, ids: list[int]) -> list[int]:
        """Those of a text's ids that are control tokens, without the one that stands for unknown characters."""
        return [number for number in ids if number in self._compared]

    def encode(self, text: str) -> list[int]:
        """Token ids of a marked text, as if it had no marks, but with nothing joined across them.

        Raises:
            InvalidInputError: the tokenizer is not one of the tokenizers library, or takes marks apart.
        """
        if self._backend is None:
            limit = "the tokenizer, which is not of the tokenizers library, cannot read control tokens as text"
            raise InvalidInputError("messages", self.unmark(text), limit)
        ids = list(self._reader.encode(text, add_special_tokens=False).ids)
        if self._mark in self._backend.decode(ids, skip_special_tokens=False):
            raise InvalidInputError("messages", self.unmark(text), "the tokenizer cannot read control tokens as text")
        return ids

    @cached_property
    def _reader(self) -> Tokenizer:
        """The tokenizer, with marks taken out before its model."""
        assert self._backend is not None
        reader = self._equipped(self._backend.model)  # shared, not copied; tokens come in order, and get the same ids
        steps = [self._backend.pre_tokenizer, pre_tokenizers.Split(self._mark, "removed")]
        reader.pre_tokenizer = pre_tokenizers.Sequence([step for step in steps if step is not None])
        return reader

    def _equipped(self, model: models.Model) -> Tokenizer:
        """A tokenizer that finds added tokens like the true one and reads the rest with this model."""
        tokenizer = Tokenizer(model)
        if self._backend is not None and self._backend.normalizer is not None:
            tokenizer.normalizer = self._backend.normalizer  # first: it is applied to tokens when they are added
        tokenizer.add_tokens(list(self._added.values()))
        return tokenizer

    def _places(self, text: str) -> list[int]:
        """Where marks are due: behind the first character of each control token, spaces before it left out."""
        encoding = self._finder.encode(text, add_special_tokens=False)
        places = []
        for number, (start, end) in zip(encoding.ids, encoding.offsets, strict=True):
            if number in self._ids:
                place = end - len(text[start:end].lstrip()) + 1
                if text.startswith(self._mark, place):  # it was marked, and is found still
                    limit = "spells a control token that this tokenizer cannot take apart"
                    raise InvalidInputError("messages", self.unmark(text[start:end]), limit, "leave it out")
                places.append(place)
        return places


_known: WeakKeyDictionary[Any, ControlTokens] = WeakKeyDictionary()


def control_tokens(tokenizer: Any) -> ControlTokens:
    """The control tokens of a tokenizer of transformers, looked up once."""
    if tokenizer not in _known:
        _known[tokenizer] = ControlTokens(tokenizer)
    return _known[tokenizer]


def map_texts(value: Any, change: Callable[[str], str]) -> Any:
    """A value of dicts, lists, tuples and texts with every text changed, keys included."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, dict):
        return {map_texts(key, change): map_texts(item, change) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        items = [map_texts(item, change) for item in value]
        return items if isinstance(value, list) else tuple(items)
    return value


def _controls(token: AddedToken) -> bool:
    """Runs of spaces and of line ends are added tokens of some tokenizers, and text."""
    return token.special or bool(token.content.replace("▁", " ").strip())


def _unknown_id(tokenizer: Any, backend: Tokenizer | None) -> int | None:
    """What the tokenizer's model answers for unknown characters, if it does."""
    model = backend.model if backend is not None else None
    token = getattr(model, "unk_token", tokenizer.unk_token)
    return None if token is None else tokenizer.convert_tokens_to_ids(token)
