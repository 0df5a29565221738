"""`langchain-card chat`: a conversation on the command line. `--demo` shows and times the schedules instead."""

from __future__ import annotations

import argparse
import contextlib
import re
import secrets
import signal
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from langchain_card.cli.fields import add_drafter_fields, add_engine_fields, drafter_fields, engine_fields
from langchain_card.config import SCHEDULES, EngineConfig
from langchain_card.core.request import FinishReason, RequestStats, SamplingParams
from langchain_card.errors import InvalidInputError

if TYPE_CHECKING:
    from langchain_card.cli.render import Screen
    from langchain_card.engine.engine import Engine
    from langchain_card.engine.generation import Completion, Generation
    from langchain_card.ports import Observer

MAX_TOKENS = 512
DEMO_TOKENS = 144
HELP = """\
/stats   the last answer's statistics, and totals
/reset   forget the conversation
/quit    leave, like ctrl-d
ctrl-c   stops an answer; what was said is kept"""


QUIT = ("/quit", "/exit", "quit", "exit")
"""Lines that end the chat."""


def register(subparsers: Any) -> None:
    """Add `chat` and its options."""
    parser = subparsers.add_parser("chat", help="talk to a model; --demo shows what speculation gains here")
    parser.add_argument("--demo", action="store_true", help="answer one question live, then compare all schedules")
    add_engine_fields(parser)
    add_drafter_fields(parser)
    parser.add_argument("--schedule", default="auto", choices=SCHEDULES, help="of the streamed answers (%(default)s)")
    parser.add_argument("--max-tokens", type=int, help=f"of one answer ({MAX_TOKENS}; {DEMO_TOKENS} with --demo)")
    greedy = "0 takes the likeliest token (%(default)s)"
    parser.add_argument("--temperature", type=float, default=SamplingParams().temperature, help=greedy)
    parser.add_argument("--seed", type=int, help="of the noise at a temperature above 0 (drawn, see /stats)")
    parser.add_argument("--system", metavar="TEXT", help="system message")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Chat until the user leaves. Return 0, or 1 if the demo's answers differ."""
    config = EngineConfig(**engine_fields(args), **drafter_fields(args))
    default = DEMO_TOKENS if args.demo else MAX_TOKENS
    max_tokens = default if args.max_tokens is None else args.max_tokens
    seed = args.seed if args.seed is not None else secrets.randbelow(2**31)
    params = SamplingParams(max_tokens=max_tokens, temperature=args.temperature, seed=seed, schedule=args.schedule)
    params.check(config.limits)
    opening = [{"role": "system", "content": args.system}] if args.system else []
    return (_run_demo if args.demo else _run_chat)(config, params, opening)


def _run_chat(config: EngineConfig, params: SamplingParams, opening: list[dict[str, str]]) -> int:
    from langchain_card.cli.render import Screen

    screen = Screen()
    with load(screen, config) as engine:
        Chat(engine, screen, params, opening).run()
    return 0


def _run_demo(config: EngineConfig, params: SamplingParams, opening: list[dict[str, str]]) -> int:
    from langchain_card.cli import demo
    from langchain_card.cli.render import Screen

    return demo.run(Screen(), config, params, opening)


def load(screen: Screen, config: EngineConfig, observe: Observer | None = None) -> Engine:
    """Download the models if needed and load them, showing progress; the engine reports to `observe`."""
    from langchain_card.chat.progress import ConsoleProgress
    from langchain_card.engine.garbage import rare_collections

    with rare_collections:
        with screen.waiting("loading torch and transformers"):
            from transformers.utils import logging

            from langchain_card.engine.engine import Engine

        logging.set_verbosity_error()
        logging.disable_progress_bar()
        with ConsoleProgress() as progress:
            engine = Engine(config, progress=progress, observe=observe)
            engine.warm_up(progress)
            return engine


@contextlib.contextmanager
def stopping_on_interrupt(generation: Generation) -> Iterator[None]:
    """Abort the answer at ctrl-c; a second ctrl-c raises `KeyboardInterrupt`."""

    def stop(*_: object) -> None:
        signal.signal(signal.SIGINT, before)
        generation.abort()

    before = signal.signal(signal.SIGINT, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


class Chat:
    """A conversation on the command line.

    Args:
        engine: the engine that answers; the caller closes it.
        screen: the output.
        params: sampling parameters of every answer.
        opening: messages that every conversation begins with.
    """

    def __init__(self, engine: Engine, screen: Screen, params: SamplingParams, opening: list[dict[str, str]]) -> None:
        self._engine, self._screen, self._params, self._opening = engine, screen, params, opening
        self._messages = list(opening)
        self._answers: list[RequestStats] = []
        self._context = 0
        self._interactive = screen.console.is_terminal and sys.stdin.isatty()

    def run(self) -> None:
        """Read and execute questions and commands until the user leaves."""
        if self._interactive:
            with contextlib.suppress(ImportError):
                import readline  # noqa: F401 - adds history and line editing to input()
            self._screen.note(f"{describe(self._engine)}. /help lists commands.\n")
        while (line := self._read()) is not None and line not in QUIT:
            if line == "/help":
                self._screen.print(HELP)
            elif line == "/stats":
                self._screen.print(self._stats())
            elif line == "/reset":
                self._messages, self._context = list(self._opening), 0
                self._screen.note("The conversation is forgotten.")
            elif re.fullmatch(r"/\w+", line):
                self._screen.note(f"There is no command {line}; /help lists them.")
            elif line:
                self._answer(line)

    def _read(self) -> str | None:
        """Return the next line; None at the end of the input or at ctrl-c."""
        try:
            if self._interactive:
                return input("> ").strip()
            line = sys.stdin.readline()
            return line.strip() if line else None
        except (EOFError, KeyboardInterrupt):
            self._screen.note("")
            return None

    def _answer(self, text: str) -> None:
        from langchain_card.text.prompt import encode

        question, model = {"role": "user", "content": text}, self._engine.config.model
        try:
            tokenizer, max_len = self._engine.tokenizer, self._engine.max_model_len
            prompt_ids = encode([*self._messages, question], tokenizer, model, max_len=max_len)
            generation = self._engine.submit(prompt_ids, self._params)
        except InvalidInputError as error:
            self._screen.fail(error)
            return
        with stopping_on_interrupt(generation):
            self._screen.stream(generation)
            completion = generation.result()
        self._messages += [question, {"role": "assistant", "content": completion.text}]
        self._answers.append(completion.stats)
        self._context = len(prompt_ids) + len(completion.token_ids)
        self._print_end(completion, generation.request.params.max_tokens)

    def _print_end(self, completion: Completion, max_tokens: int) -> None:
        """Print the line below an answer: its speed, and why it ended unless it is complete."""
        from langchain_card.cli.render import status

        reasons = {FinishReason.ABORT: "stopped", FinishReason.LENGTH: f"cut at {max_tokens} tokens"}
        reason = reasons.get(completion.finish_reason, "")
        if self._interactive:
            self._screen.note(status(completion.stats) + (f"\n{reason}\n" if reason else "\n"))
        elif reason:
            self._screen.note(f"langchain-card: {reason}")

    def _stats(self) -> str:
        from langchain_card.cli.render import name_of, status

        if not self._answers:
            return "no answer yet"
        last = self._answers[-1]
        by_source = {**last.accepted_by_source, "": last.output_tokens - sum(last.accepted_by_source.values())}
        origins = ", ".join(f"{count} {name_of(source)}" for source, count in by_source.items())
        tokens = sum(stats.output_tokens for stats in self._answers)
        seconds = sum(stats.ended - stats.submitted for stats in self._answers)
        schedule = last.schedule + (f", seed {self._params.seed}" if not self._params.greedy else "")
        return (
            f"last answer  {status(last)}\n"
            f"             {origins}\n"
            f"             first token after {last.first_token - last.submitted:.1f} s, schedule {schedule}\n"
            f"context      {self._context:,} of {self._engine.max_model_len:,} tokens\n"
            f"all answers  {len(self._answers)}, {tokens:,} tokens in {seconds:.1f} s"
        )


def describe(engine: Engine) -> str:
    """Describe the models and their devices in one line."""
    draft = {None: "no draft", "ngram": "n-gram lookup"}.get(engine.config.draft_model, engine.config.draft_model)
    device = engine.devices["target"]
    draft_device = engine.devices.get("draft", device)
    text = f"{engine.config.model} on {device}, with {draft}"
    return text if draft_device == device else f"{text} on {draft_device}"
