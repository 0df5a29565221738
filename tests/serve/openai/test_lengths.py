"""Texts are refused by their characters only where their tokens cannot fit."""

from __future__ import annotations

import unicodedata
from typing import Any

import pytest
from tokenizers import AddedToken, models, normalizers, pre_tokenizers

from langchain_card.errors import ContextOverflowError
from langchain_card.text.prompt import check_length
from tests.support import tiny

TEXTS = [
    "x" * 5000,
    " " * 5000,
    "<|end|>" * 2000,
    unicodedata.normalize("NFD", "\u1f82\u0390\uac01é" * 500),
    "😀\u0301" * 1000,
]


@pytest.mark.parametrize("text", TEXTS, ids=lambda text: ascii(text[:4]))
@pytest.mark.parametrize("normalizer", [None, normalizers.NFC()])
def test_what_fits_is_not_refused(text: str, normalizer: Any) -> None:
    tokenizer = tiny.byte_tokenizer()
    if normalizer:
        tokenizer.backend_tokenizer.normalizer = normalizer
    check_length(text, tokenizer, len(tokenizer.encode(text)))


def test_what_cannot_fit_is_refused() -> None:
    tokenizer = tiny.byte_tokenizer()
    check_length("x" * 2 * 7 * 100, tokenizer, 100)  # the longest token, <|end|>, has seven characters
    with pytest.raises(ContextOverflowError, match=r"1,401 characters.*100 tokens"):
        check_length("x" * (2 * 7 * 100 + 1), tokenizer, 100)


def test_where_text_may_vanish_nothing_is_refused() -> None:
    removing = tiny.byte_tokenizer()
    removing.backend_tokenizer.pre_tokenizer = pre_tokenizers.Split("x", "removed")
    stripping = tiny.byte_tokenizer()
    stripping.backend_tokenizer.normalizer = normalizers.Strip()
    taking_blanks = tiny.byte_tokenizer()
    taking_blanks.add_tokens([AddedToken("<t>", rstrip=True)])
    lacking = tiny.byte_tokenizer()
    lacking.backend_tokenizer.model = models.BPE(vocab={"a": 0}, merges=[])
    for tokenizer, text in ((removing, "x"), (stripping, " "), (taking_blanks, " "), (lacking, "x")):
        assert len(tokenizer.encode("<t>" + text * 90_000)) < 10
        check_length("<t>" + text * 90_000, tokenizer, 10)
