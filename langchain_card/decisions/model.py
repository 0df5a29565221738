"""`CARDDecisionModel`: typed questions answered with the target's own probabilities (langchain-core 1.8 or later)."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

try:
    from langchain_core.decisions import BaseDecisionModel, ClassifierResponse
except ImportError as error:
    raise ImportError("CARDDecisionModel needs langchain-core 1.8 or later: pip install -U langchain-core") from error
from langchain_core.messages import HumanMessage, SystemMessage
from langchain_core.messages.ai import UsageMetadata
from langchain_core.runnables import RunnableConfig
from pydantic import ConfigDict, Field, model_validator
from typing_extensions import Self, override

from langchain_card.chat.answer import consuming, consuming_in_task
from langchain_card.chat.engine_holder import EngineHolder
from langchain_card.chat.error_mapping import langchain_errors
from langchain_card.chat.preparation import prepared
from langchain_card.chat.reasoning import without_thought
from langchain_card.core.request import SamplingParams
from langchain_card.decisions.questions import SYSTEM, answer_to, labels_of, prompt_text
from langchain_card.decisions.state import state_text
from langchain_card.engine.labels import LabelWeighing
from langchain_card.errors import InvalidInputError
from langchain_card.text.prompt import check_size, encode, num_chars, text_ids, to_conversation

_SHORTEN = "shorten the state"


class CARDDecisionModel(EngineHolder, BaseDecisionModel):
    """A local decision model: its probabilities are those of the target model's own answers.

    ```python
    from langchain_card import CARDDecisionModel
    from langchain_core.decisions import Choice

    decide = CARDDecisionModel()  # shares its weights with a CARDChatModel of the same models
    teams = {"billing": "Payments and invoices.", "technical": "Faults and errors."}
    team = Choice(instructions="Which team should handle this request?", criteria=teams)
    answer = decide.invoke({"state": "The app crashes when I log in.", "questions": {"team": team}})
    print(answer.choices["team"].choice, answer.choices["team"].probabilities)
    ```

    The model reads the state and a question once, and one pass weighs all labels: their tokens are a tree, as
    candidates are. The probability of a label is the chance that it is the model's whole answer, divided by the sum of
    these chances. `confidence` is the largest probability. Several questions share what was read of their state. A
    label has at most 15 tokens, unless `limits` allow larger windows.

    Raises:
        pydantic.ValidationError: a field is misspelt or breaks a limit; no weights were loaded.
    """

    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True)

    tenant: str = ""
    """Requests share keys and values with requests of the same tenant only."""
    adapter: str = ""
    """Name of the adapter, one of `adapters`, with which the target answers; "" for none."""
    timeout: float | None = Field(default=None, gt=0)
    """Seconds until a question is given up; None waits for ever."""

    @model_validator(mode="after")
    def _check_values(self) -> Self:
        self._params.check(self.limits)
        self._hold()
        return self

    @property
    def _params(self) -> SamplingParams:
        return SamplingParams(max_tokens=1, tenant=self.tenant, adapter=self.adapter)

    @property
    def _provider(self) -> str:
        return "card"

    @override
    def invoke(self, input: Any, config: RunnableConfig | None = None, **kwargs: Any) -> ClassifierResponse:
        with langchain_errors():
            _check_request(input)
        return super().invoke(input, config, **kwargs)

    @override
    async def ainvoke(self, input: Any, config: RunnableConfig | None = None, **kwargs: Any) -> ClassifierResponse:
        with langchain_errors():
            _check_request(input)
        return await super().ainvoke(input, config, **kwargs)

    @override
    def _classify(self, state: Any, questions: dict[str, Any]) -> ClassifierResponse:
        with langchain_errors():
            weighings = self._weighings(state, questions)
            for part in _in_turn(weighings):
                with contextlib.ExitStack() as stack:
                    for weighing in part:
                        weighing.start()
                        stack.enter_context(consuming(weighing, self.timeout, _SHORTEN))
                    for weighing in part:
                        weighing.result()
            return self._response(questions, weighings)

    @override
    async def _aclassify(self, state: Any, questions: dict[str, Any]) -> ClassifierResponse:
        with langchain_errors():
            prepare = functools.partial(self._weighings, state, questions)
            size = num_chars([state, *(vars(question) for question in questions.values())])
            weighings = await prepared(prepare, size, is_loaded=self._lease.held is not None)
            for part in _in_turn(weighings):
                with contextlib.ExitStack() as stack:
                    for weighing in part:
                        weighing.start()
                        stack.enter_context(consuming_in_task(weighing, self.timeout, _SHORTEN))
                    for weighing in part:
                        await weighing.aresult()
            return self._response(questions, weighings)

    def _weighings(self, state: Any, questions: dict[str, Any]) -> list[LabelWeighing]:
        """Return the weighing of each question's labels; all that can be checked before a text is read is checked."""
        if not questions:
            raise InvalidInputError("questions", {}, "must hold at least one question")
        text, labels = state_text(state, self.model), [labels_of(*item, self.model) for item in questions.items()]
        engine = self._engine()
        weighings = []
        for question, own in zip(questions.values(), labels, strict=True):
            messages = [SystemMessage(SYSTEM), HumanMessage(prompt_text(text, question, own, self.model))]
            conversation = to_conversation(messages, self.model)
            check_size(conversation, [], engine.max_model_len)
            prompt_ids = encode(conversation, engine.tokenizer, self.model, max_len=engine.max_model_len)
            prompt_ids += without_thought(engine.tokenizer, prompt_ids)
            tokens = [text_ids(name, engine.tokenizer) for name in own.names]
            weighings.append(LabelWeighing(engine, prompt_ids, tokens, self._params))
        return weighings

    def _response(self, questions: dict[str, Any], weighings: Sequence[LabelWeighing]) -> ClassifierResponse:
        answers = {
            name: answer_to(question, labels_of(name, question, self.model), weighing.logprobs)
            for (name, question), weighing in zip(questions.items(), weighings, strict=True)
        }
        read = sum(len(weighing.prompt_ids) for weighing in weighings)
        cached = sum(weighing.stats[0].cached_tokens for weighing in weighings)
        usage = UsageMetadata(
            input_tokens=read, output_tokens=0, total_tokens=read, input_token_details={"cache_read": cached}
        )
        return ClassifierResponse(model=self.model, answers=answers, usage=usage)


def _check_request(request: Any) -> None:
    """Raise `InvalidInputError` unless a request has the form of `langchain_core.decisions.ClassifierRequest`."""
    has_both = isinstance(request, Mapping) and {"state", "questions"} <= request.keys()
    if not has_both or not isinstance(request["questions"], Mapping):
        hint = 'such as {"state": "Help!", "questions": {"urgent": Noul(instructions="Is it urgent?")}}'
        raise InvalidInputError("input", request, "must be a dict of a state and a dict of questions", hint)


def _in_turn(weighings: Sequence[LabelWeighing]) -> Iterator[Sequence[LabelWeighing]]:
    """Yield the first weighing alone, then the others: they share what it has read of the state."""
    yield weighings[:1]
    yield weighings[1:]
