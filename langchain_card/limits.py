"""`Limits`: bounds for requests; `Pins`: fixed choices of the controller."""

from __future__ import annotations

from dataclasses import dataclass, fields

from langchain_card.errors import check_range

LEAST_NGRAM_BYTES = 1 << 16
_LEAST = {"max_ngram_bytes": LEAST_NGRAM_BYTES}
_MOST = {"max_prefix_bytes": 2**50}
_MAY_BE_ZERO = ("max_queue", "max_deaths", "max_stop_strings", "max_logit_bias", "max_banned_ids", "max_logprobs")


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds, checked before a request is queued or while it runs.

    Attributes:
        max_output_tokens: largest `max_tokens` of a request.
        max_stop_strings: stop strings per request.
        max_stop_chars: characters in one stop string.
        max_logit_bias: entries of a request's `logit_bias`.
        max_banned_ids: tokens that a request may ban.
        max_logprobs: alternatives reported beside each token of an answer.
        max_grammar_bytes: size of one grammar, its JSON schema included.
        max_grammar_seconds: time to check one grammar, in a process of its own.
        max_grammar_cache_bytes: size of all compiled grammars that are kept; the least recently used go first.
        max_tenant_chars: characters in the name of a tenant, and in that of a session.
        max_ngram_bytes: text that the n-gram drafter keeps, of all tenants; the least recently used goes first.
        max_prefix_bytes: size of all files of `prefix_cache="folder"`; the least recently used go first.
        max_queue: requests that wait at once.
        max_num_seqs: requests decoded at once. None: up to 16, as many as half of the free memory holds; one if `exact`
            is `"strict"`, where a step always costs as much as a full batch.
        max_step_rows: rows of one target pass: the windows of all requests; what is left is used to read prompts.
        max_window: rows of one verification, the last committed token included.
        max_lead: depth of candidates at which a drafter gets no more steps; granted steps may go on for as much again.
        max_draft_width: candidates that one draft step expands at most.
        max_tree_nodes: candidates per request. Above it dead ones are removed; above twice that, new ones are refused.
        max_unread: tokens that may wait for a slow consumer before its request is paused.
        max_failures: target steps in a row that may fail with one request before that request fails. It fails alone if
            `max_deaths` is not smaller.
        max_deaths: deaths of one worker within `deaths_seconds` after which it is not restarted. A request may outlive
            as many engines in processes of their own.
        deaths_seconds: period in which `max_deaths` counts.
        silence_seconds: time after which an isolated engine that reports nothing is killed and restarted.
        restart_seconds: pause before a dead worker is restarted; it doubles with every further death.
    """

    max_output_tokens: int = 32_768
    max_stop_strings: int = 16
    max_stop_chars: int = 256
    max_logit_bias: int = 300
    max_banned_ids: int = 1024
    max_logprobs: int = 20
    max_grammar_bytes: int = 1 << 18
    max_grammar_seconds: float = 5.0
    max_grammar_cache_bytes: int = 1 << 23
    max_tenant_chars: int = 256
    max_ngram_bytes: int = 1 << 26
    max_prefix_bytes: int = 1 << 32
    max_queue: int = 512
    max_num_seqs: int | None = None
    max_step_rows: int = 512
    max_window: int = 16
    max_lead: int = 16
    max_draft_width: int = 4
    max_tree_nodes: int = 1024
    max_unread: int = 1024
    max_failures: int = 2
    max_deaths: int = 5
    deaths_seconds: float = 60.0
    silence_seconds: float = 60.0
    restart_seconds: float = 0.1

    def __post_init__(self) -> None:
        for field_ in fields(self):
            if field_.name == "max_num_seqs" and self.max_num_seqs is None:
                continue
            low: float = 0.0 if field_.name.endswith("_seconds") else 0 if field_.name in _MAY_BE_ZERO else 1
            low = _LEAST.get(field_.name, low)
            check_range(field_.name, getattr(self, field_.name), low, _MOST.get(field_.name, 2**31))
        hint = "max_step_rows is too small: every request that runs has a row in each pass"
        check_range("max_num_seqs", self.num_seqs, 1, self.max_step_rows, hint)

    @property
    def num_seqs(self) -> int:
        """`max_num_seqs` once the engine has set it, else 1."""
        return self.max_num_seqs or 1


@dataclass(frozen=True, slots=True)
class Pins:
    """Fixed values for choices of the controller; None leaves a choice to it.

    Attributes:
        draft_width: candidates that one draft step expands, if there are so many.
        window: rows of one verification, the last committed token included, if there are so many candidates.
        lead: depth of candidates that a round waits for, or drafts, before it verifies.
    """

    draft_width: int | None = None
    window: int | None = None
    lead: int | None = None

    def __post_init__(self) -> None:
        for name, low in (("draft_width", 1), ("window", 1), ("lead", 0)):
            if getattr(self, name) is not None:
                check_range(name, getattr(self, name), low, 2**16)
