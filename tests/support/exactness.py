"""Compares the engine's answers with the reference's, and keeps count of how they came about."""

from __future__ import annotations

import contextlib
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from transformers import DynamicCache

from langchain_card.config import EngineConfig
from langchain_card.core import messages as m
from langchain_card.core.drafter_state import DrafterState
from langchain_card.core.request import SamplingParams
from langchain_card.core.state import RequestState
from langchain_card.engine.engine import Engine
from langchain_card.models.loader import load_model, resolve
from tests.support import integer_kv, naive

NEAR_TIE = {"int8": 1e-2}
"""Share of the range of logits that rounding may move, by weights; 1e-3 for floats. In int8, transformers' attention
has other last bits than the engine's; they flip some roundings of activations to 7 bits."""
SLOW_TARGET = 0.008
"""Seconds that a target step takes longer under `parallel` with both drafters, so that the draft gets far ahead."""


@dataclass
class Figures:
    """What was compared, and how the rounds went."""

    compared: int = 0
    different: int = 0
    near_ties: int = 0
    verified: Counter[str] = field(default_factory=Counter)
    accepted: Counter[str] = field(default_factory=Counter)
    lengths: Counter[int] = field(default_factory=Counter)
    """Rounds by accepted candidates."""
    hits_after_misses: int = 0
    re_rooted: Counter[int] = field(default_factory=Counter)
    """Rounds by accepted candidates that were drafted under an older root and survived."""

    def compare(self, got: Sequence[int], wanted: naive.PlainAnswer, *, tie: float) -> None:
        """Counts tokens up to the first that differs, near-ties by `tie` apart; what follows it is another text."""
        first = next((i for i, (a, b) in enumerate(zip(got, wanted.token_ids)) if a != b), None)  # noqa: B905
        if first is None and len(got) != len(wanted.token_ids):
            first = min(len(got), len(wanted.token_ids))
        self.compared += len(got) if first is None else first + 1
        if first is None:
            return
        both = first < min(len(got), len(wanted.token_ids))
        if tie and both and naive.is_near_tie(wanted, first, got[first], tie):
            self.near_ties += 1
        else:
            self.different += 1

    def add(self, other: Figures) -> None:
        """Takes another comparison's in."""
        for one in fields(self):
            setattr(self, one.name, getattr(self, one.name) + getattr(other, one.name))

    def rates(self) -> dict[str, float]:
        """Accepted by verified candidates, per setting."""
        return {name: round(self.accepted[name] / count, 3) for name, count in self.verified.items()}

    def __str__(self) -> str:
        return (
            f"{self.compared} tokens compared, {self.different} different, {self.near_ties} near-ties; "
            f"accepted lengths {dict(sorted(self.lengths.items()))}, of re-rooted subtrees "
            f"{dict(sorted(self.re_rooted.items()))}, {self.hits_after_misses} hits after misses; "
            f"acceptance {self.rates()}"
        )


@contextlib.contextmanager
def watched(engine: Engine, figures: Figures) -> Iterator[None]:
    """Counts the rounds of every request while the block runs, and slows the target down."""
    driver = engine.backend
    target = driver._target
    intake = driver.coordinator.intake
    handle, verify, enter = driver.coordinator.handle, target.verify, intake.enter
    missed: dict[int, bool] = {}  # whether the round before was a miss
    drafted: dict[int, dict[int, int]] = {}  # node -> output tokens that its drafter knew of

    def watching(event: m.Event) -> list[m.Effect]:
        if not isinstance(event, m.Verified):
            return handle(event)
        state = driver.coordinator.scheduler.running[event.verdict.request_id]
        hits, size, output_len = state.stats.hits, len(state.tree), len(state.output_ids)
        effects = handle(event)
        emit = next(effect for effect in effects if isinstance(effect, m.Emit))
        accepted, hit = sum(map(bool, emit.sources)), state.stats.hits > hits
        figures.lengths[accepted] += 1
        figures.hits_after_misses += hit and missed.get(emit.request_id, False)
        missed[emit.request_id] = not hit
        if len(state.tree) < size:  # nodes were numbered anew
            drafted.pop(emit.request_id, None)
            return effects
        nodes, known = state.tree.path[output_len + 1 :][:accepted], drafted.get(emit.request_id, {})
        figures.re_rooted[sum(known.get(node, output_len) < output_len for node in nodes)] += 1
        return effects

    def entering(state: RequestState, source: DrafterState, proposal: m.Proposal) -> None:
        before = len(state.tree)
        enter(state, source, proposal)
        new = dict.fromkeys(range(before, len(state.tree)), proposal.applied_len)
        drafted.setdefault(proposal.request_id, {}).update(new)

    def slow(windows: Sequence[m.Window]) -> list[m.Verdict]:
        running = driver.coordinator.scheduler.running.values()
        if len(driver.transports) == 2 and any(state.schedule == "parallel" for state in running):
            time.sleep(SLOW_TARGET)
        return verify(windows)

    driver.coordinator.handle, target.verify = watching, slow  # type: ignore[method-assign]
    intake.enter = entering  # type: ignore[method-assign]
    yield
    intake.enter = enter  # type: ignore[method-assign]
    driver.coordinator.handle, target.verify = handle, verify  # type: ignore[method-assign]
    assert driver._target is target, "a target step failed, and a new target went on"


class Reference:
    """Answers of the naive loop over transformers' own attention and cache; with blocks in the same linear layers, and
    with plain attention over rounded keys and values."""

    def __init__(self, config: EngineConfig) -> None:
        spec = resolve(config).target
        self._integer_kv = spec.integer_kv
        if spec.form == "float":
            self.model = naive.load(config.model, spec.dtype)
        else:
            self.model = load_model(spec, fused=False)  # transformers' own decoder layers
            capped = getattr(self.model.config, "attn_logit_softcapping", None)
            floats = "eager" if capped else "sdpa"
            self.model.set_attn_implementation(integer_kv.NAME if spec.integer_kv else floats)

    def answer(self, prompt_ids: Sequence[int], params: SamplingParams, eos_ids: Sequence[int]) -> naive.PlainAnswer:
        cache = DynamicCache() if self._integer_kv else None  # one that drops nothing
        return naive.generate(naive.reading(self.model, cache), prompt_ids, params, eos_ids)


def compare(
    config: EngineConfig,
    asked: dict[str, Any],
    wanted: dict[str, naive.PlainAnswer],
    schedules: Sequence[str],
    figures: Figures,
) -> None:
    """Runs every setting of `asked` (name -> prompt ids and parameters) under every schedule."""
    tie = 0.0 if config.dtype == "float64" else NEAR_TIE.get(str(config.quantization), 1e-3)
    with Engine(config) as engine, watched(engine, figures):
        for name, (prompt_ids, options) in asked.items():
            first: tuple[int, ...] | None = None
            for schedule in schedules:
                params = SamplingParams(**options, schedule=schedule)  # type: ignore[arg-type]
                got = engine.submit(prompt_ids, params).result()
                first = first or got.token_ids
                assert config.quantization != "int8" or got.token_ids == first, "a schedule changed the bits of int8"
                figures.compare(got.token_ids, wanted[name], tie=tie)
                if config.has_draft and schedule != "plain":
                    figures.verified[f"{name} {schedule}"] += got.stats.verified
                    figures.accepted[f"{name} {schedule}"] += got.stats.accepted
