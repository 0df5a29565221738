"""LangChain's own tests of chat models, of `ChatOpenAI` as the client of a real server."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from langchain_core.language_models import BaseChatModel
from langchain_openai import ChatOpenAI

from langchain_card import CARDChatModel
from tests.support import tiny
from tests.support.langchain_suite import OF_QUALITY, Answers
from tests.support.served import NAME, served

pytestmark = pytest.mark.filterwarnings(
    "ignore:.*is in beta",
    "ignore:.*is experimental",
    "ignore:Pydantic serializer warnings",  # both are the client's own
    "ignore:Received a Pydantic BaseModel V1 schema",
)


class OverHTTP(Answers):
    other_model = "alias"
    supports_anthropic_inputs = False

    @property
    def chat_model_class(self) -> type[BaseChatModel]:
        return ChatOpenAI


def fields_of(url: str) -> dict[str, Any]:
    """Connections are not kept: each asynchronous test has a loop of its own."""
    one_time = {"connection": "close"}
    return {
        "model": NAME, "base_url": f"{url}/v1", "api_key": "none", "stream_usage": True, "default_headers": one_time
    }  # fmt: skip


@pytest.fixture(scope="class")
def tiny_server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    folder = tmp_path_factory.mktemp("suite")
    target = tiny.make_target("llama", folder / "target")
    fields = {
        "model": target,
        "draft_model": tiny.make_draft(target, folder / "draft", noise=0.02),
        "dtype": "float64",
        "max_tokens": 200,
        "logit_bias": {tiny.byte_tokenizer().eos_token_id: -100.0},
    }
    with CARDChatModel(**fields).load() as model, served(model) as url:
        request.cls.fields = fields_of(url)
        yield


@pytest.mark.usefixtures("tiny_server")
class TestAnswersOfTinyModels(OverHTTP):
    @pytest.fixture(autouse=True)
    def _leave_out_what_random_weights_cannot_know(self, request: pytest.FixtureRequest) -> None:
        name = request.node.originalname
        if name in OF_QUALITY:
            pytest.skip("which value an argument has, and whether to call at all, is for a model that can read")
        if name.startswith("test_structured_output") or name == "test_json_mode":
            pytest.skip("the client takes no document that max_tokens ended, and random models end none themselves")


@pytest.fixture(scope="class")
def real_server(request: pytest.FixtureRequest) -> Iterator[None]:
    with CARDChatModel(isolate=True).load() as model, served(model) as url:
        request.cls.fields = fields_of(url)
        yield


@pytest.mark.pair
@pytest.mark.usefixtures("real_server")
class TestAnswersOfTheBuiltInPair(OverHTTP):
    pass
