"""By hand: a coordinator, its target's answers and its drafter's proposals."""

from __future__ import annotations

from collections.abc import Sequence

from langchain_card.core import messages as m
from langchain_card.core.controller import Controller
from langchain_card.core.coordinator import Coordinator
from langchain_card.core.query import DrafterTraits
from langchain_card.limits import Limits


def coordinator(**limits: int) -> Coordinator:
    return Coordinator([DrafterTraits("toy", False)], Limits(**limits), Controller(shared_device=True))


def run_round(core: Coordinator, target_ids: Sequence[int], now: float) -> list[m.Effect]:
    verify = next(e for e in core.handle(m.TargetReady(now)) if isinstance(e, m.Verify))
    window = verify.windows[0]
    ids = (*target_ids, *[0] * (len(window.token_ids) - len(target_ids)))
    return core.handle(m.Verified(m.Verdict(window.request_id, window.step_id, ids, 0.1), now))


def propose(core: Coordinator, tokens: Sequence[int], epoch: int, base: int) -> None:
    scores = (-0.1,) * len(tokens)
    incarnation = core.scheduler.running[0].drafters["toy"].incarnation
    parents = tuple(range(len(tokens)))
    chain = m.Proposal("toy", 0, epoch, 0, base, 1, parents, tuple(tokens), scores, incarnation=incarnation)
    core.handle(m.Proposed(chain, 0.0))
