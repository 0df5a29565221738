"""Prompts for tiny models, the answers of the plain loop over transformers, and engines over the same models."""

from __future__ import annotations

import atexit
import contextlib
import functools
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch

from langchain_card import plugins
from langchain_card.config import EngineConfig, Schedule
from langchain_card.constraints.compiler import Grammars
from langchain_card.core.request import Request, SamplingParams
from langchain_card.engine.engine import Engine
from langchain_card.engine.generation import Completion
from langchain_card.limits import Limits, Pins
from langchain_card.models.tokenizer import read_tokenizer
from langchain_card.ports import Drafter, Setting
from langchain_card.runtime.threads import single_threaded
from langchain_card.testing import naive, tiny
from langchain_card.testing.tokenizer import byte_tokenizer

ARCHS = ("llama", "qwen2", "gemma2")
NAME = "under-test"
"""Name of the tested plug-in in the engine's configuration."""

MAX_LEN = 256
LIMITS = Limits(max_num_seqs=4, max_queue=1024, restart_seconds=0.01, max_ngram_bytes=65_536)
EOS = (256,)
LETTERS = "abcdef"
LETTER_IDS: tuple[int, ...] = tuple(byte_tokenizer()(LETTERS).input_ids)
ONLY_LETTERS = tuple((token, 100.0) for token in LETTER_IDS)
"""A bias that leaves no chance to other tokens. Texts of so few symbols repeat themselves, so drafters find matches."""


class PromptCase(NamedTuple):
    """A prompt, and the sampling parameters of its answer."""

    prompt_ids: tuple[int, ...]
    params: SamplingParams


class Text(NamedTuple):
    """A request and the target's own answer."""

    request: Request
    answer: tuple[int, ...]


@functools.cache
def folder(arch: str, what: str = "target") -> str:
    """Return the folder of a tiny random model; `what="draft"` is a draft that agrees with it in part."""
    home = _home() / arch
    if what == "draft":
        return tiny.make_draft(folder(arch), home / what, noise=0.02)
    return tiny.make_target(arch, home / what)


@functools.cache
def _home() -> Path:
    home = Path(tempfile.mkdtemp(prefix="conformance-"))
    atexit.register(shutil.rmtree, home, ignore_errors=True)
    return home


@functools.cache
def model(arch: str) -> Any:
    """Load the tiny model with transformers, in float64."""
    return naive.load(folder(arch), torch.float64)


@functools.cache
def answer(arch: str, case: PromptCase) -> tuple[int, ...]:
    """Return the plain loop's answer. It has no grammars: with one, the answer of an engine without drafters."""
    if case.params.grammar:
        with Engine(EngineConfig(folder(arch), None, dtype="float64", max_model_len=MAX_LEN)) as engine:
            return engine.submit(case.prompt_ids, case.params).result().token_ids
    with single_threaded():
        return tuple(naive.generate(naive.reading(model(arch)), *case, EOS).token_ids)


def encode(text: str) -> tuple[int, ...]:
    """Encode a text, a token for each byte."""
    return tuple(byte_tokenizer()(text).input_ids)


@functools.cache
def cases(arch: str, grammar: str = "", max_tokens: int = 32) -> tuple[PromptCase, ...]:
    """Return prompts that repeat themselves and others; greedy and sampled, with and without penalties."""
    letters = "".join(LETTERS[(i * i + i // 5) % len(LETTERS)] for i in range(40))
    few: dict[str, Any] = {} if grammar else {"logit_bias": ONLY_LETTERS}
    penalties: dict[str, Any] = {"repetition_penalty": 1.2, "frequency_penalty": 0.3, "top_k": 40}
    kinds: list[tuple[str, dict[str, Any]]] = [
        ("def add(a, b):\n    return a + b\n\ndef add(", {}),
        (letters, few),
        (letters, {**few, "temperature": 1.0, "seed": 1}),
        (letters[::-1], {**few, "temperature": 0.6, "seed": 2, "top_p": 0.9}),
        ("the quick brown fox; the quick brown", {"temperature": 0.8, "seed": 3}),
        ("x" * 60, {**penalties, "temperature": 0.7, "seed": 4}),
    ]
    all_cases = [
        PromptCase(encode(prompt), SamplingParams(max_tokens=max_tokens, grammar=grammar, **options))
        for prompt, options in kinds
    ]
    repetitive = all_cases[1]
    begun = () if grammar else answer(arch, repetitive)  # the answer repeats what the model wrote before
    return (*all_cases, PromptCase((*repetitive.prompt_ids, *begun), repetitive.params))


def texts(grammar: str = "") -> list[Text]:
    """Return requests, numbered from 1, with the answers of the first tiny model."""
    all_cases = cases(ARCHS[0], grammar, 48)
    return [Text(Request(i, *case, EOS), answer(ARCHS[0], case)) for i, case in enumerate(all_cases, 1)]


def setting() -> Setting:
    """Return the setting of an engine over the first tiny model."""
    tokenizer = read_tokenizer(Path(folder(ARCHS[0])))
    grammars = Grammars(tokenizer, tiny.VOCAB, EOS, LIMITS)
    return Setting(tiny.VOCAB, MAX_LEN, LIMITS.num_seqs, EOS, tokenizer, grammars.start, LIMITS)


@dataclass
class Factory:
    """Makes the tested drafter, perhaps wrapped, and has the attributes that an engine reads from a drafter's class.

    Attributes:
        make: makes a drafter.
        made: drafters made so far.
    """

    make: Callable[[Setting], Drafter]
    name: str
    paced: bool
    of_grammars: bool = False
    from_model: bool = False
    reads_target: bool = False
    made: int = 0

    def __call__(self, setting: Setting) -> Drafter:
        """Make a drafter."""
        self.made += 1
        return self.make(setting)


@contextlib.contextmanager
def running(arch: str, factory: Factory | None = None, **options: Any) -> Iterator[Engine]:
    """Run an engine that wants all candidates of a drafter and verifies them, whatever that costs.

    Args:
        arch: of the target.
        factory: of the drafter; None if `draft_model` in the options names it.
        options: of `EngineConfig`.
    """
    if factory is not None:
        plugins.register("drafters", NAME, factory)
    pins = Pins(draft_width=4, window=LIMITS.max_window, lead=4)
    usual = {"dtype": "float64", "drafters": (), "max_model_len": MAX_LEN, "limits": LIMITS, "pins": pins}
    try:
        with Engine(EngineConfig(folder(arch), **{"draft_model": NAME, **usual, **options})) as engine:
            assert factory is None or factory.made, "the engine made another drafter instead of the tested one"
            yield engine
    finally:
        plugins._registered.pop(("drafters", NAME), None)


def answers(engine: Engine, cases: Sequence[PromptCase], schedule: Schedule) -> list[Completion]:
    """Submit all cases at once; return their completions."""
    generations = [engine.submit(case.prompt_ids, replace(case.params, schedule=schedule)) for case in cases]
    return [generation.result() for generation in generations]
