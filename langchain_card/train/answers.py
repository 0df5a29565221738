"""Answers of the target, recorded with their states."""

from __future__ import annotations

import itertools
import logging
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from langchain_card import plugins
from langchain_card.config import EngineConfig
from langchain_card.core.messages import Proposal
from langchain_card.core.request import Request, SamplingParams
from langchain_card.engine.engine import Engine
from langchain_card.engine.generation import Generation
from langchain_card.errors import InvalidInputError
from langchain_card.ports import Budget, Setting
from langchain_card.text.prompt import encode
from langchain_card.train.loop import Bounds
from langchain_card.train.prompts import Conversation, beginning_of_question, question_in
from langchain_card.train.record import RecordedText, Recorder
from langchain_card.train.shards import ShardWriter

log = logging.getLogger(__name__)

RECORD = "record"
"""Name of the plug-in that records."""

MAX_ANSWER = 256
"""Tokens of an answer."""

MAX_QUESTION = 120
"""Tokens of a question that the target writes."""

CHOICES = 100
"""Likeliest tokens among which a question's next one is drawn; a nucleus of the vocabulary takes as long as a pass."""

PENDING = 2
"""Requests that are submitted for each seat of the engine."""

LEAST_ANSWER = 8
"""Tokens of an answer; shorter ones are dropped."""

TRIES = 100
"""Questions after which recording gives up if all were fragments."""


class RecordingDrafter:
    """A drafter that proposes nothing, so that the engine records what it reads and writes.

    Args:
        setting: of the engine.
        make: makes the recorder.
    """

    name = RECORD
    paced = False
    reads_target = True

    def __init__(self, setting: Setting, make: Callable[[], Recorder]) -> None:
        assert setting.target is not None
        setting.target.read(self.name, lambda model: make())

    def begin(self, request: Request, output_ids: Sequence[int]) -> None:
        """Do nothing."""

    def correct(self, request_id: int, start: int, token_ids: Sequence[int]) -> None:
        """Do nothing."""

    def step(self, budgets: Sequence[Budget]) -> list[Proposal]:
        """Propose nothing."""
        return []

    def end(self, request_id: int) -> None:
        """Do nothing."""

    def close(self) -> None:
        """Do nothing."""


def record_answers(
    config: EngineConfig,
    taps: Sequence[int],
    writer: ShardWriter,
    prompts: Iterator[Conversation] | None,
    bounds: Bounds,
    report: Callable[[float, int], None] = lambda seconds, num_tokens: None,
) -> float:
    """Let the target answer prompts until the bounds are reached, or the room on the disk or the prompts are used up.

    Args:
        config: of the target; it has no draft.
        taps: layers whose states are kept.
        writer: takes the texts.
        prompts: to be answered; None for those that the target writes itself.
        bounds: of the time, and of the tokens in all shards.
        report: called after each answer with the seconds that it took so far, and the tokens that there are.

    Returns:
        The seconds that it took.

    Raises:
        InvalidInputError: the target writes no questions.
    """
    begun, seeds, texts = time.monotonic(), itertools.count(writer.num_tokens), deque[RecordedText]()
    beginning: tuple[int, ...] = ()
    recorder = Recorder(taps, texts.append)

    def keep() -> None:
        """Keep the answers that have ended. Files are not written on the target's thread."""
        while texts:
            text = texts.popleft()
            if text.prompt_ids != beginning and len(text.token_ids) - text.num_prompt >= LEAST_ANSWER:
                writer.add(text)

    plugins.register("drafters", RECORD, _factory(recorder))
    try:
        with Engine(replace(config, draft_model=RECORD, drafters=())) as engine:
            if prompts is None:
                beginning = beginning_of_question(engine.tokenizer)
            pending, questions, usable = deque[Generation](), 0, 0
            seats = PENDING * engine.config.limits.num_seqs
            while bounds.share(spent := time.monotonic() - begun, writer.num_tokens) < 1 and not writer.is_full:
                report(spent, writer.num_tokens)
                while len(pending) < seats and (more := _next(engine, prompts, beginning, next(seeds))) is not None:
                    pending.append(more)
                if not pending:
                    break
                first = pending.popleft()
                done = first.result()
                keep()
                if first.request.prompt_ids == beginning:
                    questions += 1
                    if (found := question_in(done)) is not None:
                        usable += 1
                        pending.append(_answer(engine, found, next(seeds)))
                    elif questions == TRIES and not usable:
                        limit = f"the target was to write questions, and {TRIES} of {TRIES} were fragments"
                        raise InvalidInputError("--data", "self", limit, "give prompts: --data FILE")
    finally:
        plugins.unregister("drafters", RECORD)
        recorder.close()
        keep()
        writer.flush()
    return time.monotonic() - begun


def _next(
    engine: Engine, prompts: Iterator[Conversation] | None, beginning: Sequence[int], seed: int
) -> Generation | None:
    """Submit the next question, or the next prompt that the engine takes; return None if there are no more."""
    if prompts is None:
        return _write_question(engine, beginning, seed)
    for prompt in prompts:
        try:
            return _answer(engine, prompt, seed)
        except InvalidInputError as error:  # noqa: PERF203 - the next one is tried
            log.warning("a prompt is left out: %s", error)
    return None


def _write_question(engine: Engine, beginning: Sequence[int], seed: int) -> Generation:
    """Submit the beginning of a question, which the target is to write (Magpie, arXiv 2406.08464)."""
    params = SamplingParams(
        max_tokens=MAX_QUESTION, temperature=1.0, top_k=CHOICES, seed=seed, schedule="plain", tenant=f"question {seed}"
    )
    return engine.submit(beginning, params)


def _answer(engine: Engine, prompt: Conversation, seed: int) -> Generation:
    """Submit a prompt. Every other answer is greedy; each is a tenant, so that its whole text is read.

    Raises:
        InvalidInputError: the chat template refuses it, or there is no room for an answer.
    """
    room = engine.max_model_len - engine.config.limits.max_window - MAX_ANSWER
    prompt_ids = encode(prompt, engine.tokenizer, engine.config.model, max_len=room)
    if len(prompt_ids) > room:
        raise InvalidInputError("prompt", f"{len(prompt_ids):,} tokens", f"leaves no room: {room:,} are the most")
    params = SamplingParams(
        max_tokens=MAX_ANSWER,
        temperature=0.7 * (seed % 2),
        top_k=CHOICES,
        seed=seed,
        schedule="plain",
        tenant=f"answer {seed}",
    )
    return engine.submit(prompt_ids, params)


def _factory(recorder: Recorder) -> Any:
    """Return a factory of the plug-in, with the attributes of its class."""

    class Recording(RecordingDrafter):
        def __init__(self, setting: Setting) -> None:
            super().__init__(setting, lambda: recorder)

    return Recording
