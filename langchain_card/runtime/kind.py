"""`Kind`: which engines may go on with each other's answers, and the probe that compares their arithmetic."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import torch
from torch import Tensor

from langchain_card.runtime.kv_cache import KVCache
from langchain_card.runtime.rows import Rows
from langchain_card.runtime.runner import ModelRunner

TEXT, DECODED, WINDOW = 64, 8, 8
"""Tokens of the probe that are read at once, tokens that are decoded one by one, and rows of its window."""


@dataclass(frozen=True, slots=True)
class Kind:
    """What the text of an engine's answers depends on.

    Equal kinds go on with each other's answers exactly, as an engine with its own after a restart.

    Attributes:
        answer: hash of all that decides an answer apart from rounding (`engine.kinds`).
        machine: hash of the bits of a probe's logits (`measure`); "" if they were not measured.
    """

    answer: str
    machine: str

    def continues(self, other: Kind) -> bool:
        """Return whether an engine of this kind may go on with an answer of the other.

        Between kinds that are not equal, only rounding differs: near-ties may be decided differently.
        """
        return self.answer == other.answer


@torch.inference_mode()
def measure(runner: ModelRunner, *, in_place: bool = False) -> str:
    """Return a hash of the bits of the logits after a fixed text, as this machine computes them.

    A text of `TEXT` tokens is read, `DECODED` tokens follow one by one, and one window verifies `WINDOW` rows. That are
    ten passes, about as much as an answer of ten tokens. Nothing remains of them: the slots that they use are lent, and
    get back what they held.

    Only what these passes compute is compared. Longer texts, and passes with other requests, may use other kernels.

    Args:
        runner: of the target; between two steps, on the thread that runs them.
        in_place: whether windows are chains in their final positions, as in steps of one shape (`exact="strict"`). The
            shape is then a part of the hash: it decides how sums over later positions are divided, too.
    """
    room = runner.max_len - DECODED  # at least 8
    num_rows = min(WINDOW, runner.num_scratch, room - 1)
    num_read = min(TEXT, room - num_rows)
    vocab_size = runner.model.config.get_text_config().vocab_size
    ids = [(7 + 7919 * i * i) % vocab_size for i in range(num_read + num_rows - 1)]
    bits = hashlib.sha256()
    if in_place:
        bits.update(repr((runner.num_scratch, runner.pool.num_seqs, runner.pool.max_len)).encode())
    with runner.on_stream(), runner.pool.lent(num_read + DECODED + num_rows) as cache:
        logits = _add(bits, runner.step([Rows(cache, ids[:num_read], 0, ask=True)]))
        for _ in range(DECODED):
            token = int(logits[-1].argmax())
            slot = _first_slot(cache, in_place)
            logits = _add(bits, runner.step([Rows(cache, [token], cache.length, [(slot,)])]))
            cache.keep([slot], [token])
        tokens = [int(logits[-1].argmax()), *ids[num_read:]]
        rows = Rows(cache, tokens, cache.length, _paths(num_rows, _first_slot(cache, in_place), in_place))
        _add(bits, runner.step([rows]))
    return bits.hexdigest()


def _first_slot(cache: KVCache, in_place: bool) -> int:
    return cache.pool.num_scratch + cache.length if in_place else 0


def _paths(num_rows: int, first: int, in_place: bool) -> list[tuple[int, ...]]:
    """Return the paths of a chain, or of a tree in which every row has two children."""
    paths: list[tuple[int, ...]] = [(first,)]
    for row in range(1, num_rows):
        paths.append((*paths[row - 1 if in_place else (row - 1) // 2], first + row))
    return paths


def _add(bits: hashlib._Hash, logits: Tensor) -> Tensor:
    """Add logits to a hash; return them on the CPU."""
    here = logits.cpu().contiguous()
    bits.update(repr((here.dtype, here.shape)).encode())
    bits.update(here.view(torch.uint8).numpy().data)
    return here
