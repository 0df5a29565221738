"""Texts that cannot fit are refused before most of their tokens are counted, whatever the tokenizer."""

from __future__ import annotations

import unicodedata
from typing import Any

import pytest
from tokenizers import AddedToken, models, normalizers, pre_tokenizers

from langchain_card.errors import ContextOverflowError
from langchain_card.text.prompt import MAX_CHARS_PER_TOKEN, PIECE_CHARS, check_length, check_size, num_chars
from tests.support import tiny

NO_TOKENIZER = object()
TEXTS = [
    "x" * 100_000,
    " " * 100_000,
    "<|end|>" * 20_000,
    unicodedata.normalize("NFD", "\u1f82\u0390\uac01é" * 9000),
    "😀\u0301" * 20_000,
]


@pytest.mark.parametrize("text", TEXTS, ids=lambda text: ascii(text[:4]))
@pytest.mark.parametrize("normalizer", [None, normalizers.NFC()])
def test_what_fits_is_not_refused(text: str, normalizer: Any) -> None:
    tokenizer = tiny.byte_tokenizer()
    if normalizer:
        tokenizer.backend_tokenizer.normalizer = normalizer
    assert len(text) > PIECE_CHARS
    check_length(text, tokenizer, len(tokenizer.encode(text)))


def test_too_many_characters_are_refused_without_the_tokenizer() -> None:
    check_length("x" * 100 * MAX_CHARS_PER_TOKEN, tiny.byte_tokenizer(), 100)
    with pytest.raises(ContextOverflowError, match=r"^prompt = '6,401 characters': .* 100 tokens.*Hint: shorten"):
        check_length("x" * (100 * MAX_CHARS_PER_TOKEN + 1), NO_TOKENIZER, 100)


def test_the_tokenizer_reads_no_more_pieces_than_it_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer, read = tiny.byte_tokenizer(), list[int]()
    encode = tokenizer.encode
    monkeypatch.setattr(tokenizer, "encode", lambda text, **fields: read.append(len(text)) or encode(text, **fields))
    with pytest.raises(ContextOverflowError, match=r"400,000 characters.* first 49,152 are 49,152 tokens.* 40,000"):
        check_length("x" * 400_000, tokenizer, 40_000)
    assert read == [PIECE_CHARS] * 3


def test_text_that_vanishes_takes_no_tokens() -> None:
    removing = tiny.byte_tokenizer()
    removing.backend_tokenizer.pre_tokenizer = pre_tokenizers.Split("x", "removed")
    stripping = tiny.byte_tokenizer()
    stripping.backend_tokenizer.normalizer = normalizers.Strip()
    taking_blanks = tiny.byte_tokenizer()
    taking_blanks.add_tokens([AddedToken("<t>", rstrip=True)])
    lacking = tiny.byte_tokenizer()
    lacking.backend_tokenizer.model = models.BPE(vocab={"a": 0}, merges=[])
    for tokenizer, text in ((removing, "x"), (stripping, " "), (lacking, "x")):
        check_length("<t>" + text * 90_000, tokenizer, 2000)
    check_length("<t>" + " " * (PIECE_CHARS - 3), taking_blanks, 2000)
    for tokenizer, text in ((removing, "x"), (stripping, " "), (taking_blanks, " "), (lacking, "x")):
        assert len(tokenizer.encode("<t>" + text * 90_000)) < 10
        with pytest.raises(ContextOverflowError, match="up to 64 characters for each"):
            check_length("<t>" + text * 90_000, tokenizer, 10)


def test_sizes_of_conversations() -> None:
    turn = {"role": "user", "content": "Q"}
    assert num_chars([turn, {"tools": ["ab", 7, None]}]) == len("roleusercontentQtoolsab") + 2 + 4
    check_size([turn] * 100, None, 100)
    with pytest.raises(ContextOverflowError, match=r"^messages = '101 messages': .* 100 tokens.*Hint: leave out old"):
        check_size([turn] * 101, None, 100)
    for turns, others in (([turn | {"content": "x" * 6400}], None), ([turn], [{"a": ["x" * 6400]}])):
        with pytest.raises(ContextOverflowError, match=r"^prompt = '6,4\d\d characters'"):
            check_size(turns, others, 100)
