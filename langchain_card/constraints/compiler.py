"""`Grammars`: the grammars of an engine, checked within bounds, compiled once and kept."""

from __future__ import annotations

import logging
import os
import re
import subprocess
import sys
import threading
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from langchain_card.config import Limits
from langchain_card.constraints.ending import Vocabulary
from langchain_card.constraints.hints import hints_of, patterns_of
from langchain_card.constraints.matcher import Matcher
from langchain_card.errors import InvalidInputError, UnsupportedModelError

log = logging.getLogger(__name__)

_CHECK = """
import sys
sys.path.pop(0)  # the working folder
try:
    import resource
    most = resource.getrlimit(resource.RLIMIT_AS)[1]
    bound = int(sys.argv[1]) if most == resource.RLIM_INFINITY else min(int(sys.argv[1]), most)
    resource.setrlimit(resource.RLIMIT_AS, (bound, most))
except (ImportError, ValueError, OSError):
    pass  # the time is bounded all the same
from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper
class Bytes:
    eos_token_id, bos_token_id = 256, None
    tokens = [bytes([byte]) for byte in range(256)] + [token.encode() for token in ["<eos>", *sys.argv[2:]]]
    special_token_ids = list(range(256, len(tokens)))
    def __call__(self, text):
        return list(text)
limits = LLParserLimits(verbose_errors=False)
tokenizer = LLTokenizer(TokenizerWrapper(Bytes()))
matcher = LLMatcher(tokenizer, sys.stdin.buffer.read().decode(), log_level=0, limits=limits)
if not matcher.is_error():
    matcher.compute_bitmask()
sys.stdout.buffer.write(matcher.get_error().encode())
"""
"""Run in a process of its own: what makes the compiler crash, run on and on, or out of memory, ends with it."""

_CHECK_BYTES = 2 << 30

_OF_PATTERN = '%llguidance {{}}\nstart: %json {{"type": "string", "pattern": {}}}\n'

_OWN_BYTES = 100_000
"""Of a compiled grammar beside its text, about (docs/LOG.md)."""


@dataclass(frozen=True, slots=True)
class _Compiled:
    matcher: Matcher  # nothing was said
    shortest: int  # tokens
    size: int  # bytes


class Grammars:
    """Makes constraints of grammars, in the Lark form that llguidance reads. Usable from any thread.

    Args:
        tokenizer: of transformers, with a `tokenizers` backend.
        vocab_size: token ids at and above it never come.
        eos_ids: tokens that end an answer.
        limits: bounds.
    """

    def __init__(self, tokenizer: Any, vocab_size: int, eos_ids: Sequence[int], limits: Limits) -> None:
        self._tokenizer, self._vocab_size, self._eos_ids = tokenizer, vocab_size, list(eos_ids)
        self._limits = limits
        self._lock, self._reading = threading.Lock(), threading.Lock()
        self._vocabulary: Vocabulary | None = None
        self._being_checked: dict[str, Future[_Compiled]] = {}
        self._compiled: OrderedDict[str, _Compiled] = OrderedDict()  # in the order of use

    def check(self, grammar: str, max_tokens: int) -> None:
        """Compiles a grammar that is not known, so that `start` has it at hand.

        Raises:
            InvalidInputError: as `shortest` does, or `max_tokens` is below what it says.
        """
        if max_tokens < (shortest := self.shortest(grammar)):
            limit = f"the shortest answer of this form takes {shortest:,} tokens"
            hint = "leave room for more: that one holds empty texts"
            raise InvalidInputError("max_tokens", max_tokens, limit, hint)

    def shortest(self, grammar: str) -> int:
        """Tokens of the shortest text that was found, the end of text left out.

        Raises:
            InvalidInputError: the grammar is too large, takes too long, or is none.
        """
        if known := self._find(grammar):
            return known.shortest
        try:
            size, most = len(grammar.encode()), self._limits.max_grammar_bytes
        except UnicodeEncodeError as error:
            raise InvalidInputError("grammar", grammar, f"must be text ({error.reason})") from error
        if size > most:
            raise InvalidInputError("grammar", f"{size:,} bytes", f"at most {most:,} bytes", "ask for less")
        return self._check_once(grammar).shortest

    def _check_once(self, grammar: str) -> _Compiled:
        """Many threads of a batch bring the same one: they have the first one's result, or its error."""
        with self._lock:
            found = self._being_checked.get(grammar)
            if found is None:
                own = self._being_checked[grammar] = Future[_Compiled]()
        if found is not None:
            return found.result()
        try:
            vocabulary = self._known_vocabulary()
            self._validate(grammar)
            own.set_result(self._compile(grammar, vocabulary))
        except BaseException as error:
            own.set_exception(error)
        finally:
            with self._lock:
                del self._being_checked[grammar]
        return own.result()

    def start(self, grammar: str) -> Matcher:
        """The state in which nothing was said, of a grammar that was checked."""
        known = self._find(grammar) or self._compile(grammar, self._known_vocabulary())
        return known.matcher.fork()

    def _find(self, grammar: str) -> _Compiled | None:
        with self._lock:
            if grammar in self._compiled:
                self._compiled.move_to_end(grammar)
            return self._compiled.get(grammar)

    def _compile(self, grammar: str, vocabulary: Vocabulary) -> _Compiled:
        matcher = self._matcher(grammar, vocabulary)
        ending = matcher.closing(0)
        hint = "ask for less: shorter patterns, fewer items"
        if ending is None:
            raise InvalidInputError("grammar", grammar, "no text was found that satisfies it", hint)
        for pattern in patterns_of(grammar):  # of parts that the shortest text does without
            if self._matcher(_OF_PATTERN.format(pattern), vocabulary).closing(sys.maxsize) is None:
                raise InvalidInputError("pattern", pattern, "no text was found that satisfies it", hint)
        compiled = _Compiled(matcher, len(ending), len(grammar.encode()) + _OWN_BYTES)
        with self._lock:
            self._compiled[grammar] = compiled
            left = self._limits.max_grammar_cache_bytes - sum(kept.size for kept in self._compiled.values())
            while left < 0 and len(self._compiled) > 1:
                left += self._compiled.popitem(last=False)[1].size
        return compiled

    def _matcher(self, grammar: str, vocabulary: Vocabulary) -> Matcher:
        from llguidance import LLMatcher, LLParserLimits

        limits = LLParserLimits(verbose_errors=False)
        found = LLMatcher(vocabulary.tokenizer, grammar, log_level=0, limits=limits)
        if found.is_error():
            raise InvalidInputError("grammar", grammar, f"cannot be compiled: {_reason(found.get_error())}")
        return Matcher(vocabulary, found, hints_of(grammar))

    def _validate(self, grammar: str) -> None:
        seconds = self._limits.max_grammar_seconds
        control = [token for token in self._tokenizer.get_added_vocab() if token in grammar]
        command = [sys.executable, "-c", _CHECK, str(_CHECK_BYTES), *control]
        env = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        try:
            done = subprocess.run(  # noqa: S603 - the grammar is its input
                command, input=grammar.encode(), env=env, capture_output=True, timeout=seconds, check=False
            )
        except subprocess.TimeoutExpired:
            hint = "ask for less: shorter patterns, fewer alternatives, smaller counts"
            limit = f"takes more than {seconds:g} seconds to compile"
            raise InvalidInputError("grammar", grammar, limit, hint) from None
        if done.returncode:
            words = done.stderr.decode(errors="replace").strip()
            log.warning("the check of a grammar ended with %d: %s", done.returncode, words)
            if "ImportError" in words or "ModuleNotFoundError" in words:
                hint = f"{sys.executable} must be able to import it"
                raise InvalidInputError(
                    "grammar", "...", "the process that checks it lacks the package llguidance", hint
                )
            raise InvalidInputError("grammar", grammar, "the compiler of grammars fails with it", "ask for less")
        if problem := done.stdout.decode():
            raise InvalidInputError("grammar", grammar, f"cannot be compiled: {_reason(problem)}")

    def _known_vocabulary(self) -> Vocabulary:
        with self._reading:
            if self._vocabulary is None:
                self._vocabulary = self._read_vocabulary()
            return self._vocabulary

    def _read_vocabulary(self) -> Vocabulary:
        try:
            from llguidance import LLTokenizer
        except ImportError as error:
            hint = "pip install 'langchain-card[structured]'"
            raise InvalidInputError("grammar", "...", "needs the package llguidance", hint) from error
        text, eos_ids = self._tokenizer.backend_tokenizer.to_str(), self._eos_ids
        try:
            known = [token for token in eos_ids if token < len(self._tokenizer)]  # heads may be padded
            return Vocabulary.of(LLTokenizer(text, n_vocab=self._vocab_size, eos_token=known))
        except ValueError as error:
            limit = f"grammars cannot be read with it ({error})"
            raise UnsupportedModelError("tokenizer", type(self._tokenizer).__name__, limit) from error


def _reason(problem: str) -> str:
    """What llguidance says, without the lines of the grammar that it repeats, and where they are."""
    said = re.split(r"\n +\d+ \|", problem, maxsplit=1)[0].strip()
    return re.sub(r"^at \d+\(\d+\): (failed to compile JSON schema: )?", "", said)[:500]
