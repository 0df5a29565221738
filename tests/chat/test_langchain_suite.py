"""LangChain's own tests of chat models (`langchain-tests`): of construction, and of answers by tiny and real models."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, ClassVar, Literal

import pytest
from langchain_core.language_models import BaseChatModel
from langchain_core.messages import AIMessage, AIMessageChunk
from langchain_tests.integration_tests import ChatModelIntegrationTests
from langchain_tests.unit_tests import ChatModelUnitTests

from langchain_card import CARDChatModel
from tests.support import SMALL, tiny

pytestmark = pytest.mark.filterwarnings("ignore:.*is in beta")
REAL = "qwen2.5-coder-0.5b"
OF_QUALITY = ("test_tool_calling", "test_tool_calling_async", "test_agent_loop", "test_unicode_tool_call_integration")


class TestConstruction(ChatModelUnitTests):
    @property
    def chat_model_class(self) -> type[CARDChatModel]:
        return CARDChatModel

    @property
    def init_from_env_params(self) -> tuple[dict[str, str], dict[str, Any], dict[str, Any]]:
        variables = {"LANGCHAIN_CARD_MODEL": SMALL, "LANGCHAIN_CARD_DRAFT_MODEL": "ngram"}
        return variables, {}, {"model": SMALL, "draft_model": "ngram"}


class Answers(ChatModelIntegrationTests):
    """What all models are told."""

    fields: ClassVar[dict[str, Any]]
    other_model: ClassVar[str]

    @property
    def chat_model_class(self) -> type[BaseChatModel]:
        return CARDChatModel

    @property
    def chat_model_params(self) -> dict[str, Any]:
        return self.fields

    @property
    def model_override_value(self) -> str:
        return self.other_model

    @property
    def supports_json_mode(self) -> bool:
        return True

    @property
    def supports_anthropic_inputs(self) -> bool:
        return True

    @property
    def supported_usage_metadata_details(self) -> dict[Literal["invoke", "stream"], list[Any]]:
        return {"invoke": ["cache_read_input"], "stream": ["cache_read_input"]}

    def invoke_with_cache_read_input(self, *, stream: bool = False) -> AIMessage:
        model = self.chat_model_class(**self.fields)
        model.invoke("Count to ten.")
        if not stream:
            answer = model.invoke("Count to ten.")
        else:
            answer = sum(model.stream("Count to ten."), start=AIMessageChunk(""))
        assert answer.usage_metadata is not None
        assert answer.usage_metadata["input_token_details"]["cache_read"] > 0
        return answer


@pytest.fixture(scope="class")
def tiny_answers(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Random models whose answers are text, and the engine of the first held while the class runs."""
    folder = tmp_path_factory.mktemp("suite")
    target = tiny.make_target("llama", folder / "target")
    request.cls.fields = {
        "model": target,
        "draft_model": tiny.make_draft(target, folder / "draft", noise=0.02),
        "dtype": "float64",
        "max_tokens": 200,
        "logit_bias": {tiny.byte_tokenizer().eos_token_id: -100.0},
    }
    request.cls.other_model = tiny.make_target("qwen2", folder / "other", seed=5)
    with CARDChatModel(**request.cls.fields).load():
        yield


@pytest.mark.usefixtures("tiny_answers")
class TestAnswersOfTinyModels(Answers):
    @pytest.fixture(autouse=True)
    def _leave_out_what_random_weights_cannot_know(self, request: pytest.FixtureRequest) -> None:
        if request.node.originalname in OF_QUALITY:
            pytest.skip("which value an argument has, and whether to call at all, is for a model that can read")


@pytest.fixture(scope="class")
def real_answers(request: pytest.FixtureRequest) -> Iterator[None]:
    with CARDChatModel(**request.cls.fields).load():
        yield


@pytest.mark.pair
@pytest.mark.usefixtures("real_answers")
class TestAnswersOfARealModel(Answers):
    fields: ClassVar[dict[str, Any]] = {"model": REAL, "draft_model": "ngram"}
    other_model = SMALL


class TestAnswersOfARealModelAlone(TestAnswersOfARealModel):
    fields: ClassVar[dict[str, Any]] = {"model": REAL, "draft_model": "ngram", "schedule": "plain"}


class TestAnswersOfTheBuiltInPair(TestAnswersOfARealModel):
    fields: ClassVar[dict[str, Any]] = {}
    other_model = REAL
