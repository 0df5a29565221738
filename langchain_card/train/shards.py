"""Texts with their states on disk: shards of safetensors, which training maps into memory."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from langchain_card.errors import InvalidInputError
from langchain_card.train.record import RecordedText

SHARD_BYTES = 64 << 20
"""Bytes of states that a shard holds, about: what is lost at most when a recording is killed."""

HEADER_BYTES, BYTES_A_TEXT = 1024, 32
"""Bytes that describe a shard, and each of its texts, at most."""

PATTERN = "states-*.safetensors"


class ShardWriter:
    """Writes texts to a folder, a shard at a time; a shard is there whole or not at all.

    Args:
        folder: of the shards; those that it has are kept.
        max_bytes: of all shards together.

    Attributes:
        num_tokens: tokens of answers in all shards, and of those that are in none yet.
        is_full: whether a text was dropped because there was no room for it.
    """

    def __init__(self, folder: Path, max_bytes: int) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder, self._max_bytes = folder, max_bytes
        files = sorted(folder.glob(PATTERN))
        self._number = 1 + max((int(file.stem.rpartition("-")[2]) for file in files), default=-1)
        self._bytes = sum(file.stat().st_size for file in files)
        self._texts, self._pending, self.is_full = list[RecordedText](), HEADER_BYTES, False
        self.num_tokens = sum(text.num_tokens for text in texts_in(folder))

    def add(self, text: RecordedText) -> None:
        """Take a text, or drop it if there is no room."""
        size = text.states.nbytes + BYTES_A_TEXT + 4 * len(text.token_ids)
        if self._bytes + self._pending + size > self._max_bytes:
            self.is_full = True
            return
        self._texts.append(text)
        self._pending += size
        self.num_tokens += len(text.token_ids) - text.num_prompt
        if self._pending >= SHARD_BYTES:
            self.flush()

    def flush(self) -> None:
        """Write the texts that are in no shard yet."""
        if not self._texts:
            return
        spans = [[len(text.token_ids), text.num_prompt] for text in self._texts]
        tensors = {
            "token_ids": torch.tensor([token for text in self._texts for token in text.token_ids], dtype=torch.int32),
            "states": torch.cat([text.states for text in self._texts], dim=1).transpose(0, 1).contiguous(),
        }
        file = self._folder / f"states-{self._number:04d}.safetensors"
        temporary = file.with_suffix(".part")
        save_file(tensors, temporary, {"texts": json.dumps(spans)})
        temporary.replace(file)
        self._bytes += file.stat().st_size
        self._number, self._texts, self._pending = self._number + 1, [], HEADER_BYTES


@dataclass(frozen=True, slots=True)
class StoredText:
    """A text in a shard.

    Attributes:
        file: the shard.
        first_token, first_row: where its tokens and its states begin.
        length: tokens; one more than rows of states.
        num_prompt: tokens of the prompt.
    """

    file: Path
    first_token: int
    first_row: int
    length: int
    num_prompt: int

    @property
    def num_tokens(self) -> int:
        """Tokens of the answer."""
        return self.length - self.num_prompt

    def read_tokens(self) -> list[int]:
        """Read the tokens from the shard."""
        with safe_open(self.file, "pt") as shard:
            tokens: list[int] = shard.get_slice("token_ids")[self.first_token :][: self.length].tolist()
        return tokens

    def read(self) -> RecordedText:
        """Read the text from its shard."""
        with safe_open(self.file, "pt") as shard:
            states = shard.get_slice("states")[self.first_row : self.first_row + self.length - 1]
        return RecordedText(self.read_tokens(), states.transpose(0, 1), self.num_prompt)


def texts_in(folder: Path) -> Sequence[StoredText]:
    """Return all texts of a folder of shards.

    Raises:
        InvalidInputError: a shard cannot be read.
    """
    return [text for file in sorted(folder.glob(PATTERN)) for text in _texts_of(file)]


def _texts_of(file: Path) -> Iterator[StoredText]:
    try:
        with safe_open(file, "pt") as shard:
            spans = json.loads(shard.metadata()["texts"])
    except Exception as error:  # safetensors' own is no subclass of OSError or ValueError
        raise InvalidInputError("--out", str(file), f"cannot be read ({error})", "remove it") from error
    token, row = 0, 0
    for length, num_prompt in spans:
        yield StoredText(file, token, row, length, num_prompt)
        token, row = token + length, row + length - 1
