"""Several drafters grow one tree, each as far as it is to be believed: on the virtual clock, where time is exact."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from typing import Any

import pytest

from langchain_card.config import Schedule
from langchain_card.core import messages as m
from langchain_card.core import query
from langchain_card.core.candidates import CandidateTree, frontier
from langchain_card.core.controller import Controller
from langchain_card.core.coordinator import Coordinator
from langchain_card.core.drafter_state import Calibration, DrafterState
from langchain_card.core.messages import Proposal
from langchain_card.core.policy import Load, TextStats
from langchain_card.core.query import DrafterTraits
from langchain_card.core.request import Request, RequestStats, SamplingParams
from langchain_card.limits import Limits
from langchain_card.ports import Budget, Drafter
from tests.simulation import FixedPolicy
from tests.simulation.simulated import Simulation
from tests.simulation.toy import ToyDrafter, ToyModel, ToyTarget

TOKENS, ROUNDS = 200, 4
SCRIPT, VAGUE = (ToyModel(200, top=top, stated=top) for top in (0.85, 0.6))


class Boaster:
    """A long chain in every round, each token all but certain; `right` of the chains are the answer."""

    name, paced = "boaster", False

    def __init__(self, model: ToyModel, right: float) -> None:
        self.model, self.right = model, right
        self.texts: dict[int, tuple[int, ...]] = {}
        self.prompts: dict[int, int] = {}
        self.rng = random.Random(0)
        self.epoch = 0

    def begin(self, request: Request, output_ids: Sequence[int]) -> None:
        self.texts[request.request_id] = (*request.prompt_ids, *output_ids)
        self.prompts[request.request_id] = len(request.prompt_ids)

    def correct(self, request_id: int, start: int, token_ids: Sequence[int]) -> None:
        known = len(self.texts[request_id]) - self.prompts[request_id]
        self.texts[request_id] += tuple(token_ids[known - start :])

    def step(self, budgets: Sequence[Budget]) -> list[Proposal]:
        return [self._propose(budget.request_id) for budget in budgets]

    def end(self, request_id: int) -> None:
        del self.texts[request_id]

    def close(self) -> None:
        self.texts.clear()

    def _propose(self, request_id: int) -> Proposal:
        self.epoch += 1
        text, count = self.texts[request_id], 12
        answer = self.model.answer(text, count)
        wrong = tuple((token + 1) % self.model.vocab_size for token in answer)
        chain = answer if self.rng.random() < self.right else wrong
        applied, scores = len(text) - self.prompts[request_id], (math.log(0.95),) * count
        return Proposal(self.name, request_id, self.epoch, 0, applied, 1, tuple(range(count)), chain, scores)


def decode(
    beside: Sequence[Drafter], *, model: bool = True, step: float = 0.04, script: ToyModel = SCRIPT
) -> tuple[float, int]:
    """Seconds of four answers one after the other, and candidates of "boaster" that came true.

    Args:
        beside: drafters that cost nothing.
        model: whether there is one more, whose steps take time.
        step: seconds of one.
        script: what all of them play.
    """
    drafter = ToyDrafter(script, step_time=lambda rows: step + 0.004 * rows) if model else None
    target = ToyTarget(script, lambda rows: 0.1 + 0.01 * rows)
    simulation = Simulation(target, drafter, Controller(shared_device=True), Limits(), beside=beside)
    found: list[RequestStats] = []
    for i in range(ROUNDS):
        params = SamplingParams(max_tokens=TOKENS, schedule="sequential")
        (answer,) = simulation.run([Request(i, (1, i + 2), params)])
        assert tuple(answer.token_ids) == script.answer((1, i + 2), TOKENS)
        found.append(answer.stats)
    return simulation.now, sum(stats.accepted_by_source.get("boaster", 0) for stats in found)


def boaster(right: float) -> list[Drafter]:
    return [Boaster(SCRIPT, right)]


def test_a_boaster_costs_next_to_nothing() -> None:
    """It is never right and always sure, and there before any other."""
    alone, _ = decode([])
    with_it, accepted = decode(boaster(0.0))
    assert accepted == 0 and with_it < 1.05 * alone


def test_without_judgement_it_costs_all_that_drafting_gains(monkeypatch: pytest.MonkeyPatch) -> None:
    """The planted bug of the test above."""
    monkeypatch.setattr(Controller, "trust", lambda self, source, stated: (stated, stated))
    assert decode(boaster(0.0))[0] > 1.3 * decode([])[0]


def test_plain_is_hardly_slowed_by_a_drafter_that_is_always_wrong() -> None:
    plain = TOKENS * ROUNDS * 0.11
    assert decode(boaster(0.0), model=False)[0] < plain / 0.95


def test_one_that_is_often_right_is_asked_first() -> None:
    alone, _ = decode([])
    with_it, accepted = decode(boaster(0.9))
    assert accepted > 0.5 * TOKENS * ROUNDS and with_it < 0.8 * alone


def test_who_repeats_what_others_say_is_judged_by_its_own_words() -> None:
    """An honest one proposes the same tokens first, each with a small chance."""
    policy = Controller(shared_device=True)
    for _ in range(500):
        tree = CandidateTree(0)
        for source, chance in (("honest", 0.05), ("boaster", 0.95)):
            stated = math.log(chance)
            tree.insert(0, 1, stated, source, trusted_logps=policy.trust(source, stated))
        policy.observe_candidate(*tree.origins[1], taken=False, unlisted=False)
    assert math.exp(policy.trust("boaster", math.log(0.95))[0]) < 0.1 and tree.sources[1] == "honest"


def test_who_fills_the_tree_leaves_room_for_who_knows() -> None:
    tree, boaster, model = CandidateTree(0), DrafterState(), DrafterState()
    for source, count, from_model in ((boaster, 3000, False), (model, 2, True)):
        scores = (-9.0,) * count if source is boaster else (-0.1,) * count
        tokens = tuple(range(count)) if source is boaster else tuple(range(5000, 5000 + count))
        name = "boaster" if source is boaster else "model"
        proposal = Proposal(name, 0, 0, 0, 0, 1, (0,) * count, tokens, scores)
        assert source.admit(proposal, tree, 10_000)
        assert source.enter(proposal, tree, 2048, from_model=from_model) == (3000 - 1024 if source is boaster else 0)


def test_both_are_better_than_either() -> None:
    model, _ = decode([], script=VAGUE, step=0.005)
    free, _ = decode([ToyDrafter(VAGUE, "free", 2, paced=False)], script=VAGUE, model=False)
    both, _ = decode([ToyDrafter(VAGUE, "free", 2, paced=False)], script=VAGUE, step=0.005)
    assert both < 0.95 * min(model, free)


def test_a_cheap_draft_leads_on_behind_what_is_there() -> None:
    """Its first steps bring little that is new: they pay by those that follow."""
    model, _ = decode([], step=0.001)
    both, _ = decode([ToyDrafter(SCRIPT, "free", 2, paced=False)], step=0.001)
    assert both < 1.05 * model


def test_a_drafter_is_not_asked_for_what_it_cannot_reach(monkeypatch: pytest.MonkeyPatch) -> None:
    """Others' candidates look open to it for ever: steps would be granted until no more are allowed."""
    free = lambda: [ToyDrafter(SCRIPT, "free", 2, paced=False)]  # noqa: E731
    sane, _ = decode(free())
    every = lambda tree, published, *rest: frontier(tree, range(len(tree)), *rest)  # noqa: E731
    monkeypatch.setattr(query, "frontier", every)  # the planted bug
    assert decode(free())[0] > 1.2 * sane


def test_a_text_knows_what_free_drafters_bring_it(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[TextStats] = []
    new_text = Controller.new_text
    monkeypatch.setattr(Controller, "new_text", lambda self: seen.append(new_text(self)) or seen[-1])
    decode([ToyDrafter(SCRIPT, "free", 2, paced=False)], model=False)
    decode([])
    for alone in seen[:ROUNDS]:
        assert alone.free_pace.value > 1.2 and alone.free_rows.value > 1.2
    for drafted in seen[ROUNDS:]:
        assert drafted.free_pace.value == drafted.free_rows.value == 1.0 and drafted.pace.value > 1.5


@pytest.mark.parametrize("schedule", ["parallel", "sequential"])
def test_a_load_tells_whether_a_draft_works_beside_its_passes(schedule: Schedule) -> None:
    loads: list[Load] = []

    class Recorded(Controller):
        def observe_pass(self, load: Load, *measured: Any) -> None:
            loads.append(load)
            super().observe_pass(load, *measured)

    drafter = ToyDrafter(SCRIPT, step_time=lambda rows: 0.01)
    simulation = Simulation(ToyTarget(SCRIPT, lambda rows: 0.1), drafter, Recorded(shared_device=True), Limits())
    simulation.run([Request(0, (1, 2), SamplingParams(max_tokens=30, schedule=schedule))])
    beside = [load.drafting for load in loads]
    assert not beside[0], "the draft waits for the first token"
    assert all(beside[1:]) if schedule == "parallel" else not any(beside)


def test_what_is_stated_is_lowered_to_what_came_true_and_never_raised() -> None:
    judged = Calibration()
    for i in range(2000):
        judged.learn(math.log(0.9), taken=i % 2 == 0)
        judged.learn(math.log(0.3), taken=i % 2 == 0)
        judged.learn(-math.inf, taken=False)
    assert math.exp(judged.score(math.log(0.9))) == pytest.approx(0.5, abs=0.05)
    assert judged.score(math.log(0.3)) == math.log(0.3), "it knows better than it says"
    assert judged.score(math.log(0.7)) == math.log(0.7), "nothing was learnt of the like"
    assert judged.score(-math.inf) == -math.inf and judged.score(0.0) == 0.0


def test_the_cost_of_steps_and_the_origin_of_scores_are_two_properties() -> None:
    """A drafter may be costly without a model (`dear`), and have a model without a cost (`model`)."""
    traits = [DrafterTraits("dear", paced=True), DrafterTraits("model", paced=False, from_model=True)]
    core = Coordinator(traits, Limits(), FixedPolicy())
    core.handle(m.Submitted(Request(0, (1,), SamplingParams(max_tokens=9, schedule="sequential")), 0.0))
    begun = core.handle(m.TargetReady(0.0))
    assert [effect.worker for effect in begun if isinstance(effect, m.Grow)] == ["model"], (
        "a costly step is weighed first"
    )
    state = core.scheduler.running[0]
    for name, score in (("dear", -0.1), ("model", -2.0)):
        proposal = Proposal(
            name, 0, 0, 0, 0, 1, (0,), (7,), (score,), (0,), incarnation=state.drafters[name].incarnation
        )
        core.handle(m.Proposed(proposal, 0.0))
    core.intake.absorb(state)
    node = state.tree.first_child()
    assert state.tree.origins[node] == ("model", -2.0) and state.tree.listed_by_model == {node}
