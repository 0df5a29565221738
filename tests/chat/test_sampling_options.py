"""Sampling options and log-probabilities as LangChain calls them."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from typing import Any

import pytest
from pydantic import ValidationError
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from langchain_card import CARDChatModel
from langchain_card.errors import InvalidInputError
from langchain_card.models.tokenizer import token_bytes
from tests.support import tiny


@pytest.fixture(scope="module")
def fields(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tiny.make_target("llama", tmp_path_factory.mktemp("toy"))
    return {"model": folder, "draft_model": "ngram", "max_tokens": 24, "dtype": "float64"}


@pytest.fixture(scope="module")
def model(fields: dict[str, Any]) -> Iterator[CARDChatModel]:
    with CARDChatModel(**fields) as model:
        yield model


OPTIONS: dict[str, Any] = {
    "temperature": 1.1,
    "seed": 3,
    "top_k": 30,
    "top_p": 0.9,
    "min_p": 0.01,
    "repetition_penalty": 1.1,
    "presence_penalty": 0.2,
    "frequency_penalty": 0.3,
    "logit_bias": {40: 2.0},
}


def test_fields_and_options_of_a_call_do_the_same(model: CARDChatModel, fields: dict[str, Any]) -> None:
    with CARDChatModel(**fields, **OPTIONS) as other:
        answers = [other.invoke("hi"), model.invoke("hi", **OPTIONS), model.bind(**OPTIONS).invoke("hi")]
    assert len({answer.content for answer in answers}) == 1
    assert answers[0].content != model.invoke("hi").content
    assert other._identifying_params["top_k"] == 30 and "schedule" not in other._identifying_params


@pytest.mark.parametrize("name", [name for name in OPTIONS if name not in ("temperature", "seed")])
def test_each_option_changes_the_answer(model: CARDChatModel, name: str) -> None:
    strong = {"top_k": 1, "top_p": 0.05, "min_p": 0.9, "repetition_penalty": 3.0, "presence_penalty": 2.0}
    strong |= {"frequency_penalty": 2.0, "logit_bias": {40: 50.0}}
    common: dict[str, Any] = {"temperature": 1.1 if name in ("top_k", "top_p", "min_p") else 0.0, "seed": 3}
    common["max_tokens"] = 100  # long enough for a greedy answer to repeat itself
    assert model.invoke("hi", **common, **{name: strong[name]}).content != model.invoke("hi", **common).content


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"top_p": 2.0}, "top_p = 2.0.*between 0.0 and 1.0"),
        ({"top_k": -3}, "top_k = -3"),
        ({"logit_bias": {40: 1000.0}}, r"logit_bias\[40\] = 1000.0"),
        ({"top_logprobs": 3}, "top_logprobs = 3: is of no use without logprobs.*logprobs=True"),
        ({"logprobs": True, "top_logprobs": 50}, "logprobs = 50.*between 0 and 20"),
    ],
)
def test_bad_values(model: CARDChatModel, fields: dict[str, Any], options: dict[str, Any], words: str) -> None:
    with pytest.raises(InvalidInputError, match=words):
        model.invoke("hi", **options)
    with pytest.raises(ValidationError, match=words):
        CARDChatModel(**fields, **options)


def test_a_bias_outside_the_vocabulary(model: CARDChatModel) -> None:
    with pytest.raises(InvalidInputError, match=f"logit_bias = 999.*between 0 and {tiny.VOCAB - 1}"):
        model.invoke("hi", logit_bias={999: 1.0})


def test_logprobs_in_the_shape_of_langchains_openai_model(model: CARDChatModel) -> None:
    options: dict[str, Any] = {"temperature": 1.0, "seed": 4, "logprobs": True, "top_logprobs": 3}
    answer = model.invoke("hi", **options)
    content = answer.response_metadata["logprobs"]["content"]
    assert len(content) == answer.usage_metadata["output_tokens"]
    tokenizer = model._engine().tokenizer
    for entry in content:
        assert set(entry) == {"token", "bytes", "logprob", "top_logprobs"}
        assert len(entry["top_logprobs"]) == 3 and entry["logprob"] <= entry["top_logprobs"][0]["logprob"] < 0
        assert set(entry["top_logprobs"][0]) == {"token", "bytes", "logprob"}
        assert sum(math.exp(other["logprob"]) for other in entry["top_logprobs"]) < 1
    told = b"".join(bytes(entry["bytes"]) for entry in content)
    assert told.decode(errors="replace") == answer.content or tokenizer.eos_token in told.decode(errors="replace")
    assert all(entry["top_logprobs"] == [] for entry in _content(model.invoke("hi", logprobs=True)))
    assert "logprobs" not in model.invoke("hi").response_metadata


def _content(message: Any) -> list[dict[str, Any]]:
    return message.response_metadata["logprobs"]["content"]  # type: ignore[no-any-return]


async def test_streams_carry_each_tokens_own(model: CARDChatModel) -> None:
    options: dict[str, Any] = {"temperature": 1.0, "seed": 4, "logprobs": True, "top_logprobs": 2}
    whole = _content(model.invoke("hi", **options))
    chunks = list(model.stream("hi", **options))
    assert [len(_content(chunk)) for chunk in chunks if "logprobs" in chunk.response_metadata] == [1] * len(whole)
    joined = chunks[0]
    for chunk in chunks[1:]:
        joined += chunk
    assert _rounded(_content(joined)) == _rounded(whole)
    streamed = [entry async for chunk in model.astream("hi", **options) for entry in _entries(chunk)]
    assert _rounded(streamed) == _rounded(whole)


def _rounded(content: Any) -> Any:
    """Without last bits: one call's passes have other rows than another's."""
    return json.loads(json.dumps(content), parse_float=lambda text: round(float(text), 9))


def _entries(chunk: Any) -> list[dict[str, Any]]:
    return chunk.response_metadata.get("logprobs", {"content": []})["content"]  # type: ignore[no-any-return]


def test_bytes_of_tokens() -> None:
    byte_level = tiny.byte_tokenizer()
    for text in ("a", " ", "\n", "\u00e9", "\u4e2d"):
        assert b"".join(token_bytes(byte_level, i) for i in byte_level(text).input_ids) == text.encode()
    assert token_bytes(byte_level, byte_level.eos_token_id) == b"<|end|>"
    assert token_bytes(byte_level, 300) == b"", "a padded head chose what no token stands for"
    vocab = {"\u2581caf\u00e9": 0, "<0xE4>": 1}
    backend = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    backend.decoder = decoders.Sequence([decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()])
    sentencepiece = PreTrainedTokenizerFast(tokenizer_object=backend)
    assert [token_bytes(sentencepiece, i) for i in (0, 1)] == [" caf\u00e9".encode(), b"\xe4"]
