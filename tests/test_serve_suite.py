"""LangChain's own tests of chat models, of `ChatOpenAI` as the client of a real server."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, ClassVar, Literal

import pytest
import tiny
from langchain_core.messages import AIMessage, AIMessageChunk
from langchain_openai import ChatOpenAI
from langchain_tests.integration_tests import ChatModelIntegrationTests
from served import NAME, served
from test_langchain_suite import OF_QUALITY

from langchain_card import CARDChatModel

pytestmark = pytest.mark.filterwarnings(
    "ignore:.*is in beta",
    "ignore:.*is experimental",
    "ignore:Pydantic serializer warnings",  # both are the client's own
    "ignore:Received a Pydantic BaseModel V1 schema",
)


class Answers(ChatModelIntegrationTests):
    """What both are told."""

    fields: ClassVar[dict[str, Any]]

    @property
    def chat_model_class(self) -> type[ChatOpenAI]:
        return ChatOpenAI

    @property
    def chat_model_params(self) -> dict[str, Any]:
        return self.fields

    @property
    def model_override_value(self) -> str:
        return "alias"

    @property
    def supports_json_mode(self) -> bool:
        return True

    @property
    def supported_usage_metadata_details(self) -> dict[Literal["invoke", "stream"], list[Any]]:
        return {"invoke": ["cache_read_input"], "stream": ["cache_read_input"]}

    def invoke_with_cache_read_input(self, *, stream: bool = False) -> AIMessage:
        model = ChatOpenAI(**self.fields)
        model.invoke("Count to ten.")
        if not stream:
            answer = model.invoke("Count to ten.")
        else:
            answer = sum(model.stream("Count to ten."), start=AIMessageChunk(""))
        assert answer.usage_metadata is not None
        assert answer.usage_metadata["input_token_details"]["cache_read"] > 0
        return answer


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
class TestAnswersOfTinyModels(Answers):
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


@pytest.mark.slow
@pytest.mark.usefixtures("real_server")
class TestAnswersOfTheBuiltInPair(Answers):
    pass
