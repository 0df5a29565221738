"""`Grammars`: the grammars of an engine, checked and compiled within bounds. `Matcher`: the state of one grammar."""

from __future__ import annotations

import itertools
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
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from typing_extensions import Self

from langchain_card.constraints.ending import ATTEMPTS, Vocabulary, find_ending
from langchain_card.constraints.hints import Hint, hints_of, patterns_of
from langchain_card.errors import InvalidInputError, UnsupportedModelError
from langchain_card.limits import Limits

if TYPE_CHECKING:
    from llguidance import LLMatcher

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
"""Script of a checking process, which contains crashes, endless runs and lack of memory of the compiler."""

_CHECK_BYTES = 2 << 30

_OF_PATTERN = '%llguidance {{}}\nstart: %json {{"type": "string", "pattern": {}}}\n'

_OWN_BYTES = 100_000
"""Estimated size of a compiled grammar besides its text."""


@dataclass(frozen=True, slots=True)
class _Compiled:
    matcher: Matcher  # in its first state
    shortest: int  # tokens
    size: int  # bytes


class Grammars:
    """A compiler of grammars in llguidance's Lark form, with a cache. Usable from any thread.

    Args:
        tokenizer: a tokenizer of transformers, with a `tokenizers` backend.
        vocab_size: number of token ids that an answer may hold.
        eos_ids: tokens that end an answer.
        limits: bounds for grammars.
    """

    def __init__(self, tokenizer: Any, vocab_size: int, eos_ids: Sequence[int], limits: Limits) -> None:
        self._tokenizer, self._vocab_size, self._eos_ids = tokenizer, vocab_size, list(eos_ids)
        self._limits = limits
        self._lock, self._reading = threading.Lock(), threading.Lock()
        self._vocabulary: Vocabulary | None = None
        self._being_checked: dict[str, Future[_Compiled]] = {}
        self._compiled: OrderedDict[str, _Compiled] = OrderedDict()  # in the order of use

    def check(self, grammar: str, max_tokens: int) -> None:
        """Compile a new grammar for `start`, and check that an answer fits.

        Raises:
            InvalidInputError: `shortest` raises, or `max_tokens` is smaller than its result.
        """
        if max_tokens < (shortest := self.shortest(grammar)):
            limit = f"the shortest answer of this form takes {shortest:,} tokens"
            hint = "leave room for more: that one holds no more text than its schema demands"
            raise InvalidInputError("max_tokens", max_tokens, limit, hint)

    def shortest(self, grammar: str) -> int:
        """Return the number of tokens of the shortest text that was found, the end of text left out.

        Raises:
            InvalidInputError: the grammar is too large, takes too long, or cannot be compiled.
        """
        if compiled := self._find(grammar):
            return compiled.shortest
        try:
            size, most = len(grammar.encode()), self._limits.max_grammar_bytes
        except UnicodeEncodeError as error:
            raise InvalidInputError("grammar", grammar, f"must be text ({error.reason})") from error
        if size > most:
            raise InvalidInputError("grammar", f"{size:,} bytes", f"at most {most:,} bytes", "ask for less")
        return self._check_once(grammar).shortest

    def _check_once(self, grammar: str) -> _Compiled:
        """Check a grammar once for all threads of a batch that need it; they share the result or the error."""
        with self._lock:
            running = self._being_checked.get(grammar)
            if running is None:
                future = self._being_checked[grammar] = Future[_Compiled]()
        if running is not None:
            return running.result()
        try:
            vocabulary = self._known_vocabulary()
            self._validate(grammar)
            future.set_result(self._compile(grammar, vocabulary))
        except BaseException as error:
            future.set_exception(error)
        finally:
            with self._lock:
                del self._being_checked[grammar]
        return future.result()

    def start(self, grammar: str) -> Matcher:
        """Return a matcher in the first state of a grammar that was checked."""
        compiled = self._find(grammar) or self._compile(grammar, self._known_vocabulary())
        return compiled.matcher.fork()

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
        for pattern in patterns_of(grammar):  # they may be in parts that the shortest text leaves out
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
        matcher = LLMatcher(vocabulary.tokenizer, grammar, log_level=0, limits=limits)
        if matcher.is_error():
            raise InvalidInputError("grammar", grammar, f"cannot be compiled: {_reason(matcher.get_error())}")
        return Matcher(vocabulary, matcher, hints_of(grammar))

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
        check_package("grammar")
        from llguidance import LLTokenizer

        text, eos_ids = self._tokenizer.backend_tokenizer.to_str(), self._eos_ids
        try:
            known = [token for token in eos_ids if token < len(self._tokenizer)]  # heads may be padded
            return Vocabulary.of(LLTokenizer(text, n_vocab=self._vocab_size, eos_token=known))
        except ValueError as error:
            limit = f"grammars cannot be read with it ({error})"
            raise UnsupportedModelError("tokenizer", type(self._tokenizer).__name__, limit) from error


def check_package(field: str) -> None:
    """Raise `InvalidInputError` for a field that needs grammars where the package that reads them is missing."""
    if find_spec("llguidance") is None:
        hint = "pip install 'llguidance>=1.9,<2'"
        raise InvalidInputError(field, "...", "needs the package llguidance", hint)


def _reason(problem: str) -> str:
    """Return llguidance's message without the lines of the grammar that it quotes and their positions."""
    message = re.split(r"\n +\d+ \|", problem, maxsplit=1)[0].strip()
    return re.sub(r"^at \d+\(\d+\): (failed to compile JSON schema: )?", "", message)[:500]


class Matcher:
    """A `ports.Constraint` by llguidance.

    A grammar that reaches a bound of llguidance allows nothing from then on.

    Args:
        vocabulary: vocabulary of the answer's tokens.
        matcher: llguidance's matcher, owned by this object.
        hints: texts that the grammar may need within free text.
        ending: a text that once ended the grammar; it is tried first when an end is needed.
    """

    def __init__(
        self, vocabulary: Vocabulary, matcher: LLMatcher, hints: Sequence[Hint] = (), ending: bytes | None = None
    ) -> None:
        self._vocabulary, self._matcher = vocabulary, matcher
        self._hints, self._ending = hints, ending

    @property
    def failed(self) -> bool:
        """Whether it has reached a bound of llguidance."""
        return bool(self._matcher.is_error())

    def fork(self) -> Self:
        """Return an independent copy."""
        return type(self)(self._vocabulary, self._matcher.deep_copy(), self._hints, self._ending)

    def accept(self, token_id: int) -> bool:
        """Advance by a token and return True, if it may come next and does not end the text; else change nothing."""
        if self._matcher.try_consume_tokens([token_id]) != 1:
            return False
        if self._ending:
            self._ending = self._ending.removeprefix(self._vocabulary.tokenizer.decode_bytes([token_id]))
        return True

    def fitting(self, token_ids: Sequence[int]) -> int:
        """Return how many of these tokens may come next, one after the other; an end of text may be the last."""
        if self._matcher.is_stopped():  # llguidance then accepts no end of text, though nothing else may follow
            return sum(token in self._vocabulary.tokenizer.eos_tokens for token in token_ids[:1])
        return int(self._matcher.validate_tokens(list(token_ids)))

    def allowed(self) -> bytes:
        """Return a mask: bit `i % 8` of byte `i // 8` is set if token i may come next."""
        mask = self._matcher.compute_bitmask()
        return bytes(len(mask)) if self._matcher.is_error() else mask

    def forced(self) -> list[int]:
        """Return the text that must come next, in the tokenizer's own tokens, and an end of text if nothing follows."""
        tokens, ahead = list(self._matcher.compute_ff_tokens()), self._matcher
        if tokens:
            ahead = ahead.deep_copy()
            ahead.try_consume_tokens(tokens)
        ends = ahead.is_stopped() and ahead.is_accepting() and not ahead.is_error()
        return [*tokens, self._vocabulary.tokenizer.eos_token] if ends else tokens

    def closing(self, most: int) -> tuple[int, ...] | None:
        """Return tokens that end the text: the first end of at most `most` tokens, else the shortest that was found.

        Args:
            most: number of tokens that there is room for.

        Returns:
            The tokens, without an end-of-text token; None if no attempt found an end.
        """
        best: tuple[int, ...] | None = None
        search = (find_ending(self._vocabulary, self._matcher, attempt, self._hints) for attempt in range(ATTEMPTS))
        for text in itertools.chain([self._ending], search):
            tokens = None if text is None else self._spell_ending(text)
            if tokens is not None and (best is None or len(tokens) < len(best)):
                best, self._ending = tokens, text
            if best is not None and len(best) <= most:
                break
        return best

    def _spell_ending(self, text: bytes) -> tuple[int, ...] | None:
        """Return the tokens of a text if it ends the grammar, else None."""
        matcher = self._matcher.deep_copy()
        tokens = self._vocabulary.consume(matcher, text)
        return tokens if tokens is not None and matcher.is_accepting() and not matcher.is_error() else None
