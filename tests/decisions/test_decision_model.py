"""`CARDDecisionModel` behind LangChain's interface."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Iterator
from typing import Any

import pytest
from langchain_core.messages import AIMessage, HumanMessage, SystemMessage, ToolMessage
from pydantic import ValidationError

from langchain_card import CARDChatModel
from langchain_card.errors import EngineClosedError, GenerationTimeoutError, InvalidInputError, UnsupportedContentError
from langchain_card.limits import Limits

decisions = pytest.importorskip("langchain_core.decisions", reason="langchain-core before 1.8 has no decision models")

from langchain_card import CARDDecisionModel  # noqa: E402
from langchain_card.decisions.questions import SYSTEM, labels_of, prompt_text  # noqa: E402
from langchain_card.decisions.state import state_text  # noqa: E402
from langchain_card.text.prompt import encode, text_ids, to_conversation  # noqa: E402
from tests.support.labels import direct  # noqa: E402

STATE = "The app crashes when I log in."
TEAM = decisions.Choice(
    instructions="Which team?", criteria={"billing": "Payments.", "technical": None, "sales": {"of": ["prices"]}}
)
URGENT = decisions.Noul(instructions="Is it urgent?")
ANGER = decisions.Score(instructions="How angry?", criteria=["Calm.", "Cross.", "Angry."])
QUESTIONS = {"team": TEAM, "urgent": URGENT, "anger": ANGER}


@pytest.fixture
def fields(toy: dict[str, Any]) -> dict[str, Any]:
    """Fields of a toy whose window holds the labels: each byte is a token."""
    return {name: toy[name] for name in ("model", "draft_model", "dtype")} | {"limits": Limits(max_window=48)}


@pytest.fixture
def model(fields: dict[str, Any]) -> Iterator[Any]:
    with CARDDecisionModel(**fields) as model:
        yield model


def expected(model: Any, question: Any) -> list[float]:
    """Return the probabilities of a question's labels, from the weights alone."""
    tokenizer, labels = model.engine.tokenizer, labels_of("q", question, model.model)
    messages = [SystemMessage(SYSTEM), HumanMessage(prompt_text(STATE, question, labels, model.model))]
    prompt = encode(to_conversation(messages, model.model), tokenizer, model.model)
    logs = [direct(model.model, prompt, text_ids(name, tokenizer), model.engine.eos_ids) for name in labels.names]
    weights = [math.exp(log - max(logs)) for log in logs]
    return [weight / math.fsum(weights) for weight in weights]


def test_answers_are_the_models_own_probabilities(model: Any) -> None:
    response = model.invoke({"state": STATE, "questions": QUESTIONS})
    assert response.model == model.model
    team, anger = response.choices["team"], response.scores["anger"]
    wanted = expected(model, TEAM)
    assert [*team.probabilities.values()] == pytest.approx(wanted, abs=1e-9)
    assert list(team.probabilities) == ["billing", "technical", "sales"]
    assert team.confidence == max(team.probabilities.values()) == team.probabilities[team.choice]
    assert response.nouls["urgent"].noul == pytest.approx(expected(model, URGENT)[0], abs=1e-9)
    assert [*anger.probabilities.values()] == pytest.approx(expected(model, ANGER), abs=1e-9)
    assert anger.score == pytest.approx(sum(level * chance for level, chance in anger.probabilities.items()))
    assert anger.legend == {0: "Calm.", 1: "Cross.", 2: "Angry."}
    usage = response.usage
    assert usage["input_tokens"] > usage["input_token_details"]["cache_read"] > 2 * len(STATE), "read once"
    assert usage["output_tokens"] == 0


@pytest.mark.parametrize("request_", ["hello", {}, {"state": STATE}, {"state": STATE, "questions": [URGENT]}], ids=str)
async def test_a_request_has_a_state_and_questions(fields: dict[str, Any], request_: Any) -> None:
    """No weights are loaded."""
    model, message = CARDDecisionModel(**fields), "input = .*must be a dict of a state and a dict of questions.*Noul"
    with pytest.raises(InvalidInputError, match=message):
        model.invoke(request_)
    with pytest.raises(InvalidInputError, match=message):
        await model.ainvoke(request_)


def test_fields_are_checked_and_shown_as_those_of_the_chat_model(fields: dict[str, Any]) -> None:
    with pytest.raises(ValidationError, match=r"tennant = 'a': is not a field of CARDDecision.*you mean tenant"):
        CARDDecisionModel(tennant="a")
    for name in ("temprature", "num_predict"):
        with pytest.raises(ValidationError, match=rf"{name} = 1: .*Hint: help\(CARDDecisionModel\) lists its fields\."):
            CARDDecisionModel(**{name: 1})
    assert "    tenant (str, default ''):\n        Requests share" in (CARDDecisionModel.__doc__ or "")
    assert repr(CARDDecisionModel(timeout=3)) == (
        "CARDDecisionModel(model='qwen2.5-coder-1.5b', draft_model='qwen2.5-coder-0.5b', timeout=3.0)"
    )


def test_short_states_share_what_was_read_of_a_long_question(model: Any) -> None:
    criteria: dict[str, Any] = {"a": "The letter is about apples, or about pears.", "b": "It is about something else."}
    question = decisions.Choice(instructions="What is the letter about?", criteria=criteria)
    for number, state in enumerate(("Two pears.", "One lemon.")):
        usage = model.invoke({"state": state, "questions": {"q": question}}).usage
        assert (usage["input_token_details"]["cache_read"] > len("".join(criteria.values()))) == bool(number)


async def test_all_ways_to_call_agree(model: Any) -> None:
    request = {"state": STATE, "questions": QUESTIONS}
    answers = model.invoke(request).answers
    together = await asyncio.gather(*(model.ainvoke(request) for _ in range(4)))
    for response in (*together, *model.batch([request] * 3)):
        for name, answer in response.answers.items():
            values = answer.model_dump().get("probabilities") or {"": getattr(answer, "noul", None)}
            own = answers[name].model_dump().get("probabilities") or {"": getattr(answers[name], "noul", None)}
            assert values == pytest.approx(own, abs=1e-9)


def test_a_decision_shares_the_chat_models_engine(model: Any, fields: dict[str, Any]) -> None:
    with CARDChatModel(**fields) as chat:
        assert chat.engine is model.engine


def test_what_cannot_be_decided_is_refused(model: Any, fields: dict[str, Any]) -> None:
    box = decisions.Box(instructions="Where is the button?")
    with pytest.raises(UnsupportedContentError, match=r"box.*reads text, no images"):
        model.invoke({"state": STATE, "questions": {"where": box}})
    with pytest.raises(InvalidInputError, match="must be a Noul, a Choice or a Score"):
        model.invoke({"state": STATE, "questions": {"odd": {"type": "noul"}}})
    with pytest.raises(UnsupportedContentError, match="image"):
        model.invoke({"state": {"seen": {"type": "image", "url": "x"}}, "questions": {"urgent": URGENT}})
    with pytest.raises(InvalidInputError, match=r"questions = .*at least one"):
        model.invoke({"state": STATE, "questions": {}})
    image = HumanMessage([{"type": "image", "base64": "", "mime_type": "image/png"}])
    with pytest.raises(UnsupportedContentError):
        model.invoke({"state": {"seen": [image]}, "questions": {"urgent": URGENT}})
    long = decisions.Choice(instructions="Which?", criteria={"a" * 60: None, "b": None})
    with pytest.raises(InvalidInputError, match="tokens of a label = 60: must be at most"):
        model.invoke({"state": STATE, "questions": {"which": long}})
    with pytest.raises(ValidationError, match="temprature"):
        CARDDecisionModel(**fields, temprature=1)


def test_a_question_is_given_up_after_its_time(fields: dict[str, Any]) -> None:
    with CARDDecisionModel(**fields, timeout=1e-4) as model:
        model.load()
        with pytest.raises(GenerationTimeoutError) as caught:
            model.invoke({"state": STATE * 50, "questions": {"urgent": URGENT}})
        assert caught.value.hint == "raise timeout or shorten the state", "decisions have no max_tokens"
    with pytest.raises(EngineClosedError):
        model.invoke({"state": STATE, "questions": {"urgent": URGENT}})


def test_states_are_text() -> None:
    call = {"name": "weather", "args": {"city": "Rome"}, "id": "1", "type": "tool_call"}
    talk = [HumanMessage("Hi."), AIMessage("", tool_calls=[call]), ToolMessage("12 C", tool_call_id="1")]
    assert state_text("as it is", "m") == "as it is"
    assert state_text(talk[0], "m") == "user: Hi."
    assert state_text(talk, "m") == 'user: Hi.\n\nassistant: calls weather({"city": "Rome"})\n\ntool: 12 C'
    nested = state_text({"messages": talk[:1], "tool_call": {"name": "rm", "sure": None}}, "m")
    assert '"messages": [\n  "user: Hi."\n ]' in nested and '"sure": null' in nested


def test_labels_that_spell_control_tokens_are_text(model: Any) -> None:
    end = model.engine.tokenizer.eos_token
    odd = decisions.Choice(instructions="Which?", criteria={end: None, "b": None})
    answer = model.invoke({"state": STATE, "questions": {"which": odd}}).choices["which"]
    assert [*answer.probabilities.values()] == pytest.approx(expected(model, odd), abs=1e-9)
    assert model.engine.eos_ids[0] not in text_ids(end, model.engine.tokenizer)


@pytest.mark.filterwarnings("ignore:.*beta")
def test_the_router_and_auto_mode_run_with_it(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("langchain.agents.middleware.model_router", reason="langchain before 1.5 routes no models")
    from langchain.agents import create_agent
    from langchain.agents.middleware import AutoModeMiddleware, ModelChoice, ModelRouterMiddleware
    from langchain_core.language_models import GenericFakeChatModel

    first, second = (GenericFakeChatModel(messages=iter([AIMessage(name)] * 4)) for name in ("first", "second"))
    choices = {
        "easy": ModelChoice(model=first, criteria="Short questions."),
        "hard": ModelChoice(model=second, criteria="Long questions."),
    }
    routing = ModelRouterMiddleware(choices=choices, instructions="Which one?", classifier=model)
    state = create_agent(first, middleware=[routing]).invoke({"messages": [("user", "Hi.")]})
    route = state["model_route"]
    assert state["messages"][-1].content == {"easy": "first", "hard": "second"}[route.choice]
    assert sum(route.probabilities.values()) == pytest.approx(1)

    ran = list[str]()

    def remove(path: str) -> str:
        """Remove a file."""
        ran.append(path)
        return "removed"

    call = {"name": "remove", "args": {"path": "/tmp/x"}, "id": "1", "type": "tool_call"}
    caller = GenericFakeChatModel(messages=iter([AIMessage("", tool_calls=[call]), AIMessage("done")]))
    monkeypatch.setattr(GenericFakeChatModel, "bind_tools", lambda self, tools, **_: self)
    careful = AutoModeMiddleware(tools=["remove"], classifier=model)
    result = create_agent(caller, tools=[remove], middleware=[careful]).invoke({"messages": [("user", "Remove x.")]})
    (verdict,) = (message for message in result["messages"] if message.type == "tool")
    blocked = "blocked because it was classified as risky" in verdict.content
    assert blocked != bool(ran), "either it was blocked, with a probability, or it ran"
