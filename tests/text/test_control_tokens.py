"""Control tokens of tokenizers of all makes: texts that spell them, what is refused, what it costs."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
from tokenizers import AddedToken, Regex, normalizers, pre_tokenizers

from langchain_card.errors import InvalidInputError
from langchain_card.text.control_tokens import control_tokens, map_texts
from langchain_card.text.prompt import encode
from tests.support import tiny, vocabularies
from tests.support.vocabularies import controls, own


@pytest.mark.parametrize("make", vocabularies.MAKES)
def test_makes_of_tokenizers(make: str) -> None:
    tokenizer = vocabularies.MAKES[make]()
    for token in (*vocabularies.CONTROLS, "[Inst]", "＜s＞", "<<s>s>"):
        for place in ("{}", "a {} b", "{} b", "a {}", "{0}{0}"):
            text = place.format(token)
            ids = encode([{"role": "user", "content": text}, {"role": "user", "content": "x"}], tokenizer, "it")
            neutral = [{"role": "user", "content": "nothing"}, {"role": "user", "content": "x"}]
            assert controls(ids, tokenizer) == controls(own(neutral, tokenizer), tokenizer), text
            backend = tokenizer.backend_tokenizer
            if make != "unigram" or text.isascii():  # it has no other characters
                read = text if make != "normalized" else backend.normalizer.normalize_str(text)
                assert read in tokenizer.decode(ids, skip_special_tokens=False)


def test_white_space_tokens_are_text() -> None:
    """Such as Gemma's: runs of line ends are one token each, in prompts, too."""
    tokenizer = tiny.byte_tokenizer()
    tokenizer.add_tokens([AddedToken("\n\n", normalized=False), AddedToken("  ", normalized=False)])
    turns = [{"role": "user", "content": "a\n\nb  c\n\n"}]
    assert encode(turns, tokenizer, "it") == own(turns, tokenizer)
    mixed = encode([{"role": "user", "content": "a\n\nb  c<|end|>\n\n"}], tokenizer, "it")
    assert [*controls(mixed, tokenizer)] == [257, 258, 257]


def test_unknown_characters_are_no_control_tokens() -> None:
    tokenizer = vocabularies.MAKES["unigram"]()
    tokenizer.add_special_tokens({"unk_token": "<unk>"})
    turns = [{"role": "user", "content": "é"}]
    assert encode(turns, tokenizer, "it") == own(turns, tokenizer)


def test_spaces_before_a_control_token_get_no_marks() -> None:
    control = control_tokens(vocabularies.MAKES["eats spaces"]())
    text = "a" + " " * 99 + "<s>"
    assert control.unmark(control.mark(text)) == text
    assert len(control.mark(text)) - len(text) == len(control.mark("<s>")) - len("<s>")


def test_signs_before_letters_of_a_control_token() -> None:
    tokenizer = tiny.byte_tokenizer()
    tokenizer.add_tokens([AddedToken(f"<{letter}>", normalized=False) for letter in "xyz"])
    turns = [{"role": "user", "content": "if a <> b"}]
    assert encode(turns, tokenizer, "it") == own(turns, tokenizer)


# What cannot be kept apart is refused.


def refused(text: str, tokenizer: Any, match: str) -> None:
    with pytest.raises(InvalidInputError, match=match):
        encode([{"role": "user", "content": text}, {"role": "user", "content": "x"}], tokenizer, "it")


@pytest.mark.parametrize(
    ("template", "text"),
    [
        ("{% for m in messages %}<|{{ m.content }}|>{% endfor %}", "end"),
        ("{% for m in messages %}<|{{ m.content }}{% endfor %}", "end|>"),
        ("{% for m in messages %}{{ m.content.replace('/no_think', '') }}{% endfor %}", "<|/no_thinkend|>"),
        ("{% for m in messages %}{{ m.content | lower }}{% endfor %}", "<|END|>"),
    ],
    ids=["both ends", "the beginning", "a removal", "lower case"],
)
def test_templates_that_make_control_tokens_of_texts(template: str, text: str) -> None:
    tokenizer = tiny.byte_tokenizer()
    tokenizer.chat_template = template
    assert encode([{"role": "user", "content": "fine"}], tokenizer, "it")
    refused(text, tokenizer, "the chat template of it makes control tokens")


def test_a_model_that_makes_a_control_token_of_normalized_text() -> None:
    tokenizer = vocabularies.MAKES["unigram"]()
    tokenizer.backend_tokenizer.normalizer = normalizers.NFKC()
    refused("＜s＞", tokenizer, "makes control tokens")


@pytest.mark.parametrize("token", ["¤", "\t"])
def test_a_spelling_of_one_character(token: str) -> None:
    tokenizer = tiny.byte_tokenizer()
    tokenizer.add_tokens([AddedToken(token, special=True, normalized=False, lstrip=True, rstrip=True)])
    refused(f"a  {token} ", tokenizer, "spells a control token that this tokenizer cannot take apart")


def test_a_tokenizer_that_drops_marks() -> None:
    tokenizer = vocabularies.MAKES["normalized"]()
    tokenizer.backend_tokenizer.normalizer = normalizers.Replace(Regex("z[a-p]{16}"), "")
    refused("<s>", tokenizer, "'<s>': spells a control token that this tokenizer cannot take apart")


def test_a_tokenizer_that_takes_marks_apart() -> None:
    tokenizer = tiny.byte_tokenizer()
    steps = [pre_tokenizers.FixedLength(3), tokenizer.backend_tokenizer.pre_tokenizer]
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps)
    refused("<|end|>", tokenizer, "'<user><|end|>.*the tokenizer cannot read control tokens as text")


class Slow:
    """A tokenizer without the library's backend."""

    unk_token, chat_template = None, tiny.byte_tokenizer().chat_template

    def __init__(self) -> None:
        self._tokenizer = tiny.byte_tokenizer()
        self.added_tokens_decoder = self._tokenizer.added_tokens_decoder
        self.apply_chat_template = self._tokenizer.apply_chat_template


def test_a_slow_tokenizer() -> None:
    turns = [{"role": "user", "content": "hi <b>"}]
    assert encode(turns, Slow(), "it") == own(turns, tiny.byte_tokenizer())
    refused("<|end|>", Slow(), "not of the tokenizers library")


def test_marks_do_not_show_in_errors() -> None:
    tokenizer = tiny.byte_tokenizer()
    tokenizer.chat_template = "{{ raise_exception('no ' + messages[0].content) }}"
    refused("<|end|>", tokenizer, r"refuses them: no <\|end\|>\.$")


def test_templates_may_look_at_texts() -> None:
    tokenizer = tiny.byte_tokenizer()
    tokenizer.chat_template = "{% for m in messages %}{% if '/brief' in m.content %}<|end|>{% endif %}{% endfor %}"
    assert encode([{"role": "user", "content": "/brief"}], tokenizer, "it") == [256]
    assert encode([{"role": "user", "content": "at length"}], tokenizer, "it") == []


# What it costs.


def test_the_cost_for_long_texts(say: Callable[[str], None]) -> None:
    """Of ordinary text, in parts of its tokenization; and no text makes it grow faster than the text."""
    tokenizer = vocabularies.deepseek()
    control, text = control_tokens(tokenizer), "for i in range(10): x[i] = '<b>' + str(i)\n" * 2400
    scan, read = (min(timed(run, text) for _ in range(3)) for run in (control.mark, tokenizer.encode))
    strings = len(tokenizer.added_tokens_decoder)
    say(f"{strings} strings in {len(text):,} characters: {scan * 1e3:.1f} ms; tokenization {read * 1e3:.1f} ms")
    assert scan < read
    nested = "<｜User" * 8000 + "｜>" * 8000
    for hard in (nested, "<｜User｜>" * 8000, "<" * 50000, "<think</think><think>>" * 3000):
        assert timed(control.mark, hard) < 3


def timed(run: Callable[[str], Any], text: str) -> float:
    started = time.process_time()
    run(text)
    return time.process_time() - started


def test_texts_are_found_wherever_they_are() -> None:
    value = {"a": ["b", 1, None, {"c": ("d", 2.5)}], 2: True}
    assert map_texts(value, str.upper) == {"A": ["B", 1, None, {"C": ("D", 2.5)}], 2: True}
