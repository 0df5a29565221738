"""The integration suite of `langchain-tests` as every model runs it."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

from langchain_core.language_models import BaseChatModel
from langchain_core.messages import AIMessage, AIMessageChunk
from langchain_tests.integration_tests import ChatModelIntegrationTests

from langchain_card import CARDChatModel

OF_QUALITY = ("test_tool_calling", "test_tool_calling_async", "test_agent_loop", "test_unicode_tool_call_integration")


class Answers(ChatModelIntegrationTests):
    """The settings that all models share."""

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
