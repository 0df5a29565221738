"""Answers of the target, recorded with their states."""

from __future__ import annotations

import itertools
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
from langchain_card.train.loop import Bounds
from langchain_card.train.prompts import beginning_of_question, question_in
from langchain_card.train.record import RecordedText, Recorder
from langchain_card.train.shards import ShardWriter

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

Prompt = str | list[dict[str, Any]]


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
    prompts: Iterator[Prompt] | None,
    bounds: Bounds,
    report: Callable[[float, int], None] = lambda seconds, num_tokens: None,
) -> None:
    """Let the target answer prompts until the bounds are reached, or the room on the disk or the prompts are used up.

    Args:
        config: of the target; it has no draft.
        taps: layers whose states are kept.
        writer: takes the texts.
        prompts: to be answered; None for those that the target writes itself.
        bounds: of the time, and of the tokens in all shards.
        report: called after each answer with the seconds that it took so far, and the tokens that there are.

    Raises:
        InvalidInputError: the target writes no questions.
    """
    begun, seeds = time.monotonic(), itertools.count(writer.num_tokens)
    beginning: tuple[int, ...] = ()

    def take(text: RecordedText) -> None:
        if text.prompt_ids != beginning and len(text.token_ids) - text.num_prompt >= LEAST_ANSWER:
            writer.add(text)

    recorder = Recorder(taps, take)
    plugins.register("drafters", RECORD, _factory(recorder))
    with Engine(replace(config, draft_model=RECORD, drafters=())) as engine:
        if prompts is None:
            beginning = beginning_of_question(engine.tokenizer)
        pending, asked, answered = deque[Generation](), 0, 0
        while bounds.share(spent := time.monotonic() - begun, writer.num_tokens) < 1 and not writer.is_full:
            while len(pending) < PENDING * config.limits.num_seqs:
                if prompts is None:
                    pending.append(_ask(engine, beginning, next(seeds)))
                elif (prompt := next(prompts, None)) is not None:
                    pending.append(_answer(engine, prompt, next(seeds)))
                else:
                    break
            if not pending:
                break
            first = pending.popleft()
            done = first.result()
            if first.request.prompt_ids == beginning:
                asked += 1
                if (question := question_in(done)) is not None:
                    pending.append(_answer(engine, question, next(seeds)))
                    answered += 1
                elif asked == TRIES and not answered:
                    limit = f"the target was to write questions, and {TRIES} of {TRIES} were fragments"
                    raise InvalidInputError("--data", "self", limit, "give prompts: --data FILE")
            report(spent, writer.num_tokens)
    recorder.close()
    writer.flush()


def _ask(engine: Engine, beginning: Sequence[int], seed: int) -> Generation:
    """Submit the beginning of a question, which the target is to write (Magpie, arXiv 2406.08464)."""
    params = SamplingParams(
        max_tokens=MAX_QUESTION, temperature=1.0, top_k=CHOICES, seed=seed, schedule="plain", tenant=f"question {seed}"
    )
    return engine.submit(beginning, params)


def _answer(engine: Engine, prompt: Prompt, seed: int) -> Generation:
    """Submit a prompt. Every other answer is greedy; each is a tenant, so that its whole text is read."""
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    text = engine.tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    params = SamplingParams(
        max_tokens=MAX_ANSWER,
        temperature=0.7 * (seed % 2),
        top_k=CHOICES,
        seed=seed,
        schedule="plain",
        tenant=f"answer {seed}",
    )
    return engine.submit(engine.tokenizer(text, add_special_tokens=False).input_ids, params)


def _factory(recorder: Recorder) -> Any:
    """Return a factory of the plug-in, with the attributes of its class."""

    class Recording(RecordingDrafter):
        def __init__(self, setting: Setting) -> None:
            super().__init__(setting, lambda: recorder)

    return Recording
