"""Ids to text: no half characters, nothing of a stop string, whatever the split into tokens."""

from __future__ import annotations

from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from langchain_card.text.detokenizer import Detokenizer, Piece
from tests.support import tiny

TEXTS = ["héllo 🙂 世界", "a  b\n\n\tc", "👨‍👩‍👧", "plain", ""]


def byte_fallback_tokenizer() -> PreTrainedTokenizerFast:
    """As of Llama 2 and Gemma: words with a leading bar, and single bytes for what is not in the vocabulary."""
    vocab = {"<unk>": 0, "▁": 1} | {f"<0x{byte:02X}>": byte + 2 for byte in range(256)}
    for word in ("▁hello", "▁world", "a", "b"):
        vocab[word] = len(vocab)
    backend = Tokenizer(models.BPE(vocab=vocab, merges=[], byte_fallback=True, unk_token="<unk>"))
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    backend.decoder = decoders.Sequence(steps)
    return PreTrainedTokenizerFast(tokenizer_object=backend)


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return tiny.byte_tokenizer()


def feed(detokenizer: Detokenizer, ids: list[int], step: int = 1) -> list[Piece]:
    pieces = []
    for start in range(0, len(ids), step):
        part = ids[start : start + step]
        pieces += detokenizer.push(part, [""] * len(part))
    return pieces


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("step", [1, 3, 100])
def test_pieces_join_to_the_text(tokenizer: Any, text: str, step: int) -> None:
    ids = tokenizer.encode(text)
    detokenizer = Detokenizer(tokenizer)
    pieces = feed(detokenizer, ids, step)
    assert [piece.token_id for piece in pieces] == ids
    assert "".join(piece.text for piece in pieces) == text
    assert not any("\ufffd" in piece.text for piece in pieces)
    assert detokenizer.finish() == ""
    assert detokenizer.num_tokens == len(ids)


def test_a_character_comes_with_its_last_byte(tokenizer: Any) -> None:
    pieces = feed(Detokenizer(tokenizer), tokenizer.encode("é🙂"))
    assert [piece.text for piece in pieces] == ["", "é", "", "", "", "🙂"]


@pytest.mark.parametrize("cut", [1, 2, 3])
def test_half_a_character_at_the_end_is_left_out(tokenizer: Any, cut: int) -> None:
    detokenizer = Detokenizer(tokenizer)
    pieces = feed(detokenizer, tokenizer.encode("ok🙂")[:-cut])
    assert "".join(piece.text for piece in pieces) + detokenizer.finish() == "ok"
    assert detokenizer.num_tokens == 6 - cut


def test_bytes_that_are_no_character_do_not_stop_the_text(tokenizer: Any) -> None:
    euro, a = tokenizer.encode("€"), tokenizer.encode("a")
    pieces = feed(Detokenizer(tokenizer), euro[:2] + a * 2)
    assert "".join(piece.text for piece in pieces).endswith("aa")


def test_byte_fallback_vocabularies() -> None:
    tokenizer = byte_fallback_tokenizer()
    vocab = tokenizer.get_vocab()
    smile = [vocab[f"<0x{byte:02X}>"] for byte in "🙂".encode()]
    ids = [vocab["▁hello"], vocab["▁world"], vocab["▁"], *smile, vocab["a"]]
    pieces = feed(Detokenizer(tokenizer), ids)
    assert "".join(piece.text for piece in pieces) == "hello world 🙂a"
    assert [piece.text for piece in pieces][3:7] == ["", "", "", "🙂"]


def test_control_tokens_are_no_text(tokenizer: Any) -> None:
    ids = [*tokenizer.encode("hi"), tokenizer.eos_token_id]
    assert [piece.text for piece in feed(Detokenizer(tokenizer), ids)] == ["h", "i", ""]


@pytest.mark.parametrize("step", [1, 2, 100])
def test_a_stop_string_ends_the_text(tokenizer: Any, step: int) -> None:
    detokenizer = Detokenizer(tokenizer, ["END"])
    pieces = feed(detokenizer, tokenizer.encode("one ENtwo END three"), step)
    assert "".join(piece.text for piece in pieces) == "one ENtwo "
    assert detokenizer.stopped
    assert detokenizer.num_tokens == len("one ENtwo END") == len(pieces)
    assert detokenizer.finish() == ""


def test_the_beginning_of_a_stop_string_is_kept_back_until_it_is_certain(tokenizer: Any) -> None:
    detokenizer = Detokenizer(tokenizer, ["aab"])
    assert [piece.text for piece in feed(detokenizer, tokenizer.encode("aaab!"))] == ["", "", "a", ""]
    assert detokenizer.stopped
    other = Detokenizer(tokenizer, ["aab"])
    assert [piece.text for piece in feed(other, tokenizer.encode("xaac"))] == ["x", "", "", "aac"]


def test_an_unfinished_stop_string_is_text(tokenizer: Any) -> None:
    detokenizer = Detokenizer(tokenizer, ["END"])
    pieces = feed(detokenizer, tokenizer.encode("the EN"))
    assert "".join(piece.text for piece in pieces) == "the "
    assert detokenizer.finish() == "EN"
    assert not detokenizer.stopped


def test_the_earliest_of_several_stop_strings_counts(tokenizer: Any) -> None:
    detokenizer = Detokenizer(tokenizer, ["world", "lo w", "🙂"])
    assert "".join(piece.text for piece in feed(detokenizer, tokenizer.encode("hello world"))) == "hel"


def test_a_stop_string_of_several_bytes(tokenizer: Any) -> None:
    detokenizer = Detokenizer(tokenizer, ["🙂"])
    pieces = feed(detokenizer, tokenizer.encode("hi 🙂 there"))
    assert "".join(piece.text for piece in pieces) == "hi "
    assert detokenizer.num_tokens == len("hi ") + 4


def test_sources_stay_with_their_tokens(tokenizer: Any) -> None:
    pieces = Detokenizer(tokenizer).push(tokenizer.encode("abc"), ["", "model", "ngram"])
    assert [(piece.text, piece.source) for piece in pieces] == [("a", ""), ("b", "model"), ("c", "ngram")]
