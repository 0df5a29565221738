"""What a user writes, as `mypy --strict` reads it (tests/repo/test_typing.py); never run."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator

from langchain_core.exceptions import ContextOverflowError as LangChainOverflow
from langchain_core.exceptions import ModelRateLimitError
from langchain_core.language_models import BaseChatModel
from langchain_core.messages import AIMessage, AIMessageChunk, HumanMessage, SystemMessage
from langchain_core.output_parsers import StrOutputParser
from langchain_core.prompts import ChatPromptTemplate
from langchain_core.runnables import ConfigurableField, Runnable

from langchain_card import CARDChatModel, CARDError, Engine, EngineConfig, Limits, Pins, SamplingParams
from langchain_card.errors import ContextOverflowError, EngineBusyError, InvalidInputError


def construct() -> CARDChatModel:
    CARDChatModel()
    CARDChatModel(model="smollm2-135m", draft_model=None)
    CARDChatModel(model="smollm2-135m", draft_model="ngram", timeout=60, stop=["\n"], api_key=None)
    model = CARDChatModel(limits=Limits(max_num_seqs=8), pins=Pins(window=4), schedule="plain", logit_bias={1: 2.0})
    config: dict[str, object] = dict(model.to_config())
    return CARDChatModel.from_config(config).load()


def call(model: CARDChatModel) -> str:
    answer: AIMessage = model.invoke([SystemMessage("Be brief."), HumanMessage("Hi")], max_tokens=5, model="x/y")
    chunks: Iterator[AIMessageChunk] = model.stream("hi", stop=["x"])
    for chunk in chunks:
        print(chunk.text)
    answers: list[AIMessage] = model.batch(["a", "b"], return_exceptions=False)
    usage = answer.usage_metadata
    count = usage["input_tokens"] if usage is not None else model.get_num_tokens_from_messages([HumanMessage("Hi")])
    return answers[0].text + str(count) + str((model.profile or {}).get("max_input_tokens"))


def compose(model: CARDChatModel) -> str:
    chain = ChatPromptTemplate.from_messages([("human", "{text}")]) | model | StrOutputParser()
    text: str = chain.invoke({"text": "hi"})
    bound = model.bind(stop=["x"], temperature=0.5)
    safe = bound.with_retry(retry_if_exception_type=(ModelRateLimitError,)).with_fallbacks([model])
    message: AIMessage = safe.invoke("hi")
    model.with_config(tags=["a"]).invoke("hi")
    model.configurable_fields(max_tokens=ConfigurableField(id="length")).invoke("hi")
    anything: BaseChatModel = model
    runnable: Runnable[dict[str, str], str] = chain
    return text + message.text + anything.get_name() + runnable.get_name()


def handle(model: CARDChatModel) -> str:
    try:
        with model:
            return model.invoke("hi").text
    except LangChainOverflow:
        return "too long for LangChain"
    except ContextOverflowError as error:
        return f"{error.field} {error.limit} {error.hint}"
    except (EngineBusyError, InvalidInputError):
        return "busy"
    except CARDError as error:
        return str(error.value)


def without_langchain(config: EngineConfig) -> str:
    with Engine(config) as engine:
        generation = engine.submit([1, 2, 3], SamplingParams(max_tokens=3, temperature=0.5, seed=1))
        text = "".join(piece.text for piece in generation)
        return text + generation.result().text + engine.devices["target"]


async def later(model: CARDChatModel) -> AsyncIterator[str]:
    answer: AIMessage = await model.ainvoke("hi", temperature=0.5)
    yield answer.text
    async for chunk in model.astream("hi"):
        yield chunk.text
    for message in await model.abatch(["a", "b"]):
        yield message.text
