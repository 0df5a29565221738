"""Sampling: a row's token depends only on its logits, its own history, the seed and its position.

At temperature T the token is `argmax(processed logits / T + gumbel(seed, position, token))`, a draw from their softmax.
The noise of a position is independent of the schedule, the drafter and the shape of the tree, so a sampled answer is
the same string as plain decoding with the same seed. (Gumbel-max; drafter-invariant coupling, arXiv 2408.07978.)
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from langchain_card.core.messages import NO_TOKEN, TokenLogprob
from langchain_card.core.request import SamplingParams
from langchain_card.runtime.guide import Guide
from langchain_card.runtime.transfer import to_device

_MIX_1 = 0xBF58476D1CE4E5B9 - 2**64
_MIX_2 = 0x94D049BB133111EB - 2**64
_STEP = 0x9E3779B97F4A7C15 - 2**64

NUCLEUS_WIDTH = 1024
"""Number of tokens that are sorted to find a nucleus; a row with a larger nucleus is sorted whole."""


PIECE = 128
"""Scores of a row whose highest is looked at together, by `likeliest`."""


def choose(scores: Sequence[Tensor]) -> list[int]:
    """Return the token with the highest score of each row of all tensors, in order; of equal scores, the first.

    Where a score is no number, or is infinite, the token is `NO_TOKEN`. Scores of minus infinity are forbidden tokens.

    Tokens are copied from a device together. On a CPU, NumPy searches ten times as fast as torch 2.13.
    """
    chosen = [_highest(rows) for rows in scores]
    return torch.cat(chosen).tolist() if chosen else []


def _highest(scores: Tensor) -> Tensor:
    if scores.device.type == "cpu" and scores.dtype in (torch.float32, torch.float64):
        token_ids = torch.from_numpy(scores.numpy().argmax(axis=-1))
        values = scores.gather(-1, token_ids[:, None])[:, 0]
    else:
        values, token_ids = scores.max(dim=-1)
    return token_ids.where(values < math.inf, NO_TOKEN)


def likeliest(scores: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Return the highest scores [rows, count] and their tokens, highest first.

    On a CPU, only the pieces of a row with the highest maxima are sorted, because `topk` over a vocabulary is slow
    there. The highest scores of a row lie in as many pieces at most.
    """
    vocabulary = scores.shape[-1]
    if scores.device.type != "cpu" or vocabulary < 2 * PIECE * count:
        values, token_ids = scores.topk(count, dim=-1)
        return values, token_ids
    whole = vocabulary // PIECE
    pieces = scores[:, : whole * PIECE].reshape(len(scores), whole, PIECE)
    best = pieces.amax(dim=-1).topk(count, dim=-1).indices
    starts = (best * PIECE).unsqueeze(-1) + torch.arange(PIECE, device=scores.device)
    token_ids = starts.flatten(1)
    if rest := vocabulary - whole * PIECE:
        last = torch.arange(vocabulary - rest, vocabulary, device=scores.device)
        token_ids = torch.cat([token_ids, last.expand(len(scores), rest)], dim=-1)
    values, places = scores.gather(-1, token_ids).topk(count, dim=-1)
    return values, token_ids.gather(-1, places)


class Sampler:
    """The processors of one request: logits become scores, and the argmax of the scores is the token.

    The order is fixed: penalties, bias, the grammar's mask, bans, temperature, top-k, top-p, min-p, noise. The first
    four apply to greedy decoding, too. Scores are computed in float64, and for each row as if it were alone. The
    history of a row is the prompt, the committed tokens and the row's own path.

    Args:
        params: the request's sampling parameters.
        prompt_ids: token ids of the prompt.
        guide: the request's grammar, or None.

    Attributes:
        length: number of tokens of prompt and answer so far, which is the position of the next one.
        guide: the request's grammar, or None.
        idle: whether scores are the logits unchanged.
    """

    def __init__(self, params: SamplingParams, prompt_ids: Sequence[int], guide: Guide | None = None) -> None:
        self.length = len(prompt_ids)
        self._params = params
        self.guide = guide
        self._output_counts = dict.fromkeys(prompt_ids, 0)
        self._penalised = (
            params.repetition_penalty != 1 or params.presence_penalty != 0 or params.frequency_penalty != 0
        )
        self._greedy = params.greedy
        self._unprocessed = self._greedy and not (self._penalised or params.logit_bias or params.banned_ids)
        self.idle = self._unprocessed and guide is None

    def commit(self, token_ids: Sequence[int]) -> None:
        """Append tokens of the answer to the history of all rows."""
        self.length += len(token_ids)
        if self.guide is not None:
            self.guide.commit(token_ids)
        for token in token_ids:
            self._output_counts[token] = self._output_counts.get(token, 0) + 1

    @torch.inference_mode()
    def scores(self, logits: Tensor, paths: Sequence[Sequence[int]]) -> Tensor:
        """Return the scores whose argmax is each row's token; -inf for tokens that cannot be chosen.

        Args:
            logits: [rows, vocabulary]; not written to.
            paths: [rows] tokens between the last committed one and the token to be chosen.

        Returns:
            float64 [rows, vocabulary]. If only the grammar applies: the masked logits in their own type.
        """
        if self.idle:
            return logits
        params = self._params
        scores = logits.clone() if self._unprocessed else logits.to(torch.float64, copy=True)
        if self._penalised:
            _penalise(scores, self._output_counts, paths, params)
        if params.logit_bias:
            token_ids, biases = zip(*params.logit_bias)  # noqa: B905
            added = to_device(torch.tensor(biases, dtype=scores.dtype), scores.device)
            scores[:, _columns(token_ids, scores)] += added
        if self.guide is not None:
            forbidden = self.guide.forbidden([*map(tuple, paths)], scores.shape[-1])
            scores.masked_fill_(to_device(forbidden, scores.device), -math.inf)
        if params.banned_ids:
            _ban(scores, params.banned_ids)
        if self._greedy:
            return scores
        scores = _truncate(scores / params.temperature, params)
        rows = [gumbel_noise(params.seed, self.length + len(path), logits.shape[-1], logits.device) for path in paths]
        return scores.add_(torch.stack(rows))


def _penalise(
    scores: Tensor, output_counts: Mapping[int, int], paths: Sequence[Sequence[int]], params: SamplingParams
) -> None:
    """Apply penalties in place: repetition (prompt and answer), then presence and frequency (answer).

    Only the columns of tokens that occur anywhere are computed; tokens of other rows' paths count as unseen.
    """
    known = len(output_counts)
    token_ids = [*output_counts, *dict.fromkeys(t for path in paths for t in path if t not in output_counts)]
    column = {token: i for i, token in enumerate(token_ids)}
    counts = torch.zeros(len(paths), len(token_ids), dtype=scores.dtype)
    counts[:, :known] = torch.tensor(list(output_counts.values()))
    cells = [(row, column[token]) for row, path in enumerate(paths) for token in path]
    if cells:
        index = torch.tensor(cells).unbind(1)
        counts.index_put_(index, torch.ones(len(cells), dtype=counts.dtype), accumulate=True)
    counts = to_device(counts, scores.device)
    seen = counts > 0
    seen[:, :known] = True
    columns = _columns(token_ids, scores)
    old = scores[:, columns]
    repeated = torch.where(old < 0, old * params.repetition_penalty, old / params.repetition_penalty)
    new = torch.where(seen, repeated, old)
    new -= params.frequency_penalty * counts + params.presence_penalty * counts.clamp(max=1)
    scores[:, columns] = new


def _ban(scores: Tensor, token_ids: Sequence[int]) -> None:
    """Mask tokens in place. A row that would lose all tokens keeps the one with the best score."""
    best = scores.max(dim=-1, keepdim=True)
    scores.index_fill_(-1, _columns(token_ids, scores), -math.inf)
    lost = scores.amax(dim=-1, keepdim=True) == -math.inf
    scores.scatter_(-1, best.indices, torch.where(lost, best.values, scores.gather(-1, best.indices)))


def _columns(token_ids: Sequence[int], scores: Tensor) -> Tensor:
    """Return tokens as an index on the scores' device."""
    return to_device(torch.tensor(token_ids), scores.device)


def _truncate(scores: Tensor, params: SamplingParams) -> Tensor:
    """Mask the tokens that top-k, then top-p, then min-p leave out; ties with the last kept token are kept."""
    if 0 < params.top_k < scores.shape[-1]:
        scores = _drop_below(scores, scores.topk(params.top_k).values[:, -1:])
    if params.top_p < 1:
        scores = _drop_below(scores, _nucleus_floor(scores, params.top_p, NUCLEUS_WIDTH))
    if params.min_p > 0:
        scores = _drop_below(scores, scores.amax(dim=-1, keepdim=True) + math.log(params.min_p))
    return scores


def _drop_below(scores: Tensor, floor: Tensor) -> Tensor:
    return scores.masked_fill(scores < floor, -math.inf)


def _nucleus_floor(scores: Tensor, top_p: float, width: int) -> Tensor:
    """Return the smallest score [rows, 1] of the nucleus: the likeliest tokens, up to the one that reaches `top_p`."""
    vocab_size = scores.shape[-1]
    best = scores.topk(min(width, vocab_size))
    chances = scores.softmax(dim=-1).gather(-1, best.indices)
    inside = chances.cumsum(dim=-1) - chances < top_p  # likelier tokens do not fill the nucleus
    inside[:, 0] = True
    floor = best.values.masked_fill(~inside, math.inf).amin(dim=-1, keepdim=True)
    larger = inside[:, -1]
    if width < vocab_size and larger.any():
        floor[larger] = _nucleus_floor(scores[larger], top_p, vocab_size)
    return floor


@torch.inference_mode()
def token_logprobs(logits: Tensor, chosen: Sequence[int], count: int) -> tuple[TokenLogprob, ...]:
    """Return log-probabilities of the chosen tokens and of the likeliest ones.

    Args:
        logits: [rows, vocabulary] of the model, unprocessed.
        chosen: [rows] token ids.
        count: number of the likeliest tokens.
    """
    logprobs = logits.double().log_softmax(dim=-1)
    of_chosen = logprobs.gather(-1, to_device(torch.tensor(chosen), logits.device)[:, None])
    top = logprobs.topk(count := min(count, logits.shape[-1]))
    rows = torch.cat([of_chosen, top.values, top.indices.double()], dim=-1).tolist()  # one wait for the device
    return tuple(
        TokenLogprob(logprob, tuple(zip(map(int, rest[count:]), rest[:count], strict=True))) for logprob, *rest in rows
    )


def gumbel_noise(seed: int, position: int, vocab_size: int, device: torch.device) -> Tensor:
    """Return standard Gumbel noise, float64 [vocab_size]: a pure function of its arguments, equal on every device.

    An integer hash (the finalizer of splitmix64) of (seed, position, token) gives 53 random bits per token. Recent rows
    are cached and shared by all nodes of one depth, and on a CPU by target and draft: callers must not write to them.
    On CUDA each stream has rows of its own, so that nobody waits for them, and none is freed while another reads it.
    """
    stream = torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0
    return _noise(seed, position, vocab_size, device, stream)


@functools.lru_cache(maxsize=32)
@torch.inference_mode()
def _noise(seed: int, position: int, vocab_size: int, device: torch.device, stream: int) -> Tensor:
    key = _mix_one(_mix_one(seed * _STEP) + position * _STEP)
    bits = _mix(torch.arange(1, vocab_size + 1, device=device) * _STEP + key)
    uniform = (_shift_right(bits, 11).double() + 0.5) * 2.0**-53
    return -torch.log(-torch.log(uniform))


def _mix(x: Tensor) -> Tensor:
    x = (x ^ _shift_right(x, 30)) * _MIX_1
    x = (x ^ _shift_right(x, 27)) * _MIX_2
    return x ^ _shift_right(x, 31)


def _mix_one(x: int) -> int:
    """Compute what `_mix` does for one number on the host; the result fits int64."""
    x %= 2**64
    x = (x ^ x >> 30) * _MIX_1 % 2**64
    x = (x ^ x >> 27) * _MIX_2 % 2**64
    x ^= x >> 31
    return x - 2**64 if x >= 2**63 else x


def _shift_right(x: Tensor, bits: int) -> Tensor:
    """Shift int64 right, with zeros from the left."""
    shifted: Tensor = (x >> bits) & (2 ** (64 - bits) - 1)
    return shifted
