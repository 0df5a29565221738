"""Committed token ids to text, token by token: never half a character, never a part of a stop string."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tokenizers.decoders import DecodeStream

from langchain_card.core.messages import TokenLogprob


@dataclass(frozen=True, slots=True)
class Piece:
    """One token of the answer, and the text that became certain with it.

    Attributes:
        token_id: the token.
        text: may be empty (half a character, the beginning of a stop string, a control token) or hold what was kept
            back before.
        source: the drafter that had proposed the token, or "" when it is the target's own.
        logprob: of the token, when the request wants it.
    """

    token_id: int
    text: str
    source: str = ""
    logprob: TokenLogprob | None = None


class Detokenizer:
    """Text of one answer.

    Args:
        tokenizer: of transformers, with a `tokenizers` backend.
        stop: strings that end the text; they are cut off.

    Attributes:
        tokenizer: the same.
        stopped: whether a stop string was met.
        num_tokens: tokens taken, the one that completed a stop string included and none after it.
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
        """Tokens taken so far."""
        return len(self._token_ids)

    def push(
        self, token_ids: Sequence[int], sources: Sequence[str], logprobs: Sequence[TokenLogprob] = ()
    ) -> list[Piece]:
        """Takes the next tokens; the pieces end at a stop string."""
        pieces: list[Piece] = []
        beside = logprobs or (None,) * len(token_ids)
        for token_id, source, logprob in zip(token_ids, sources, beside, strict=True):
            if self.stopped:
                break
            self._token_ids.append(token_id)
            self._decoded += self._stream.step(self._backend, token_id) or ""
            pieces.append(Piece(token_id, self._certain(), source, logprob))
        return pieces

    def finish(self) -> str:
        """What was still kept back; nothing after a stop string, and not half a character that the end cut off."""
        if self.stopped:
            return ""
        whole = self.tokenizer.decode(self._token_ids, skip_special_tokens=True)
        if whole.startswith(self._decoded):
            self._decoded += whole[len(self._decoded) :].rstrip("\ufffd")
        rest, self._emitted = self._decoded[self._emitted :], len(self._decoded)
        return rest

    def _certain(self) -> str:
        """The text after what was emitted that can no longer become part of a stop string."""
        start = self._emitted
        found = [at for text in self._stop if (at := self._decoded.find(text, start)) >= 0]
        if found:
            self.stopped = True
            self._emitted = min(found)
        else:
            self._emitted = len(self._decoded) - self._open_stop(start)
        return self._decoded[start : self._emitted]

    def _open_stop(self, start: int) -> int:
        """Length of the longest end of the text that a stop string begins with."""
        tail = self._decoded[start:]
        return max(
            (n for text in self._stop for n in range(1, min(len(text), len(tail) + 1)) if tail.endswith(text[:n])),
            default=0,
        )
