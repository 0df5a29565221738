"""`CARDChatModel`: a LangChain chat model over a draft and a target that decode together."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from dataclasses import fields
from typing import TYPE_CHECKING, Any

from langchain_core.callbacks import AsyncCallbackManagerForLLMRun, CallbackManagerForLLMRun
from langchain_core.language_models.base import LangSmithParams
from langchain_core.messages import BaseMessage
from langchain_core.outputs import ChatGenerationChunk, ChatResult
from pydantic import AliasChoices, ConfigDict, Field, PrivateAttr, SecretStr, model_validator
from typing_extensions import Self, override

from langchain_card._version import __version__
from langchain_card.answer import Answer, consuming, consuming_in_task
from langchain_card.batches import Batches, join_group
from langchain_card.config import DraftTransport, Dtype, EngineConfig, Exactness, Execution, Limits, Pins
from langchain_card.consumers import Consumer, EventStreams
from langchain_card.core.request import SamplingParams
from langchain_card.engine.lease import EngineLease
from langchain_card.errors import InvalidInputError
from langchain_card.prompt import encode, to_conversation
from langchain_card.runtime.store import ModelStore
from langchain_card.sampling_options import SamplingOptions, unknown_name

if TYPE_CHECKING:
    from langchain_card.engine.engine import Engine
    from langchain_card.engine.generation import Generation


class CARDChatModel(SamplingOptions, Batches, EventStreams):
    r"""A local chat model that drafts and verifies at once and answers in the target model's own words.

    ```python
    from langchain_card import CARDChatModel

    model = CARDChatModel()  # the built-in pair
    print(model.invoke("Write a haiku about caches.").content)
    ```

    Weights are loaded at first use, or by `load()`. Instances with equal models, devices and number formats share one
    engine in a process, whatever their schedule and sampling. An instance gives the engine back on `close()`, at the
    end of a `with` block, or when it is garbage; the last one frees the memory. Safe to use from many threads and
    event loops.

    A call may override `stop` and every field of `SamplingOptions`, from `max_tokens` to `top_logprobs`:
    `model.invoke(messages, temperature=0.7)` or `model.bind(stop=["\n"])`.

    Raises:
        pydantic.ValidationError: a field is misspelt or breaks a limit; no weights were touched.
    """

    model_config = ConfigDict(extra="forbid")

    model: str = Field(default=EngineConfig().model, validation_alias=AliasChoices("model", "model_name"))
    """The target: a built-in name, a folder with safetensors, a GGUF file or a hub id. Also `model_name`."""
    draft_model: str | None = EngineConfig().draft_model
    """The draft, named likewise; `"ngram"` for prompt lookup without a draft, None for plain decoding."""
    device: str = "auto"
    """Of the target: `"auto"` (CUDA when there is one, else the CPU), `"cpu"`, `"cuda"`, `"cuda:1"`, ...; or several,
    `"cuda:0,cuda:1"`, over which its layers are spread."""
    draft_device: str = "auto"
    """Of the draft; `"auto"` is a CUDA device that the target leaves free, else the target's device."""
    draft_transport: DraftTransport = "auto"
    """Where the draft runs: a `"thread"` or a `"process"`; `"auto"` is a process when both have a CUDA device each."""
    dtype: Dtype = "auto"
    """Of weights and KV; `"auto"` is float32 on a CPU and bfloat16 on CUDA."""
    quantization: str | None = "auto"
    """`"int8"` for row-exact int8 layers on a CPU, `"auto"` for int8 with built-in models on a CPU, None for none; or a
    transformers quantization config as a JSON object: `'{"quant_method": "bitsandbytes", "load_in_4bit": true}'`."""
    exact: Exactness = "default"
    """`"strict"` makes an answer equal plain decoding by the same engine bit for bit, also in 16 bits; see the docs."""
    execution: Execution = "auto"
    """Of steps: `"graphs"` (captured on CUDA), `"compiled"` (layers compiled, too) or `"eager"`."""
    ngram: bool = True
    """Whether candidates are also looked up in prompt and answer, beside the draft."""
    max_model_len: int | None = None
    """Tokens of prompt and answer together; None for the model's own limit, at most 8,192."""
    pins: Pins = Field(default_factory=Pins)
    """Choices taken away from the controller: `Pins(draft_width=..., window=..., lead=...)`, or a dict."""
    limits: Limits = Field(default_factory=Limits)
    """Bounds: `Limits(max_num_seqs=8)` decodes eight answers in common passes. Or a dict."""
    timeout: float | None = Field(default=None, gt=0)
    """Seconds, queueing included and loading not, after which an answer is aborted with `GenerationTimeoutError`."""
    streaming: bool = False
    """True makes `invoke` report each token to the callbacks, too."""
    max_retries: int | None = None
    """Accepted so that models can be interchanged; without effect."""
    api_key: SecretStr | None = None
    """Accepted so that models can be interchanged; without effect."""

    _lease: EngineLease = PrivateAttr()
    _consumer: Consumer | None = PrivateAttr(default=None)

    # Construction: everything that can be wrong without weights is found here.

    @model_validator(mode="before")
    @classmethod
    def _check_names(cls, values: Any) -> Any:
        known = [*cls.model_fields, "model_name"]
        for name in values:
            if name not in known:
                raise unknown_name(name, values[name], f"is not a field of {cls.__name__}", known)
        return values

    @model_validator(mode="after")
    def _check_values(self) -> Self:
        self._add_version("langchain-card", __version__)
        config = self._engine_config()
        self.sampling_params(None, {})
        ModelStore().check(self.model)
        if self.draft_model is not None and config.has_draft:
            ModelStore().check(self.draft_model, field="draft_model")
        self._lease = EngineLease(config)
        return self

    def _engine_config(self) -> EngineConfig:
        return EngineConfig(**{field.name: getattr(self, field.name) for field in fields(EngineConfig)})

    # The engine's life.

    def load(self) -> Self:
        """Downloads, converts and loads what is not there yet, and holds it until `close()`; returns the model itself.

        With `configurable_fields` LangChain makes a new instance per call: a loaded first one keeps the weights alive.
        """
        self._engine()
        return self

    def close(self) -> None:
        """Gives the engine back; the last user's answers end and the memory is freed. May be called twice."""
        self._lease.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __copy__(self) -> Self:
        copied = super().__copy__()
        copied._lease = EngineLease(self._lease.config)
        return copied

    def _engine(self) -> Engine:
        config = self._engine_config()
        if self._lease.config != config:  # fields were assigned, or changed in a copy
            self._lease = EngineLease(config)
        return self._lease.engine()

    # Answers.

    @override
    def announce(self, count: int) -> None:
        if (engine := self._lease.held) is not None:  # one that is loaded first finds all of them waiting
            engine.announce(count)

    def _prepare(
        self, messages: list[BaseMessage], stop: list[str] | None, options: Mapping[str, Any]
    ) -> tuple[Engine, list[int], SamplingParams]:
        params = self.sampling_params(stop, options)
        conversation = to_conversation(messages, self.model)
        engine = self._engine()
        return engine, encode(conversation, engine.tokenizer, self.model), params

    def _start(self, messages: list[BaseMessage], stop: list[str] | None, options: Mapping[str, Any]) -> Generation:
        return self._submit(*self._prepare(messages, stop, options))

    async def _astart(
        self, messages: list[BaseMessage], stop: list[str] | None, options: Mapping[str, Any]
    ) -> Generation:
        prepared = await asyncio.to_thread(self._prepare, messages, stop, options)
        return self._submit(*prepared)  # on the loop: a cancelled task leaves its thread running

    def _submit(self, engine: Engine, prompt_ids: list[int], params: SamplingParams) -> Generation:
        generation = engine.submit(prompt_ids, params)
        join_group(generation)
        if self._consumer is not None:
            self._consumer.reads(generation)
        return generation

    @override
    def _generate(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> ChatResult:
        generation = self._start(messages, stop, kwargs)
        with consuming(generation, self.timeout):
            generation.result()
            return Answer(generation, self.model).result()

    @override
    async def _agenerate(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> ChatResult:
        generation = await self._astart(messages, stop, kwargs)
        with consuming_in_task(generation, self.timeout):
            await generation.aresult()
            return Answer(generation, self.model).result()

    @override
    def _stream(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> Iterator[ChatGenerationChunk]:
        generation = self._start(messages, stop, kwargs)
        with consuming(generation, self.timeout):
            answer = Answer(generation, self.model)
            for piece in generation:
                chunk = answer.chunk(piece)
                if run_manager is not None:
                    run_manager.on_llm_new_token(chunk.text, chunk=chunk)
                yield chunk
            chunk = answer.last_chunk()
            if run_manager is not None:
                run_manager.on_llm_new_token(chunk.text, chunk=chunk)
            yield chunk

    @override
    async def _astream(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> AsyncIterator[ChatGenerationChunk]:
        generation = await self._astart(messages, stop, kwargs)
        with consuming_in_task(generation, self.timeout):
            answer = Answer(generation, self.model)
            async for piece in generation:
                chunk = answer.chunk(piece)
                if run_manager is not None:
                    await run_manager.on_llm_new_token(chunk.text, chunk=chunk)
                yield chunk
            chunk = answer.last_chunk()
            if run_manager is not None:
                await run_manager.on_llm_new_token(chunk.text, chunk=chunk)
            yield chunk

    @override
    def for_consumer(self, consumer: Consumer) -> Self:
        reader = copy.copy(self)
        reader._lease, reader._consumer = self._lease, consumer
        return reader

    # What LangChain asks besides.

    @override
    def get_token_ids(self, text: str) -> list[int]:
        """Token ids of a text, by the target's tokenizer; loads the model."""
        if self.custom_get_token_ids is not None:
            return self.custom_get_token_ids(text)
        return list(self._engine().tokenizer.encode(text, add_special_tokens=False))

    @override
    def get_num_tokens_from_messages(self, messages: list[BaseMessage], tools: Sequence[Any] | None = None) -> int:
        """Tokens of the prompt that these messages become, chat template included; loads the model."""
        if tools:
            raise InvalidInputError("tools", tools, "tool schemas cannot be counted yet")
        return len(self._prepare(messages, None, {})[1])

    @property
    def _llm_type(self) -> str:
        return "card-chat"

    @property
    def _identifying_params(self) -> dict[str, Any]:
        """What the answer depends on; the draft and the schedule change its speed only."""
        names = ("model", "draft_model", "dtype", "quantization", *SamplingOptions.model_fields)
        return {name: getattr(self, name) for name in names if name != "schedule"}

    @override
    def _get_ls_params(self, stop: list[str] | None = None, **kwargs: Any) -> LangSmithParams:
        params = super()._get_ls_params(stop=stop, **kwargs)
        params["ls_provider"] = "card"
        return params
