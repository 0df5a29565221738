"""`VocabularyMap`: map the target's tokens to those of a draft with another vocabulary.

Tokens with the same bytes are shared. The draft proposes shared tokens only, and reads each other token of the target
as several tokens of its own. All proposals are therefore in the target's ids, and answers stay exact. (Token-level
intersection: Timor et al., arXiv 2502.05202, section 4.3.)
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Sequence
from operator import itemgetter
from pathlib import Path
from typing import Any, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor

from langchain_card.models.tokenizer import Spelling, read_tokenizer
from langchain_card.runtime.families import read_config

MIN_SHARED = 0.05
"""Smallest useful share of the larger vocabulary that is in both: below it the draft can propose hardly any token."""

_Part: TypeAlias = tuple[Sequence[int], Sequence[int]]


class VocabularyMap:
    """A map between the token ids of a target and of a draft.

    Args:
        target, draft: tokenizers with a `tokenizers` backend.
        sizes: number of ids of each model.
        same: pairs of special tokens, of the target and of the draft, with one purpose but perhaps different names.
            Those without a partner of the same name are paired in order.

    Attributes:
        num_shared: number of shared tokens.
        coverage: their share of the draft's tokens.
        useful: whether enough tokens are shared for a draft.
    """

    def __init__(self, target: Any, draft: Any, sizes: tuple[int, int], same: Sequence[_Part] = ()) -> None:
        self._target, self._model, self._draft_size = target, draft.backend_tokenizer.model, sizes[1]
        self._spellings = Spelling(target), Spelling(draft)
        ours, theirs = _by_meaning(target, sizes[0]), _by_meaning(draft, sizes[1])
        shared = {ours[meaning]: theirs[meaning] for meaning in ours if meaning in theirs}
        for of_target, of_draft in same:
            paired = set(shared.values())
            unpaired = [token for token in of_target if token < sizes[0] and token not in shared]
            shared |= zip(unpaired, [token for token in of_draft if token < sizes[1] and token not in paired])  # noqa: B905
        unknown = (draft.unk_token_id, draft.eos_token_id, 0)
        self._unknown: int = next(token for token in unknown if token is not None)
        self._bytes = [theirs.get(bytes([byte]), self._unknown) for byte in range(256)]
        # Grows with each token that is not shared.
        self._read: dict[int, tuple[int, ...]] = {token: (other,) for token, other in shared.items()}
        self._shared = frozenset(shared)
        self._columns = torch.full((sizes[0],), sizes[1])
        self._columns[list(shared)] = torch.tensor(list(shared.values()), dtype=torch.long)
        self._gate = torch.full((sizes[1],), -math.inf)  # added to a draft's logits: 0 for shared tokens
        self._gate[list(shared.values())] = 0.0
        self.num_shared, self.coverage = len(shared), len(shared) / max(1, len(theirs))
        self.useful = self.num_shared >= MIN_SHARED * max(len(ours), len(theirs))

    def shares(self, token_id: int) -> bool:
        """Return whether a token of the target is shared."""
        return token_id in self._shared

    def read(self, token_ids: Sequence[int]) -> list[int]:
        """Return the draft's tokens for the target's: one for a shared token, one or more for any other."""
        return [*itertools.chain.from_iterable(map(self._reading, token_ids))]

    def to_target(self, logits: Tensor) -> Tensor:
        """Reorder a draft's logits [rows, draft's ids] by the target's ids [rows, target's ids]; -inf if not shared.

        A head that was cut gives -inf for the tokens that it lost, too.
        """
        self._columns = self._columns.to(logits.device)
        columns = self._columns.clamp(max=logits.shape[1]).expand(len(logits), -1)
        return F.pad(logits, (0, 1), value=-math.inf).gather(1, columns)

    def share(self, logits: Tensor) -> Tensor:
        """Return the log of the probability [rows, 1] that the draft's next token is a shared one."""
        self._gate = self._gate.to(logits)
        return (logits + self._gate[: logits.shape[1]]).logsumexp(-1, keepdim=True) - logits.logsumexp(-1, keepdim=True)

    def _reading(self, token_id: int) -> tuple[int, ...]:
        if token_id not in self._read:
            self._read[token_id] = self._spelt(token_id) or (self._unknown,)
        return self._read[token_id]

    def _spelt(self, token_id: int) -> tuple[int, ...]:
        """Return the draft's tokens for the bytes of a target's token: its own split, or else one token per byte."""
        raw = self._spellings[0].bytes_of(self._target.convert_ids_to_tokens(token_id) or "")
        try:
            pieces = self._model.tokenize(self._spellings[1].text_of(raw))
        except Exception:  # tokenizers raises plain exceptions if a model lacks the unknown token
            pieces = []
        return tuple(piece.id for piece in pieces if piece.id < self._draft_size) or tuple(
            self._bytes[byte] for byte in raw
        )


def _by_meaning(tokenizer: Any, size: int) -> dict[str | bytes, int]:
    """Map the bytes of tokens to their ids below `size`; special tokens, which have no bytes, by their names."""
    spelling = Spelling(tokenizer)
    special = {number for number, token in tokenizer.added_tokens_decoder.items() if token.special}
    ids: dict[str | bytes, int] = {}
    for token, number in sorted(tokenizer.get_vocab().items(), key=itemgetter(1)):
        meaning = token if number in special else spelling.bytes_of(token)
        if number < size and not (token.startswith("<0x") and meaning in ids):  # a plain token is preferred
            ids[meaning] = number
    return ids


def read_map(target: Path, draft: Path) -> VocabularyMap | None:
    """Return the vocabulary map of the models in two folders, or None if they have one vocabulary.

    Two vocabularies are one if all tokens of the smaller have the same ids in the larger. Heads may be padded.

    Raises:
        TypeError: a tokenizer has no `tokenizers` backend.
    """
    files = [folder / "tokenizer.json" for folder in (target, draft)]
    if all(file.exists() for file in files) and files[0].read_bytes() == files[1].read_bytes():
        return None
    ours, theirs = read_tokenizer(target), read_tokenizer(draft)
    smaller, larger = sorted((ours.get_vocab().items(), theirs.get_vocab().items()), key=len)
    if smaller <= larger:
        return None
    for tokenizer in (ours, theirs):
        if not hasattr(tokenizer, "backend_tokenizer"):
            raise TypeError(f"{type(tokenizer).__name__} does not say what its tokens are")
    ends = end_ids(target, ours), end_ids(draft, theirs)
    begins = [() if reader.bos_token_id is None else (reader.bos_token_id,) for reader in (ours, theirs)]
    sizes = [read_config(folder).get_text_config().vocab_size for folder in (target, draft)]
    return VocabularyMap(ours, theirs, (sizes[0], sizes[1]), [ends, (begins[0], begins[1])])


def end_ids(folder: Path, tokenizer: Any) -> tuple[int, ...]:
    """Return the end-of-text tokens of the tokenizer, the config and the generation config together."""
    ids: list[int] = []
    stated = [tokenizer.eos_token_id, read_config(folder).get_text_config().eos_token_id]
    if (generation := folder / "generation_config.json").exists():
        stated.append(json.loads(generation.read_text()).get("eos_token_id"))
    for value in stated:
        ids += [value] if isinstance(value, int) else list(value or ())
    return tuple(dict.fromkeys(ids))
