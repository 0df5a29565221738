"""`CARDChatModel`: a LangChain chat model over a draft and a target that decode together."""

from __future__ import annotations

import contextlib
import copy
import functools
import time
from collections.abc import AsyncIterator, Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from langchain_core.callbacks import AsyncCallbackManagerForLLMRun, CallbackManagerForLLMRun
from langchain_core.messages import BaseMessage
from langchain_core.outputs import ChatGenerationChunk, ChatResult
from pydantic import ConfigDict, PrivateAttr, model_validator
from typing_extensions import Self, override

from langchain_card import __version__
from langchain_card.chat.answer import Answer, AnswerConsumer, consuming, consuming_in_task
from langchain_card.chat.answer_shape import answer_shape, named_by_user
from langchain_card.chat.batches import Batches, join_group
from langchain_card.chat.error_mapping import answering
from langchain_card.chat.preparation import prepared
from langchain_card.chat.readings import ReportsReadings, areport_readings, report_readings
from langchain_card.chat.reasoning import thinking_of
from langchain_card.chat.structured import ToolsAndSchemas
from langchain_card.constraints.json_schema import ANY_OBJECT
from langchain_card.core.request import SamplingParams
from langchain_card.engine.shared import EngineLeases
from langchain_card.errors import CARDError
from langchain_card.text.prompt import check_size, encode, num_chars, session_of, to_conversation
from langchain_card.text.tool_form import tool_form
from langchain_card.text.tool_grammar import AnswerShape, answer_grammar

if TYPE_CHECKING:
    from langchain_card.engine.engine import Engine


class CARDChatModel(ToolsAndSchemas, Batches, ReportsReadings):
    r"""A local chat model that drafts and verifies at once; its answers are the target model's own.

    ```python
    from langchain_card import CARDChatModel

    model = CARDChatModel()  # a coder: Qwen2.5-Coder 1.5B and its 0.5B
    print(model.invoke("Write a Python function that reverses a list.").content)
    ```

    The default pair is for code. For chats, name a general one, such as `CARDChatModel(model="qwen2.5-1.5b",
    draft_model="qwen2.5-0.5b")`; `langchain-card models recommend` shows which pairs fit a machine.

    Weights are loaded at first use, or by `load()`. Instances with equal models, devices and number formats share one
    engine in a process, whatever their schedule and sampling. An instance releases the engine on `close()`, at the end
    of a `with` block, or when it is garbage; the last one frees the memory. It may be used from many threads and event
    loops.

    A call may override the decoding options: `schedule`, `max_tokens`, `temperature`, `seed`, `stop`, `top_k`, `top_p`,
    `min_p`, the penalties, `logit_bias`, `logprobs`, `top_logprobs`, `tenant`, `session` and `adapter`:
    `model.invoke(messages, temperature=0.7)` or `model.bind(stop=["\n"])`. It may also name other models:
    `model.invoke(messages, model="smollm2-135m", draft_model="ngram")`; they stay loaded until `close()`. An option
    that is None leaves the field's value, except for `draft_model=None`, which is plain decoding.

    Errors of a call are those of `langchain_card.errors`; each is also an instance of one of langchain-core's
    `ModelError`s, such as `ContextOverflowError`.

    Raises:
        pydantic.ValidationError: a field is misspelt or breaks a limit; no weights were loaded.
    """

    model_config = ConfigDict(extra="forbid")  # repeated, because the last base class would decide

    _other_leases: EngineLeases = PrivateAttr(default_factory=EngineLeases)
    _consumer: AnswerConsumer | None = PrivateAttr(default=None)

    # Construction: everything is checked that can be checked without weights.

    @model_validator(mode="after")
    def _check_values(self) -> Self:
        self._add_version("langchain-card", __version__)
        self.sampling_params(None, {})
        self._hold()
        return self

    @override
    def close(self) -> None:
        super().close()
        self._other_leases.close()

    def __copy__(self) -> Self:
        copied = super().__copy__()
        copied._other_leases = EngineLeases()
        return copied

    # Answers.

    @override
    def _announce(self, count: int, options: Mapping[str, Any]) -> None:
        with contextlib.suppress(CARDError):  # each item raises its own error
            self._for_call(options)[0]._lease.announce(count)

    @override
    def _concurrency(self) -> int:
        return max(super()._concurrency(), 2 * self.limits.num_seqs)

    def _for_call(self, options: Mapping[str, Any]) -> tuple[Self, dict[str, Any]]:
        """Return the chat model for a call, this one unless the options name other models, and the other options."""
        rest = dict(options)
        model = rest.pop("model", None) or self.model
        draft = rest.pop("draft_model", self.draft_model)
        if (model, draft) == (self.model, self.draft_model):
            return self, rest
        changes = {"model": model, "draft_model": draft}
        if model != self.model:
            changes |= {"adapters": {}, "adapter": ""}  # they are this model's
        other = self.model_copy(update=changes)
        other._check_models()
        other._lease = self._other_leases.lease(other.engine_config())
        return other, rest

    def _prepare(
        self, messages: list[BaseMessage], stop: list[str] | None, options: Mapping[str, Any]
    ) -> tuple[Engine, list[int], SamplingParams, AnswerShape, float]:
        """Return the engine, the prompt, the sampling parameters, the answer's shape, and the seconds of loading."""
        params = self.sampling_params(stop, options)
        conversation = to_conversation(messages, self.model)
        params = replace(params, session=params.session or session_of(conversation))
        begun = time.perf_counter()
        engine = self._engine()
        load_time = time.perf_counter() - begun
        tokenizer = engine.tokenizer
        check_size(conversation, [options.get("tools"), options.get("response_format")], engine.max_model_len)
        form = tool_form(tokenizer)
        tools, shape = answer_shape(options, form)
        document = None if shape.schema is ANY_OBJECT else shape.schema
        planned = shape.is_free and not form.native
        prompt_ids = encode(conversation, tokenizer, self.model, tools, document, engine.max_model_len, planned=planned)
        thinking = thinking_of(tokenizer, prompt_ids)
        grammar = answer_grammar(shape, form, tokenizer.get_added_vocab(), thinking)
        if grammar:
            stop_strings = params.stop if shape.is_free else ()  # they end text, not documents and calls
            params = replace(params, grammar=grammar, stop=stop_strings)
            with named_by_user(shape):
                engine.grammars.check(grammar, params.max_tokens)  # on this thread, because it may be slow
        return engine, prompt_ids, params, shape, load_time

    def _start(self, messages: list[BaseMessage], stop: list[str] | None, options: Mapping[str, Any]) -> Answer:
        called = time.perf_counter()
        return self._submit(called, *self._prepare(messages, stop, options))

    async def _astart(self, messages: list[BaseMessage], stop: list[str] | None, options: Mapping[str, Any]) -> Answer:
        called = time.perf_counter()
        prepare = functools.partial(self._prepare, messages, stop, options)
        size = num_chars([*map(vars, messages), *options.values()])
        prompt = await prepared(prepare, size, is_loaded=self._lease.held is not None)
        return self._submit(called, *prompt)  # on the loop: the thread of a cancelled task goes on

    def _submit(
        self,
        called: float,
        engine: Engine,
        prompt_ids: list[int],
        params: SamplingParams,
        shape: AnswerShape,
        load_time: float,
    ) -> Answer:
        generation = engine.submit(prompt_ids, params)
        join_group(generation)
        if self._consumer is not None:
            self._consumer.reads(generation)
        return Answer(generation, self._shown_name or self.model, shape, called, load_time)

    @answering
    @override
    def _generate(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> ChatResult:
        answer = self._start(messages, stop, kwargs)
        with consuming(answer.generation, self.timeout):
            report_readings(answer.generation, shown=self._consumer is None)
            answer.generation.result()
            return answer.result()

    @answering
    @override
    async def _agenerate(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> ChatResult:
        answer = await self._astart(messages, stop, kwargs)
        with consuming_in_task(answer.generation, self.timeout):
            await areport_readings(answer.generation, shown=self._consumer is None)
            await answer.generation.aresult()
            return answer.result()

    @answering
    @override
    def _stream(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> Iterator[ChatGenerationChunk]:
        answer = self._start(messages, stop, kwargs)
        with consuming(answer.generation, self.timeout):
            report_readings(answer.generation, shown=self._consumer is None)
            for piece in answer.generation:
                chunk = answer.chunk(piece)
                if run_manager is not None:
                    run_manager.on_llm_new_token(chunk.text, chunk=chunk)
                yield chunk
            chunk = answer.last_chunk()
            if run_manager is not None:
                run_manager.on_llm_new_token(chunk.text, chunk=chunk)
            yield chunk

    @answering
    @override
    async def _astream(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> AsyncIterator[ChatGenerationChunk]:
        answer = await self._astart(messages, stop, kwargs)
        with consuming_in_task(answer.generation, self.timeout):
            await areport_readings(answer.generation, shown=self._consumer is None)
            async for piece in answer.generation:
                chunk = answer.chunk(piece)
                if run_manager is not None:
                    await run_manager.on_llm_new_token(chunk.text, chunk=chunk)
                yield chunk
            chunk = answer.last_chunk()
            if run_manager is not None:
                await run_manager.on_llm_new_token(chunk.text, chunk=chunk)
            yield chunk

    def for_consumer(self, consumer: AnswerConsumer) -> Self:
        """Return a copy, with the same leases, that adds its answers to a consumer."""
        copied = copy.copy(self)
        copied._lease, copied._other_leases, copied._consumer = self._lease, self._other_leases, consumer
        return copied
