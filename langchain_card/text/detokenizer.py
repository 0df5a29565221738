"""`Detokenizer`: committed token ids to text, without halves of characters or parts of stop strings."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tokenizers.decoders import DecodeStream

from langchain_card.core.messages import TokenLogprob


@dataclass(frozen=True, slots=True)
class Piece:
    """A token of the answer, and the text that became certain with it.

    Attributes:
        token_id: the token.
        text: may be empty (half a character, the beginning of a stop string, a control token) or include text that was
            held back before.
        source: the drafter that proposed the token, or "" if it is the target's own.
        logprob: log-probabilities of the token, if the request wants them.
    """

    token_id: int
    text: str
    source: str = ""
    logprob: TokenLogprob | None = None


class Detokenizer:
    """A detokenizer of one answer.

    Args:
        tokenizer: a tokenizer of transformers, with a `tokenizers` backend.
        stop: strings that end the text; they are cut off.

    Attributes:
        tokenizer: the tokenizer.
        stopped: whether a stop string was met.
    """

    def __init__(self, tokenizer: Any, stop: Sequence[str] = ()) -> None:
        self.tokenizer = tokenizer
        self._backend = tokenizer.backend_tokenizer
        self._stream = DecodeStream(skip_special_tokens=True)
        self._stop = tuple(stop)
        self._token_ids: list[int] = []
        self._decoded = ""
        self._emitted = 0
        self.stopped = False

    @property
    def num_tokens(self) -> int:
        """Number of tokens so far, the last of a stop string included and none after it."""
        return len(self._token_ids)

    def push(
        self, token_ids: Sequence[int], sources: Sequence[str], logprobs: Sequence[TokenLogprob] = ()
    ) -> list[Piece]:
        """Add tokens; return their pieces, up to a stop string."""
        pieces: list[Piece] = []
        logprobs_or_none = logprobs or (None,) * len(token_ids)
        for token_id, source, logprob in zip(token_ids, sources, logprobs_or_none, strict=True):
            if self.stopped:
                break
            self._token_ids.append(token_id)
            self._decoded += self._stream.step(self._backend, token_id) or ""
            pieces.append(Piece(token_id, self._certain(), source, logprob))
        return pieces

    def finish(self) -> str:
        """Return the text that was held back, without half a character at the end; nothing after a stop string."""
        if self.stopped:
            return ""
        whole = self.tokenizer.decode(self._token_ids, skip_special_tokens=True)
        if whole.startswith(self._decoded):
            self._decoded += whole[len(self._decoded) :].rstrip("\ufffd")
        rest, self._emitted = self._decoded[self._emitted :], len(self._decoded)
        return rest

    def _certain(self) -> str:
        """Return the text not yet emitted that cannot become part of a stop string."""
        start = self._emitted
        ends = [end for text in self._stop if (end := self._decoded.find(text, start)) >= 0]
        if ends:
            self.stopped = True
            self._emitted = min(ends)
        else:
            self._emitted = len(self._decoded) - self._partial_stop(start)
        return self._decoded[start : self._emitted]

    def _partial_stop(self, start: int) -> int:
        """Return the length of the longest end of the text that is the beginning of a stop string."""
        tail = self._decoded[start:]
        return max(
            (n for text in self._stop for n in range(1, min(len(text), len(tail) + 1)) if tail.endswith(text[:n])),
            default=0,
        )
