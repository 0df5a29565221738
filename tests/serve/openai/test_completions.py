"""Continuations of texts by OpenAI's own client."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import openai
import pytest

from langchain_card import CARDChatModel
from langchain_card.models.tokenizer import token_bytes
from tests.support.played import make_pair
from tests.support.served import CARD, NAME, rounded, says, served

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[CARDChatModel]:
    with CARDChatModel(**make_pair(tmp_path_factory.mktemp("pair"))).load() as model:
        yield model


@pytest.fixture(scope="module")
def url(model: CARDChatModel) -> Iterator[str]:
    with served(model) as url:
        yield url


@pytest.fixture
def client(url: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        yield client


@pytest.mark.parametrize(
    "form", [str, lambda text: [text], lambda text: [*text.encode()], lambda text: [[*text.encode()]]]
)
def test_continuations(model: CARDChatModel, client: openai.OpenAI, form: Callable[[str], Any]) -> None:
    tokenizer, text = model.engine.tokenizer, "abc"
    prompt = [tokenizer.encode(text)] if form("") == [[]] else tokenizer.encode(text) if form("") == [] else form(text)
    own = model.engine.submit(tokenizer.encode(text), model.sampling_params(None, {"max_tokens": 12})).result()
    whole = client.completions.create(model=NAME, prompt=prompt, max_tokens=12)
    assert (whole.choices[0].text, whole.choices[0].finish_reason) == (own.text, "length")
    assert whole.object == "text_completion" and whole.usage is not None
    assert (whole.usage.prompt_tokens, whole.usage.completion_tokens) == (3, 12) and set(whole.card) >= CARD  # type: ignore[attr-defined]
    *pieces, last = client.completions.create(
        model=NAME, prompt=prompt, max_tokens=12, stream=True, stream_options={"include_usage": True}
    )
    assert "".join(piece.choices[0].text for piece in pieces) == own.text and last.usage == whole.usage.model_copy(
        update={"prompt_tokens_details": last.usage.prompt_tokens_details}
    )
    assert [piece.choices[0].finish_reason for piece in pieces] == [None] * (len(pieces) - 1) + ["length"]


def test_log_probabilities_of_continuations(model: CARDChatModel, client: openai.OpenAI) -> None:
    options: Any = {"model": NAME, "prompt": "abc", "max_tokens": 8, "logprobs": 2}
    params = model.sampling_params(None, {"max_tokens": 8, "logprobs": True, "top_logprobs": 2})
    own = model.engine.submit(model.engine.tokenizer.encode("abc"), params).result()
    found = client.completions.create(**options).choices[0].logprobs
    assert found is not None
    assert rounded(found.token_logprobs) == rounded([each.logprob for each in own.logprobs])
    said = [token_bytes(model.engine.tokenizer, token).decode(errors="replace") for token in own.token_ids]
    assert found.tokens == said and found.text_offset[0] == 0 and found.text_offset == sorted(found.text_offset)
    chunks = [chunk.choices[0].logprobs for chunk in client.completions.create(**options, stream=True)]
    for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
        pieces = [value for each in chunks if each for value in getattr(each, name)]
        assert rounded(pieces) == rounded(getattr(found, name))


def test_continuations_tell_who_proposed_each_token(model: CARDChatModel, client: openai.OpenAI) -> None:
    body = {"card": True}
    with says(model, "abcabcabcabcabc"):
        *others, end = client.completions.create(model=NAME, prompt="abc", stream=True, extra_body=body)
    tokens = [token for chunk in others for token in chunk.card["tokens"]]  # type: ignore[attr-defined]
    assert "".join(token["text"] for token in tokens) == "abcabcabcabcabc" and {"ngram"} <= {
        token["source"] for token in tokens
    }
    assert end.card["accepted_by_source"]["ngram"] == [token["source"] for token in tokens].count("ngram")  # type: ignore[attr-defined]
