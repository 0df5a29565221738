"""LangChain's own tests of chat models (`langchain-tests`): of construction, and of answers by tiny and real models."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, ClassVar

import pytest
from langchain_tests.unit_tests import ChatModelUnitTests

from langchain_card import CARDChatModel
from tests.support import SMALL, tiny
from tests.support.langchain_suite import OF_QUALITY, Answers

pytestmark = pytest.mark.filterwarnings("ignore:.*is in beta")
REAL = "qwen2.5-coder-0.5b"


class TestConstruction(ChatModelUnitTests):
    @property
    def chat_model_class(self) -> type[CARDChatModel]:
        return CARDChatModel

    @property
    def init_from_env_params(self) -> tuple[dict[str, str], dict[str, Any], dict[str, Any]]:
        variables = {"LANGCHAIN_CARD_MODEL": SMALL, "LANGCHAIN_CARD_DRAFT_MODEL": "ngram"}
        return variables, {}, {"model": SMALL, "draft_model": "ngram"}


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
