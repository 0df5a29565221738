"""Metrics for Prometheus, in a registry of the application's own: counts and times, never text of users."""

from __future__ import annotations

from dataclasses import dataclass

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from langchain_card.engine.generation import Generation
from langchain_card.ports import Health

CLIENT_LEFT = 499
"""Outcome of a request whose client disconnected; nginx uses the same number."""
_SECONDS = (0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 60, 120, 600)
_SPEEDS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000)
_SHARES = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1)


@dataclass(frozen=True, slots=True)
class EngineState:
    """State of the engine at one moment.

    Attributes:
        num_open: requests that run or wait.
        num_running: requests that run.
        workers: health by worker.
    """

    num_open: int
    num_running: int
    workers: dict[str, Health]


class Metrics:
    """Metrics of one application. `media_type` is the type of `text()`."""

    media_type = CONTENT_TYPE_LATEST

    def __init__(self) -> None:
        self._registry = registry = CollectorRegistry()
        outcome = "Requests by route and outcome: the status, of errors within a stream, too; 499 where a client left."
        self._requests = Counter("langchain_card_requests", outcome, ["route", "outcome"], registry=registry)
        self._prompt = Counter("langchain_card_prompt_tokens", "Tokens of prompts.", registry=registry)
        cached = "Tokens of prompts that need not be read, known from earlier requests."
        self._cached = Counter("langchain_card_cached_tokens", cached, registry=registry)
        self._output = Counter("langchain_card_output_tokens", "Tokens of answers.", registry=registry)
        verified = "Candidates that were checked."
        self._verified = Counter("langchain_card_verified_candidates", verified, ["source"], registry=registry)
        accepted = "Tokens of answers that a drafter had proposed."
        self._accepted = Counter("langchain_card_accepted_tokens", accepted, ["source"], registry=registry)
        passes = "Passes of the target that verified candidates or wrote a token."
        self._passes = Counter("langchain_card_passes", passes, registry=registry)
        by_position = "Accepted candidates by their place among those of their pass, from 0."
        self._by_position = Counter(
            "langchain_card_accepted_tokens_per_position", by_position, ["position"], registry=registry
        )
        rescued = "Tokens of answers that a lossy rule kept in the place of the target's own."
        self._rescued = Counter("langchain_card_rescued_tokens", rescued, registry=registry)
        resumed = "Times that another engine went on with an answer."
        self._resumed = Counter("langchain_card_resumed", resumed, ["reason"], registry=registry)
        first = "Seconds until the first token of an answer, queueing included."
        self._first = Histogram(
            "langchain_card_time_to_first_token_seconds", first, buckets=_SECONDS, registry=registry
        )
        speed = "Tokens a second of an answer, after its first."
        self._speed = Histogram("langchain_card_tokens_per_second", speed, buckets=_SPEEDS, registry=registry)
        hits = "Rounds of an answer whose last token was already in the cache / rounds."
        self._hits = Histogram("langchain_card_hit_rate", hits, buckets=_SHARES, registry=registry)

        self._open = Gauge("langchain_card_open_requests", "Requests that run or wait.", registry=registry)
        self._running = Gauge("langchain_card_running_requests", "Requests being answered.", registry=registry)
        well = "1 where a worker does what is due, 0 where not."
        self._worker_ok = Gauge("langchain_card_worker_ok", well, ["worker"], registry=registry)

    def text(self, state: EngineState) -> bytes:
        """Return all metrics in Prometheus's text format; the gauges show `state`."""
        self._open.set(state.num_open)
        self._running.set(state.num_running)
        self._worker_ok.clear()  # drops workers that are gone
        for name, health in state.workers.items():
            self._worker_ok.labels(name).set(health.ok)
        return generate_latest(self._registry)

    def count_request(self, route: str, outcome: int) -> None:
        """Count a finished request.

        Args:
            route: the route's pattern, not the path that the client sent.
            outcome: an HTTP status.
        """
        self._requests.labels(route, str(outcome)).inc()

    def count_answer(self, generation: Generation) -> None:
        """Count an answer that is complete or abandoned."""
        stats = generation.stats
        if stats is None:
            return
        self._prompt.inc(len(generation.request.prompt_ids))
        self._cached.inc(stats.cached_tokens)
        self._output.inc(stats.output_tokens)
        for counter, by_source in (
            (self._verified, stats.verified_by_source),
            (self._accepted, stats.accepted_by_source),
        ):
            for source, count in [*by_source.items()]:
                counter.labels(source).inc(count)
        self._passes.inc(stats.rounds)
        for accepted, passes in [*stats.passes_by_accepted.items()]:
            for position in range(accepted):
                self._by_position.labels(str(position)).inc(passes)
        self._rescued.inc(stats.rescued)
        for reason, count in [*stats.resumed.items()]:
            self._resumed.labels(reason).inc(count)
        if stats.rounds:
            self._first.observe(stats.first_token - stats.submitted)
            self._hits.observe(stats.hit_rate)
        if generation.finished and stats.tokens_per_second:
            self._speed.observe(stats.tokens_per_second)


class RequestCounter:
    """ASGI middleware that counts each request when it ends. `scope["state"]["outcome"]` overrides the status."""

    def __init__(self, app: ASGIApp, metrics: Metrics) -> None:
        self._app, self._metrics = app, metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        status = CLIENT_LEFT
        state = scope.setdefault("state", {})

        async def send_noting_status(message: Message) -> None:
            nonlocal status
            status = message.get("status", status)
            await send(message)

        try:
            await self._app(scope, receive, send_noting_status)
        finally:
            route = getattr(scope.get("route"), "path", "other")
            self._metrics.count_request(route, state.get("outcome", status))
