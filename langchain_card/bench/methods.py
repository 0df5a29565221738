"""The methods of this engine that `langchain-card bench` compares, and the loading of all methods."""

from __future__ import annotations

import asyncio
import contextlib
import heapq
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from langchain_card.bench.load import keep_busy, laps
from langchain_card.bench.machine import number_format, proposed_tokens
from langchain_card.bench.method import Method, PeakMemory, Run, Served, longest_gap
from langchain_card.bench.method_table import DRAFTS, PEERS, PLAIN, SCHEDULES, own_fields
from langchain_card.bench.peers.peer import open_peer
from langchain_card.config import EngineConfig
from langchain_card.core.request import RequestStats, SamplingParams
from langchain_card.engine.engine import Engine
from langchain_card.engine.generation import Generation
from langchain_card.errors import CARDError
from langchain_card.models.loader import Pair, resolve


@dataclass(frozen=True)
class DecodeOptions:
    """Options that all compared methods decode with.

    Attributes:
        temperature: 0 is greedy decoding.
        ignore_end: True continues an answer after the end of text, up to its maximum of tokens.
    """

    temperature: float = 0.0
    ignore_end: bool = False


class EngineMethod:
    """A `Method` that runs on an engine of this package.

    Args:
        name: of the method.
        weights: number format of the weights, in words.
        engine: answers the prompts.
        options: of all answers.
    """

    def __init__(self, name: str, weights: str, engine: Engine, options: DecodeOptions) -> None:
        self.name, self.weights = name, weights
        self._engine, self._options = engine, options
        self._peak = PeakMemory(cuda=any("cuda" in device for device in engine.devices.values()))

    def run(self, prompts: Sequence[Sequence[int]], max_tokens: int, repeat: int) -> Run:
        """Answer a batch of prompts, as a tenant per method and repeat, so that caches are not shared."""
        params = self._params(max_tokens, f"{self.name} {repeat}")
        self._peak.reset()
        self._engine.announce(len(prompts))
        generations = [self._engine.submit(prompt, params) for prompt in prompts]
        arrivals = asyncio.run(_read(generations))
        answers = [generation.completion() for generation in generations]
        stats = [answer.stats for answer in answers]
        first, ended = min(s.first_token for s in stats), max(s.ended for s in stats)
        return Run(
            tuple(answer.token_ids for answer in answers),
            first - min(s.submitted for s in stats),
            ended - first,
            sum(s.output_tokens - 1 for s in stats),
            longest_gap(heapq.merge(*arrivals)),
            self._peak.read(),
            _figures(stats, ended - first),
        )

    def serve(
        self, prompts: Sequence[Sequence[int]], max_tokens: Sequence[int], requests: int, tenant: str
    ) -> list[Served]:
        """Answer prompts, so many requests at once, as tenants whose texts no other tenant uses."""

        def answer_as(lap: int, prompt: Sequence[int], limit: int) -> Served:
            answer = self._engine.submit(prompt, self._params(limit, f"{tenant} {lap}")).result()
            return Served(answer.token_ids, answer.stats.submitted, answer.stats.first_token, answer.stats.ended)

        return keep_busy(answer_as, requests, laps(prompts), prompts, max_tokens)

    def _params(self, max_tokens: int, tenant: str) -> SamplingParams:
        return SamplingParams(
            max_tokens=max_tokens,
            temperature=self._options.temperature,
            schedule=SCHEDULES.get(self.name, "auto"),
            banned_ids=self._engine.eos_ids if self._options.ignore_end else (),
            tenant=tenant,
        )


async def _read(generations: Sequence[Generation]) -> list[list[float]]:
    """Read answers as they are written; return the times of their tokens."""

    async def read(generation: Generation) -> list[float]:
        return [time.perf_counter() async for _ in generation]

    return await asyncio.gather(*map(read, generations))


def _figures(stats: Sequence[RequestStats], seconds: float) -> dict[str, Any]:
    rounds, verified = sum(s.rounds for s in stats), sum(s.verified for s in stats)
    accepted = sum(s.accepted for s in stats)
    return {
        "schedule": stats[-1].schedule,
        "accepted_length": sum(s.output_tokens for s in stats) / rounds,
        "acceptance": accepted / verified if verified else None,
        "hit_rate": sum(s.hits for s in stats) / rounds,
        "target_busy": sum(s.target_busy for s in stats) / seconds if seconds > 0 else None,
        "draft_busy": sum(s.draft_busy for s in stats) / seconds if seconds > 0 else None,
    }


def open_methods(
    names: Sequence[str],
    config: EngineConfig,
    options: DecodeOptions,
    stack: contextlib.ExitStack,
    open_engine: Callable[[EngineConfig], Engine],
    report: Callable[[str], None],
) -> tuple[Engine, list[Method], dict[str, str]]:
    """Load the methods.

    Args:
        names: of the methods.
        config: of the engine.
        options: of all answers.
        stack: closes engines and peers when it is closed.
        open_engine: loads an engine.
        report: receives the progress.

    Returns:
        The engine with `config`, the methods, and the errors of peers that could not be loaded, by name.
    """
    engine = stack.enter_context(open_engine(config))
    config = replace(config, draft_device=engine.config.draft_device)  # peers run the weights that were chosen
    pair, methods, failed = resolve(config), list[Method](), dict[str, str]()
    for name in names:
        if name in PEERS:
            report(f"loading {name}")
            try:
                peer = open_peer(name, config, options.temperature, ignore_end=options.ignore_end)
            except CARDError as error:
                failed[name] = str(error)
                continue
            stack.callback(peer.close)
            methods.append(peer)
            continue
        method_engine = engine
        if (fields := own_fields(name)) is not None:
            method_engine = stack.enter_context(open_engine(replace(config, **fields)))
        methods.append(EngineMethod(name, _weights(name, pair), method_engine, options))
    return engine, methods, failed


def _weights(name: str, pair: Pair) -> str:
    draft = pair.draft if name in DRAFTS or (name in SCHEDULES and name != PLAIN) else None
    words = [] if draft is None else [f"draft {number_format(draft)}", proposed_tokens(draft)]
    return ", ".join([number_format(pair.target), *filter(None, words)])
