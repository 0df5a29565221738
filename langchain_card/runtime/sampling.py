"""Logits to token ids: greedy, or drawn with noise that depends on seed and position alone.

At temperature T the token is `argmax(logits / T + gumbel(seed, position, token))`, a draw from softmax(logits / T).
The noise of a position is the same whatever the schedule, the drafter or the shape of the tree, so a sampled answer
is the same string as plain decoding with the same seed. (Gumbel-max; drafter-invariant coupling, arXiv 2408.07978.)
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from langchain_card.core.request import SamplingParams

_MIX_1 = 0xBF58476D1CE4E5B9 - 2**64
_MIX_2 = 0x94D049BB133111EB - 2**64
_STEP = 0x9E3779B97F4A7C15 - 2**64


def select_tokens(logits: Tensor, positions: Sequence[int], params: SamplingParams) -> list[int]:
    """The target's own token after each row.

    Args:
        logits: [rows, vocabulary].
        positions: [rows] absolute position of the token to be chosen.
        params: temperature and seed.
    """
    if params.temperature == 0.0:
        return logits.argmax(dim=-1).tolist()
    noise = {p: gumbel_noise(params.seed, p, logits.shape[-1], logits.device) for p in set(positions)}
    scaled = logits.double() / params.temperature + torch.stack([noise[p] for p in positions])
    return scaled.argmax(dim=-1).tolist()


def gumbel_noise(seed: int, position: int, vocab_size: int, device: torch.device) -> Tensor:
    """Standard Gumbel noise, float64 [vocab_size]: a pure function of its arguments, equal on every device.

    An integer hash (the finalizer of splitmix64) of (seed, position, token) gives 53 random bits per token.
    """
    start = torch.tensor([seed, position], dtype=torch.int64, device=device)
    key = _mix(_mix(start[0] * _STEP) + start[1] * _STEP)
    bits = _mix(key + torch.arange(1, vocab_size + 1, device=device) * _STEP)
    uniform = (_shift_right(bits, 11).double() + 0.5) * 2.0**-53
    return -torch.log(-torch.log(uniform))


def _mix(x: Tensor) -> Tensor:
    x = (x ^ _shift_right(x, 30)) * _MIX_1
    x = (x ^ _shift_right(x, 27)) * _MIX_2
    return x ^ _shift_right(x, 31)


def _shift_right(x: Tensor, bits: int) -> Tensor:
    """Logical shift of int64."""
    shifted: Tensor = (x >> bits) & (2 ** (64 - bits) - 1)
    return shifted
