"""`Description`: what a relay needs to know of engines elsewhere."""

from __future__ import annotations

from dataclasses import dataclass

from langchain_card.config import EngineConfig
from langchain_card.runtime.kind import Kind


@dataclass(frozen=True, slots=True)
class Description:
    """What an engine elsewhere says of itself, so that a relay needs no files of its models.

    Attributes:
        config: of the engine, with all open values filled in.
        kind: of the engine.
        eos_ids, vocab_size, max_len: as in `models.loader.Pair`.
        device: of the target.
        tokenizer: the files of the target's tokenizer, by name.
    """

    config: EngineConfig
    kind: Kind
    eos_ids: tuple[int, ...]
    vocab_size: int
    max_len: int
    device: str
    tokenizer: dict[str, bytes]
