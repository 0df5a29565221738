"""What a call of a `CARDChatModel` may say: names of options, other models; and what traces say of it."""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator
from typing import Any

import pytest
from langchain_core.callbacks import BaseCallbackHandler
from langchain_core.messages import HumanMessage
from langchain_core.prompts import ChatPromptTemplate
from langchain_core.runnables import ConfigurableField
from pydantic import ValidationError

from langchain_card import CARDChatModel
from langchain_card.engine.engine import Engine
from langchain_card.errors import EngineClosedError, InvalidInputError, UnknownModelError, VocabularyMismatchError
from tests.support import tiny, vocabularies
from tests.support.weights import num_loaded_models


@pytest.fixture(scope="module")
def stranger(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A model whose vocabulary has nothing in common with others."""
    folder = tmp_path_factory.mktemp("stranger")
    name = tiny.make_target("llama", folder)
    vocabularies.words().save_pretrained(folder)
    return name


@pytest.fixture
def model(toy: dict[str, Any]) -> Iterator[CARDChatModel]:
    with CARDChatModel(**toy) as model:
        yield model


@pytest.fixture
def submitted(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What engines were asked during the test."""
    submit, asked = Engine.submit, list[Any]()

    def recorded(self: Engine, prompt_ids: Any, params: Any) -> Any:
        asked.append(params)
        return submit(self, prompt_ids, params)

    monkeypatch.setattr(Engine, "submit", recorded)
    monkeypatch.setattr(Engine, "warm_up", lambda *_: None)  # it submits where kernels were compiled
    return asked


# Names of options


@pytest.mark.parametrize("value", [0.5, None])
async def test_misspelt_names_are_refused_whatever_their_value(model: CARDChatModel, value: Any) -> None:
    words = rf"temprature = {value}: .*did you mean temperature"
    with pytest.raises(ValidationError, match=words):
        CARDChatModel(temprature=value)
    with pytest.raises(InvalidInputError, match=words):
        model.bind(temprature=value)
    with pytest.raises(InvalidInputError, match=words):
        model.invoke("hi", temprature=value)
    with pytest.raises(InvalidInputError, match=words):
        list(model.stream("hi", temprature=value))
    with pytest.raises(InvalidInputError, match=words):
        await model.ainvoke("hi", temprature=value)
    with pytest.raises(InvalidInputError, match=words):
        model.bind(stop=["x"]).bind(temprature=value).invoke("hi")


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("modle", "model"),
        ("draftmodel", "draft_model"),
        ("max_token", "max_tokens"),
        ("stops", "stop"),
        ("num_predict", "max_tokens"),
        ("num_ctx", "max_model_len"),
        ("stop_sequences", "stop"),
    ],
)
def test_all_options_are_known_to_the_hint(model: CARDChatModel, name: str, meant: str) -> None:
    with pytest.raises(InvalidInputError, match=f"did you mean {meant}$|did you mean {meant}\\."):
        model.invoke("hi", **{name: None})


def test_the_constructor_takes_what_calls_take(toy: dict[str, Any]) -> None:
    left_out = CARDChatModel(**{**toy, "max_tokens": None}, temperature=None, stop=None, top_p=None, seed=None)
    assert (left_out.max_tokens, left_out.temperature, left_out.top_p) == (512, 0.0, 1.0)
    others = {name: value for name, value in toy.items() if name != "max_tokens"}
    assert CARDChatModel(**others, max_completion_tokens=7).max_tokens == 7
    with pytest.raises(ValidationError, match="max_tokens = 0"):
        CARDChatModel(**others, max_completion_tokens=0)


def test_the_representation_is_short(toy: dict[str, Any]) -> None:
    model = CARDChatModel(**toy, temperature=0.5)
    words = repr(model)
    assert words.startswith(f"CARDChatModel(model={toy['model']!r}, draft_model={toy['draft_model']!r}")
    assert "temperature=0.5" in words and "metadata" not in words and "top_p" not in words
    assert repr(CARDChatModel()) == "CARDChatModel(model='qwen2.5-coder-1.5b', draft_model='qwen2.5-coder-0.5b')"


def test_tiny_temperatures_take_the_likeliest_token(model: CARDChatModel) -> None:
    for temperature in (1e-308, 1e-6):
        assert model.invoke("hi", temperature=temperature).content == model.invoke("hi", temperature=0).content != ""


def test_none_leaves_the_fields_value(toy: dict[str, Any], submitted: list[Any]) -> None:
    with CARDChatModel(**toy, temperature=0.7, seed=3, top_k=5, stop=["zzz"]) as model:
        names = ("temperature", "seed", "top_k", "max_tokens", "max_completion_tokens", "model", "schedule", "stop")
        text = model.invoke("hi", **dict.fromkeys(names)).content
        assert text == model.bind(**dict.fromkeys(names)).invoke("hi").content == model.invoke("hi").content
    assert submitted[0] == submitted[1] == submitted[2]
    assert (submitted[0].temperature, submitted[0].top_k, submitted[0].stop) == (0.7, 5, ("zzz",))


# Other models


async def test_a_call_may_name_another_model(model: CARDChatModel, toy: dict[str, Any], other_toy: str) -> None:
    own = model.invoke("hi")
    with CARDChatModel(**{**toy, "model": other_toy}) as alone:
        wanted = alone.invoke("hi").content
    assert wanted != own.content
    answers = [
        model.invoke("hi", model=other_toy),
        await model.ainvoke("hi", model=other_toy),
        model.bind(model=other_toy).invoke("hi"),
        model.batch(["hi"], model=other_toy)[0],
    ]
    *_, last = model.stream("hi", model=other_toy)
    *_, alast = [chunk async for chunk in model.astream("hi", model=other_toy)]
    assert {answer.content for answer in answers} == {wanted}
    assert {answer.response_metadata["model_name"] for answer in [*answers, last, alast]} == {other_toy}
    assert own.response_metadata["model_name"] == model.model == model.invoke("hi").response_metadata["model_name"]


def test_a_call_may_name_another_draft(tiny_pairs: dict[str, tuple[str, str]]) -> None:
    target, draft = tiny_pairs["llama"]
    with CARDChatModel(model=target, draft_model=None, dtype="float64", schedule="sequential", max_tokens=12) as model:
        drafted = model.invoke("hi", draft_model=draft)
        assert drafted.response_metadata["card"]["accepted_by_source"].get("model", 0) > 0
        assert model.invoke("hi", draft_model="ngram").content == model.invoke("hi").content == drafted.content
    with CARDChatModel(model=target, draft_model=draft, dtype="float64", schedule="sequential", max_tokens=12) as model:
        assert not model.invoke("hi", draft_model=None).response_metadata["card"]["accepted_by_source"]


def test_other_models_keep_their_engine_until_the_model_is_closed(
    model: CARDChatModel, toy: dict[str, Any], other_toy: str
) -> None:
    before = num_loaded_models()
    model.load()
    for tokens in (2, 3):
        usage = model.invoke("hi", model=other_toy, max_tokens=tokens).usage_metadata
        assert usage is not None and usage["output_tokens"] == tokens
        assert num_loaded_models() == before + 2
    model.temperature, model.seed = 1.0, 4
    assert model.invoke("hi", model=other_toy).response_metadata["card"]["seed"] == 4, "fields hold for all models"
    copied = model.model_copy()
    assert copied._other_leases is not model._other_leases
    model.close()
    assert num_loaded_models() == before
    with pytest.raises(EngineClosedError):
        model.invoke("hi", model=other_toy)
    with pytest.raises(EngineClosedError):
        model.invoke("hi", draft_model="ngram")
    assert num_loaded_models() == before


def test_garbage_gives_other_models_back(toy: dict[str, Any], other_toy: str) -> None:
    before = num_loaded_models()
    model = CARDChatModel(**toy)
    model.invoke("hi", model=other_toy)
    del model
    gc.collect()
    end = time.monotonic() + 10
    while num_loaded_models() > before:
        assert time.monotonic() < end
        time.sleep(0.01)


def test_naming_the_same_model_changes_nothing(model: CARDChatModel) -> None:
    called, rest = model._for_call({"model": model.model, "draft_model": None, "top_k": 3})
    assert called is model and rest == {"top_k": 3}


def test_names_of_a_call_are_checked(model: CARDChatModel) -> None:
    with pytest.raises(UnknownModelError, match=r"model = 'smollm2-135': .*did you mean smollm2-135m"):
        model.invoke("hi", model="smollm2-135")
    with pytest.raises(UnknownModelError, match="draft_model = 'ngrm': "):
        model.invoke("hi", draft_model="ngrm")


def test_a_draft_that_shares_no_tokens(tiny_pairs: dict[str, tuple[str, str]], stranger: str) -> None:
    target, draft = tiny_pairs["llama"]
    with CARDChatModel(model=target, draft_model=draft, dtype="float64", max_tokens=4) as model:
        with pytest.raises(VocabularyMismatchError, match=r'Hint: .*draft_model="ngram"; in a call, too'):
            model.invoke("hi", model=stranger)
        assert model.invoke("hi", model=stranger, draft_model="ngram").response_metadata["model_name"] == stranger


# Traces


class Tracer(BaseCallbackHandler):
    def __init__(self) -> None:
        self.metadata: list[Any] = []
        self.params: list[Any] = []

    def on_chat_model_start(self, *_: Any, **kwargs: Any) -> None:
        self.metadata.append(kwargs["metadata"])
        self.params.append(kwargs["invocation_params"])


def test_traces_say_what_the_call_said(toy: dict[str, Any], other_toy: str) -> None:
    tracer = Tracer()
    with CARDChatModel(**toy, stop="zzz", callbacks=[tracer]) as model:
        model.invoke("hi")
        model.invoke("hi", model=other_toy, temperature=0.5, max_tokens=3, stop=["yyy"])
    first, second = tracer.metadata
    names = ("ls_provider", "ls_model_type", "ls_model_name", "ls_temperature", "ls_max_tokens", "ls_stop")
    assert [first[name] for name in names] == ["card", "chat", toy["model"], 0.0, 8, ["zzz"]]
    assert [second[name] for name in names] == ["card", "chat", other_toy, 0.5, 3, ["yyy"]]
    assert [params["stop"] for params in tracer.params] == [["zzz"], ["yyy"]]
    assert tracer.params[0]["_type"] == "card-chat"


# Configurable models


def test_configurable_alternatives_share_the_engine(model: CARDChatModel, toy: dict[str, Any], other_toy: str) -> None:
    model.load()
    loaded = num_loaded_models()
    choice = model.configurable_alternatives(
        ConfigurableField(id="llm"),
        default_key="own",
        short=CARDChatModel(**{**toy, "max_tokens": 2, "schedule": "plain"}),
        other=lambda: CARDChatModel(**{**toy, "model": other_toy}),
    )
    assert choice.invoke("hi").usage_metadata["output_tokens"] == 8
    short = choice.invoke("hi", config={"configurable": {"llm": "short"}})
    assert short.usage_metadata["output_tokens"] == 2
    assert num_loaded_models() == loaded
    changed = choice.invoke("hi", config={"configurable": {"llm": "other"}})
    assert changed.response_metadata["model_name"] == other_toy


def test_configurable_models_stream(model: CARDChatModel) -> None:
    configurable = model.configurable_fields(max_tokens=ConfigurableField(id="length"))
    chunks = list(configurable.stream("hi", config={"configurable": {"length": 3}}))
    assert len(chunks) == 4, "one per token, and the end"
    assert len(list(CARDChatModel(**{**model.to_config(), "streaming": False}).stream("hi"))) == 1


def test_a_field_in_a_call_is_told_where_it_belongs(toy: dict[str, Any]) -> None:
    model = CARDChatModel(**toy)
    for call in (model.invoke, lambda _, **options: model.bind(**options)):
        with pytest.raises(InvalidInputError, match=r"timeout = 1\.0: is not an option.*is a field: say it"):
            call("hi", timeout=1.0)


def test_whatever_invoke_takes_is_counted(toy: dict[str, Any]) -> None:
    with CARDChatModel(**toy) as model:
        count = model.get_num_tokens_from_messages([HumanMessage("Hi.")])
        prompt = ChatPromptTemplate.from_messages([("human", "{text}")]).invoke({"text": "Hi."})
        forms: list[Any] = ["Hi.", [("human", "Hi.")], [{"role": "user", "content": "Hi."}], prompt]
        assert [model.get_num_tokens_from_messages(form) for form in forms] == [count] * 4


def test_logit_bias_with_the_keys_of_json(toy: dict[str, Any]) -> None:
    with CARDChatModel(**toy) as model:
        biased = {model.invoke("hi", logit_bias=bias).text for bias in ({"70": 100.0}, {70: 100.0})}
        assert len(biased) == 1 and biased != {model.invoke("hi").text}
