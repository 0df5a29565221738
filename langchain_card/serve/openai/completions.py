"""`/v1/completions`: the engine continues a prompt without a chat template."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Sequence
from typing import Any

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse
from langchain_core.messages.ai import UsageMetadata

from langchain_card.chat.answer import AnswerConsumer, consuming_in_task, statistics
from langchain_card.chat.preparation import prepared
from langchain_card.chat_model import CARDChatModel
from langchain_card.core.request import RequestStats, SamplingParams
from langchain_card.engine.generation import Generation
from langchain_card.models.tokenizer import token_bytes
from langchain_card.serve.openai.objects import figures, head, progress, usage
from langchain_card.serve.openai.schemas import STREAMED, CompletionRequest
from langchain_card.serve.parsing import StrictRoute
from langchain_card.serve.service import Exchange, Service
from langchain_card.text.detokenizer import Piece
from langchain_card.text.prompt import check_length


def completion_routes(service: Service) -> APIRouter:
    """Create the route for one application."""
    router = APIRouter(route_class=StrictRoute)

    @router.post("/v1/completions", responses=STREAMED, summary="Continue a text")
    async def completions(body: CompletionRequest, request: Request) -> Response:
        model = service.reader(request, consumer := AnswerConsumer(), body.model, body.session)
        text = Continuation(model, body, consumer)
        if body.stream:
            return await Exchange(service, request, text.stream(), consumer, "prompt").stream(list)
        return JSONResponse(await Exchange(service, request, text.whole(), consumer, "prompt").whole())

    return router


class Continuation:
    """The continuation of one prompt, as OpenAI's objects.

    Args:
        model: the model that answers.
        body: the request.
        consumer: receives the generation once the engine has accepted the request.
    """

    def __init__(self, model: CARDChatModel, body: CompletionRequest, consumer: AnswerConsumer) -> None:
        self._model, self._body, self._consumer = model, body, consumer
        self._head = head("text_completion", "cmpl", body.model)
        self._length = 0  # characters of the text so far
        self._called = time.perf_counter()

    async def whole(self) -> AsyncGenerator[dict[str, Any], None]:
        """Yield the whole text as one object."""
        generation = await self._submit()
        with consuming_in_task(generation, self._model.timeout):
            completion = await generation.aresult()
            choice = self._choice(completion.text, self._logprobs(completion.pieces), completion.finish_reason.value)
            yield {
                **self._head,
                "choices": [choice],
                "usage": _usage(generation, completion.stats),
                **_card(generation, completion.stats, self._called),
            }

    async def stream(self) -> AsyncGenerator[list[dict[str, Any]], None]:
        """Yield the objects of a stream: one for each token that has something to report, then the end."""
        generation, body = await self._submit(), self._body
        include_usage = body.stream_options is not None and body.stream_options.include_usage
        start = {**self._head, "usage": None} if include_usage else self._head
        with consuming_in_task(generation, self._model.timeout):
            async for piece in generation:
                card = {"card": progress([piece], generation.stats)} if body.card and generation.stats else {}
                if piece.text or body.logprobs is not None or card:
                    yield [{**start, "choices": [self._choice(piece.text, self._logprobs([piece]))], **card}]
                else:
                    yield []
            completion = generation.completion()
            card = _card(generation, completion.stats, self._called)
            if body.card:
                card["card"] = {**progress([], completion.stats), **card["card"]}
            end = [{**start, "choices": [self._choice("", None, completion.finish_reason.value)], **card}]
            counts = _usage(generation, completion.stats)
            yield [*end, {**start, "choices": [], "usage": counts}] if include_usage else end

    async def _submit(self) -> Generation:
        prompt_ids, params = await prepared(self._prepare, len(self._body.one_prompt))
        generation = self._model.engine.submit(prompt_ids, params)  # not in the thread: it may be cancelled until here
        self._consumer.reads(generation)
        return generation

    def _prepare(self) -> tuple[Sequence[int], SamplingParams]:
        body, prompt = self._body, self._body.one_prompt
        logprobs = {} if body.logprobs is None else {"logprobs": True, "top_logprobs": body.logprobs}
        params = self._model.sampling_params(body.stop, {**body.options, **logprobs})
        if isinstance(prompt, str):
            engine = self._model.engine
            check_length(prompt, engine.tokenizer, engine.max_model_len)
            prompt = engine.tokenizer.encode(prompt, verbose=False)
        return prompt, params

    def _choice(self, text: str, logprobs: Any, reason: str | None = None) -> dict[str, Any]:
        return {"index": 0, "text": text, "logprobs": logprobs, "finish_reason": reason}

    def _logprobs(self, pieces: Sequence[Piece]) -> dict[str, Any] | None:
        """Return log-probabilities in the form of OpenAI's older interface; offsets count characters of the text."""
        if self._body.logprobs is None:
            return None
        columns: dict[str, list[Any]] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
        for piece in pieces:
            if piece.logprob is not None:
                columns["tokens"].append(self._token(piece.token_id))
                columns["token_logprobs"].append(piece.logprob.logprob)
                columns["top_logprobs"].append({self._token(token): logprob for token, logprob in piece.logprob.top})
                columns["text_offset"].append(self._length)
            self._length += len(piece.text)
        return columns

    def _token(self, token_id: int) -> str:
        return token_bytes(self._model.engine.tokenizer, token_id).decode(errors="replace")


def _usage(generation: Generation, stats: RequestStats) -> dict[str, Any] | None:
    num_prompt = len(generation.request.prompt_ids)
    counts = UsageMetadata(
        input_tokens=num_prompt,
        output_tokens=stats.output_tokens,
        total_tokens=num_prompt + stats.output_tokens,
        input_token_details={"cache_read": stats.cached_tokens},
    )
    return usage(counts)


def _card(generation: Generation, stats: RequestStats, called: float) -> dict[str, Any]:
    return figures(statistics(stats, generation.request.params, called))
