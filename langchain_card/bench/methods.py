"""The methods that `langchain-card bench` compares: this engine's schedules and drafts, and others' loops."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from langchain_card.bench.machine import proposed_of, words_of
from langchain_card.bench.method import Method, PeakMemory, Run
from langchain_card.bench.method_table import DRAFTS, PEERS, PLAIN, SCHEDULES
from langchain_card.bench.peers import Peer
from langchain_card.config import EngineConfig
from langchain_card.core.request import RequestStats, SamplingParams
from langchain_card.engine.engine import Engine
from langchain_card.errors import CARDError
from langchain_card.models.loader import Pair, resolve


@dataclass(frozen=True)
class Asked:
    """How all methods decode.

    Attributes:
        max_tokens: of an answer.
        temperature: 0 takes the likeliest token.
        batch: prompts at once.
    """

    max_tokens: int
    temperature: float = 0.0
    batch: int = 1


class Ours:
    """One of this engine's methods.

    Args:
        name: of the method.
        weights: in words.
        engine: that answers.
        asked: how.
    """

    def __init__(self, name: str, weights: str, engine: Engine, asked: Asked) -> None:
        self.name, self.weights = name, weights
        self._engine, self._asked = engine, asked
        self._peak = PeakMemory(cuda=any("cuda" in device for device in engine.devices.values()))

    def run(self, prompts: Sequence[Sequence[int]], repeat: int) -> Run:
        """Each method and repeat is a tenant of its own: none looks up what another one read or wrote."""
        asked = self._asked
        params = SamplingParams(
            max_tokens=asked.max_tokens,
            temperature=asked.temperature,
            schedule=SCHEDULES.get(self.name, "auto"),
            tenant=f"{self.name} {repeat}",
        )
        self._peak.reset()
        self._engine.announce(len(prompts))
        generations = [self._engine.submit(prompt, params) for prompt in prompts]
        done = [generation.result() for generation in generations]
        stats = [each.stats for each in done]
        begun, first, ended = (
            min(one.submitted for one in stats),
            min(one.first_token for one in stats),
            max(one.ended for one in stats),
        )
        return Run(
            tuple(each.token_ids for each in done),
            first - begun,
            ended - first,
            sum(one.output_tokens - 1 for one in stats),
            self._peak.read(),
            _figures(stats, ended - first),
        )


def _figures(stats: Sequence[RequestStats], seconds: float) -> dict[str, Any]:
    rounds, verified = sum(one.rounds for one in stats), sum(one.verified for one in stats)
    accepted = sum(one.accepted for one in stats)
    return {
        "schedule": stats[-1].schedule,
        "accepted_length": sum(one.output_tokens for one in stats) / rounds,
        "acceptance": accepted / verified if verified else None,
        "hit_rate": sum(one.hits for one in stats) / rounds,
        "target_busy": sum(one.target_busy for one in stats) / seconds if seconds > 0 else None,
        "draft_busy": sum(one.draft_busy for one in stats) / seconds if seconds > 0 else None,
    }


def open_methods(
    names: Sequence[str],
    config: EngineConfig,
    asked: Asked,
    held: contextlib.ExitStack,
    open_engine: Callable[[EngineConfig], Engine],
    report: Callable[[str], None],
) -> tuple[Engine, list[Method], dict[str, str]]:
    """The engine that all of ours share, the methods, and why others could not be loaded.

    Args:
        names: of the methods.
        config: of the engine.
        asked: how they decode.
        held: closes them.
        open_engine: loads one.
        report: told what is loaded.
    """
    engine = held.enter_context(open_engine(config))
    pair, methods, failed = resolve(config), list[Method](), dict[str, str]()
    for name in names:
        if name in PEERS:
            report(f"loading {name}")
            try:
                peer = Peer(name, config, asked.max_tokens, asked.temperature)
            except CARDError as error:
                failed[name] = str(error)
                continue
            held.callback(peer.close)
            methods.append(peer)
            continue
        own = engine
        if name in DRAFTS:
            own = held.enter_context(open_engine(replace(config, **DRAFTS[name])))
        methods.append(Ours(name, _weights(name, pair), own, asked))
    return engine, methods, failed


def _weights(name: str, pair: Pair) -> str:
    draft = None if name in (PLAIN, "ngram") else pair.draft
    words = [] if draft is None else [f"draft {words_of(draft)}", proposed_of(draft)]
    return ", ".join([words_of(pair.target), *filter(None, words)])
