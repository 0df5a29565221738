"""A request: its prompt, how it is decoded, why it ends, and its statistics."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from enum import Enum
from typing import TYPE_CHECKING, Any, TypeVar

from langchain_card.config import SCHEDULES, Schedule
from langchain_card.errors import InvalidInputError, check_choice, check_ids, check_range
from langchain_card.limits import Limits

if TYPE_CHECKING:
    from langchain_card.core.messages import Verdict


K = TypeVar("K")

MIN_TEMPERATURE = 1e-5
"""Lower temperatures are 0."""


class FinishReason(str, Enum):
    """The reason why a request ended, in the terms of LangChain's and OpenAI's `finish_reason`."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Decoding options of one answer.

    Attributes:
        max_tokens: most tokens of the answer, the end-of-text token included.
        temperature: 0 takes the likeliest token; above 0, tokens are drawn with noise keyed by (seed, position).
        seed: seed of that noise; the same seed gives the same answer whatever the schedule and the drafter.
        stop: strings that end the answer; they are not part of it.
        schedule: `"plain"` (target alone), `"sequential"` (draft, then verify), `"parallel"` (both at once), `"auto"`.
        top_k: only so many of the likeliest tokens are drawn from; 0 for all.
        top_p: only the likeliest tokens that together reach this chance are drawn from; 1 for all.
        min_p: only tokens at least so likely, as a share of the likeliest one's chance, are drawn from; 0 for all.
        repetition_penalty: scores of tokens in prompt or answer are divided by it, negative ones multiplied
            (CTRL, arXiv 1909.05858); 1 for none.
        presence_penalty: subtracted from the scores of tokens in the answer (as OpenAI's); 0 for none.
        frequency_penalty: subtracted once per occurrence in the answer (as OpenAI's); 0 for none.
        logit_bias: (token id, what is added to its score).
        banned_ids: token ids that are never chosen.
        grammar: a grammar that the answer obeys, in llguidance's form of Lark; "" for none. The answer obeys it within
            `max_tokens`: its end is written in time.
        logprobs: report the chosen token's log-probability and so many of the likeliest tokens'; None for nothing.
        tenant: requests share texts to draft from, and keys and values, with requests of the same tenant only. Under
            the exact rule it changes the speed alone.
        session: requests of one session go to one of several engines, which has read the beginning of their text; ""
            for any engine. It changes the speed alone.
        adapter: name of the adapter with which the target answers, one of `EngineConfig.adapters`; "" for none.
    """

    max_tokens: int = 512
    temperature: float = 0.0
    seed: int = 0
    stop: tuple[str, ...] = ()
    schedule: Schedule = "auto"
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    banned_ids: tuple[int, ...] = ()
    grammar: str = ""
    logprobs: int | None = None
    tenant: str = ""
    session: str = ""
    adapter: str = ""

    @property
    def greedy(self) -> bool:
        """True if the likeliest token is taken, as at all temperatures below `MIN_TEMPERATURE`."""
        return self.temperature < MIN_TEMPERATURE

    def check(self, limits: Limits, vocab_size: int = 2**31) -> None:
        """Raise `InvalidInputError` for the first field that breaks its bound; token ids are below `vocab_size`."""
        check_range("max_tokens", self.max_tokens, 1, limits.max_output_tokens)
        check_range("temperature", self.temperature, 0.0, 10.0, "0 decodes greedily")
        check_range("seed", self.seed, 0, 2**63 - 1)
        check_choice("schedule", self.schedule, SCHEDULES)
        if len(self.stop) > limits.max_stop_strings:
            raise InvalidInputError("stop", len(self.stop), f"at most {limits.max_stop_strings} stop strings")
        for text in self.stop:
            if not isinstance(text, str) or not 0 < len(text) <= limits.max_stop_chars:
                raise InvalidInputError(
                    "stop", text, f"each must be a string of 1 to {limits.max_stop_chars} characters"
                )
            if any("\ud800" <= char <= "\udfff" for char in text):
                raise InvalidInputError("stop", text, "holds half a character, which no text does", "pair surrogates")
        for field_, name in (("tenant", self.tenant), ("session", self.session), ("adapter", self.adapter)):
            if not isinstance(name, str) or len(name) > limits.max_tenant_chars or not name.isprintable():
                limit = f"must be a string of at most {limits.max_tenant_chars:,} printable characters"
                raise InvalidInputError(field_, name, limit)
        self._check_processors(limits, vocab_size)

    def _check_processors(self, limits: Limits, vocab_size: int) -> None:
        check_range("top_k", self.top_k, 0, 2**31 - 1, "0 turns it off")
        check_range("top_p", self.top_p, 0.0, 1.0, "1 turns it off")
        check_range("min_p", self.min_p, 0.0, 1.0, "0 turns it off")
        check_range("repetition_penalty", self.repetition_penalty, 0.01, 100.0, "1 turns it off")
        check_range("presence_penalty", self.presence_penalty, -2.0, 2.0, "0 turns it off")
        check_range("frequency_penalty", self.frequency_penalty, -2.0, 2.0, "0 turns it off")
        check_ids("logit_bias", [token for token, _ in self.logit_bias], limits.max_logit_bias, vocab_size)
        for token, bias in self.logit_bias:
            check_range(f"logit_bias[{token}]", bias, -100.0, 100.0, "-100 all but bans a token")
        check_ids("banned_ids", self.banned_ids, limits.max_banned_ids, vocab_size)
        if self.logprobs is not None:
            check_range("logprobs", self.logprobs, 0, limits.max_logprobs, "None turns them off")


@dataclass(frozen=True, slots=True)
class Request:
    """One prompt to be answered.

    Attributes:
        request_id: unique in its engine.
        prompt_ids: token ids, at least one.
        params: decoding options.
        eos_ids: token ids that end the answer.
        labels: tokens of possible answers. One pass finds how likely each is as the whole answer, and none is written.
    """

    request_id: int
    prompt_ids: tuple[int, ...]
    params: SamplingParams
    eos_ids: tuple[int, ...] = ()
    labels: tuple[tuple[int, ...], ...] = ()


TIMES = ("submitted", "started", "first_token", "ended")
"""Fields of `RequestStats` that hold times."""

TABLES = ("verified_by_source", "accepted_by_source", "passes_by_accepted", "resumed")
"""Fields of `RequestStats` that hold counts by name or number."""


@dataclass(slots=True)
class RequestStats:
    """Counts and times of one request, in seconds of the engine's clock, and how likely its labels are.

    Attributes:
        schedule: the schedule that ran; the last one if `auto` changed it.
        rounds: target passes after the prompt was read.
        together: requests in those passes, added up.
        output_tokens: tokens of the answer.
        verified: candidates that the target checked.
        accepted: candidates that became tokens of the answer.
        verified_by_source, accepted_by_source: the same by drafter; a candidate counts for its first drafter.
        passes_by_accepted: passes by the number of candidates that each accepted.
        rescued: accepted candidates that the target did not choose; 0 under the exact rule.
        lossy: whether the rule in force may accept such tokens in this answer; known from the first round on. False if
            the rule answers this request exactly.
        hits: rounds whose last token was already in the cache.
        closed: whether the end of the grammar was written early, because `max_tokens` came near.
        dropped: proposed candidates that arrived under a dead branch or without a chance.
        target_busy: seconds in target steps after the first token.
        draft_busy: seconds in draft steps after the first token.
        cached_tokens: tokens of the prompt that were not read, because an earlier request had read them.
        draft_steps, draft_nodes: steps of drafts that cost time, and candidates that they expanded.
        waited: seconds that rounds waited for their draft.
        submitted, started, first_token, ended: times; `ended` is 0 until the end.
        label_logprobs: log-probability of each of the request's labels as the whole answer.
        resumed: how often another engine went on with the answer, by reason (`engine.relay.open_requests`).
    """

    schedule: str = "plain"
    rounds: int = 0
    together: int = 0
    output_tokens: int = 0
    verified: int = 0
    accepted: int = 0
    verified_by_source: dict[str, int] = field(default_factory=dict)
    accepted_by_source: dict[str, int] = field(default_factory=dict)
    passes_by_accepted: dict[int, int] = field(default_factory=dict)
    rescued: int = 0
    lossy: bool = False
    hits: int = 0
    dropped: int = 0
    closed: bool = False
    target_busy: float = 0.0
    draft_busy: float = 0.0
    draft_steps: int = 0
    draft_nodes: int = 0
    waited: float = 0.0
    cached_tokens: int = 0
    submitted: float = 0.0
    started: float = 0.0
    first_token: float = 0.0
    ended: float = 0.0
    label_logprobs: tuple[float, ...] = ()
    resumed: dict[str, int] = field(default_factory=dict)

    def add_round(
        self, verdict: Verdict, tokens: int, verified: Sequence[str], accepted: Sequence[str], hit: bool, now: float
    ) -> None:
        """Count a window: its verdict, the committed tokens, and the drafters of verified and accepted candidates."""
        if self.rounds:
            self.target_busy += verdict.elapsed
        else:
            self.first_token, self.cached_tokens = now, verdict.cached
        self.rounds += 1
        self.together += verdict.together
        self.output_tokens += tokens
        self.verified += len(verified)
        self.accepted += len(accepted)
        self.hits += hit
        self.closed |= verdict.closed
        _count(self.verified_by_source, verified)
        _count(self.accepted_by_source, accepted)
        _count(self.passes_by_accepted, [len(accepted)])

    def add_draft_step(self, nodes: int, elapsed: float) -> None:
        """Count a draft step that expanded `nodes` candidates."""
        self.draft_steps += 1
        self.draft_nodes += nodes
        self.draft_busy += elapsed

    def add_resumption(self, reasons: Sequence[str]) -> None:
        """Count that another engine goes on with the answer."""
        self.resumed = _added(self.resumed, dict.fromkeys(reasons, 1))

    def after(self, earlier: RequestStats) -> RequestStats:
        """Return the sum with the counts of another engine, which began this answer."""
        sums = {name: getattr(earlier, name) + getattr(self, name) for name in _COUNTS}
        first = earlier if earlier.rounds else self  # later engines read prompt and answer
        began = {name: getattr(first, name) for name in ("started", "first_token", "cached_tokens")}
        either = {name: getattr(earlier, name) or getattr(self, name) for name in ("closed", "lossy")}
        tables: dict[str, Any] = {name: _added(getattr(earlier, name), getattr(self, name)) for name in TABLES}
        return replace(self, **sums | began, **either, **tables, submitted=earlier.submitted)

    @property
    def speculative_decoding(self) -> dict[str, Any]:
        """These counts in vLLM's words: `metrics.speculative_decoding` of its responses.

        `acceptance_histogram[n]` is the number of passes that accepted n candidates. vLLM's `num_spec_tokens` is left
        out: the number of candidates is chosen for each pass.
        """
        histogram = [self.passes_by_accepted.get(n, 0) for n in range(max(self.passes_by_accepted, default=-1) + 1)]
        return {
            "mean_acceptance_length": self.mean_accepted_length,
            "draft_acceptance_rate": self.acceptance_rate,
            "acceptance_histogram": histogram,
            "num_spec_steps": self.rounds,
            "num_accepted_draft_tokens": self.accepted,
            "num_draft_tokens": self.verified,
        }

    @property
    def mean_accepted_length(self) -> float:
        """Tokens per target pass, the target's own token included."""
        return self.output_tokens / self.rounds if self.rounds else 0.0

    @property
    def acceptance_rate(self) -> float:
        """Share of the verified candidates that were accepted."""
        return self.accepted / self.verified if self.verified else 0.0

    @property
    def hit_rate(self) -> float:
        """Share of the rounds whose last token was already in the cache."""
        return self.hits / self.rounds if self.rounds else 0.0

    @property
    def mean_window(self) -> float:
        """Mean number of rows of a verification, the last committed token included."""
        return 1 + self.verified / self.rounds if self.rounds else 0.0

    @property
    def mean_batch_size(self) -> float:
        """Mean number of requests in a target pass, this one included."""
        return self.together / self.rounds if self.rounds else 0.0

    @property
    def mean_draft_width(self) -> float:
        """Mean number of candidates that a draft step expanded."""
        return self.draft_nodes / self.draft_steps if self.draft_steps else 0.0

    @property
    def tokens_per_second(self) -> float:
        """Decoding speed after the first token."""
        seconds = self.ended - self.first_token
        return (self.output_tokens - 1) / seconds if seconds > 0 and self.output_tokens > 1 else 0.0

    def seconds(self, now: float) -> float:
        """Return the seconds from the first token to the end, or to `now` while the answer is written."""
        return max(0.0, (self.ended or now) - self.first_token)

    @property
    def decode_seconds(self) -> float:
        """Seconds from the first token to the end."""
        return max(0.0, self.ended - self.first_token)


def _count(counts: dict[K, int], names: Sequence[K]) -> None:
    for name in names:
        counts[name] = counts.get(name, 0) + 1


_COUNTS = tuple(item.name for item in fields(RequestStats) if item.type in ("int", "float") and item.name not in TIMES)


def _added(a: Mapping[K, int], b: Mapping[K, int]) -> dict[K, int]:
    return {name: a.get(name, 0) + b.get(name, 0) for name in {**a, **b}}
