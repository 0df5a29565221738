"""`VocabularyMap`: a draft of another family speaks of the target's tokens.

Tokens that say the same bytes are one. Whatever else the target says the draft reads in several tokens of its own, and
it proposes nothing but what both can say in one. So all that the other side sees is in the target's ids, and the
answer is exact as ever. (Token-level intersection: Timor et al., arXiv 2502.05202, section 4.3.)
"""

from __future__ import annotations

import itertools
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
"""Share of the larger vocabulary that the two must have in common: below it hardly a token could be proposed."""


_Part: TypeAlias = tuple[Sequence[int], Sequence[int]]


class VocabularyMap:
    """A target's token ids in a draft's, and back.

    Args:
        target, draft: tokenizers with a `tokenizers` backend.
        sizes: ids of each model.
        same: special tokens of the target and of the draft that play one part, whatever their names are. Those without
            a partner of their own name become one in their order.

    Attributes:
        num_shared: tokens that both have.
        coverage: their share of the draft's tokens.
        useful: whether the two share enough for a draft.
    """

    def __init__(self, target: Any, draft: Any, sizes: tuple[int, int], same: Sequence[_Part] = ()) -> None:
        self._target, self._model, self._draft_size = target, draft.backend_tokenizer.model, sizes[1]
        self._spellings = Spelling(target), Spelling(draft)
        ours, theirs = _by_meaning(target, sizes[0]), _by_meaning(draft, sizes[1])
        shared = {ours[meaning]: theirs[meaning] for meaning in ours if meaning in theirs}
        for own, other in same:
            paired = set(shared.values())
            lonely = [token for token in own if token < sizes[0] and token not in shared]
            shared |= zip(lonely, [token for token in other if token < sizes[1] and token not in paired])  # noqa: B905
        unknown = (draft.unk_token_id, draft.eos_token_id, 0)
        self._unknown: int = next(token for token in unknown if token is not None)
        self._bytes = [theirs.get(bytes([byte]), self._unknown) for byte in range(256)]
        self._read: dict[int, tuple[int, ...]] = {
            own: (other,) for own, other in shared.items()
        }  # of the others once they are read
        self._shared = frozenset(shared)
        self._columns = torch.full((sizes[0],), sizes[1])
        self._columns[list(shared)] = torch.tensor(list(shared.values()), dtype=torch.long)
        self._gate = torch.full((sizes[1],), -math.inf)  # added to a draft's logits: 0 for what both have
        self._gate[list(shared.values())] = 0.0
        self.num_shared, self.coverage = len(shared), len(shared) / max(1, len(theirs))
        self.useful = self.num_shared >= MIN_SHARED * max(len(ours), len(theirs))

    def shares(self, token_id: int) -> bool:
        """Whether a token of the target's is one of the draft's."""
        return token_id in self._shared

    def read(self, token_ids: Sequence[int]) -> list[int]:
        """The target's tokens as the draft reads them: one for each that both have, one or more for the others."""
        return [*itertools.chain.from_iterable(map(self._reading, token_ids))]

    def to_target(self, logits: Tensor) -> Tensor:
        """A draft's logits [rows, its ids] by the target's ids [rows, target's ids]; -inf for what it cannot say.

        A head that was cut to the draft's first tokens can say those alone.
        """
        self._columns = self._columns.to(logits.device)
        columns = self._columns.clamp(max=logits.shape[1]).expand(len(logits), -1)
        return F.pad(logits, (0, 1), value=-math.inf).gather(1, columns)

    def share(self, logits: Tensor) -> Tensor:
        """Log of the chance [rows, 1] that what the draft would say next is a token that both have."""
        self._gate = self._gate.to(logits)
        return (logits + self._gate[: logits.shape[1]]).logsumexp(-1, keepdim=True) - logits.logsumexp(-1, keepdim=True)

    def _reading(self, token_id: int) -> tuple[int, ...]:
        if token_id not in self._read:
            self._read[token_id] = self._spelt(token_id) or (self._unknown,)
        return self._read[token_id]

    def _spelt(self, token_id: int) -> tuple[int, ...]:
        """The draft's own tokens for the bytes of a token: what it would split them into, else one a byte."""
        raw = self._spellings[0].bytes_of(self._target.convert_ids_to_tokens(token_id) or "")
        try:
            pieces = self._model.tokenize(self._spellings[1].text_of(raw))
        except Exception:  # tokenizers raises no other kind where a model lacks a token for what it cannot know
            pieces = []
        return tuple(piece.id for piece in pieces if piece.id < self._draft_size) or tuple(
            self._bytes[byte] for byte in raw
        )


def _by_meaning(tokenizer: Any, size: int) -> dict[str | bytes, int]:
    """Ids below `size` by the bytes that they say; special tokens, which say nothing, by their names."""
    spelling = Spelling(tokenizer)
    special = {number for number, token in tokenizer.added_tokens_decoder.items() if token.special}
    found: dict[str | bytes, int] = {}
    for token, number in sorted(tokenizer.get_vocab().items(), key=itemgetter(1)):
        meaning = token if number in special else spelling.bytes_of(token)
        if number < size and not (token.startswith("<0x") and meaning in found):  # a byte by its number comes second
            found[meaning] = number
    return found


def read_map(target: Path, draft: Path) -> VocabularyMap | None:
    """How the models in two folders understand each other; None where they have one vocabulary.

    They have where ids that both know are the same tokens: heads may be padded, and one may know more.

    Raises:
        TypeError: a tokenizer does not say what its tokens are.
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
    begins = [() if one.bos_token_id is None else (one.bos_token_id,) for one in (ours, theirs)]
    sizes = [read_config(folder).get_text_config().vocab_size for folder in (target, draft)]
    return VocabularyMap(ours, theirs, (sizes[0], sizes[1]), [ends, (begins[0], begins[1])])


def end_ids(folder: Path, tokenizer: Any) -> tuple[int, ...]:
    """End-of-text tokens of the generation config, the config and the tokenizer together."""
    from transformers import GenerationConfig

    ids: list[int] = []
    found = [tokenizer.eos_token_id, read_config(folder).get_text_config().eos_token_id]
    if (folder / "generation_config.json").exists():
        found.append(GenerationConfig.from_pretrained(folder, local_files_only=True).eos_token_id)
    for value in found:
        ids += [value] if isinstance(value, int) else list(value or ())
    return tuple(dict.fromkeys(ids))
