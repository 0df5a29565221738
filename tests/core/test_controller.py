"""The controller: what it decides, and what it learns."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import pytest

from langchain_card.config import EngineConfig, Schedule
from langchain_card.core.candidates import Frontier
from langchain_card.core.controller import LEAST_READ, MIN_CHANCE, READ_STEPS, Controller
from langchain_card.core.costs import Mean, StepTimes
from langchain_card.core.policy import Load, TextStats
from langchain_card.core.request import Request, SamplingParams
from langchain_card.errors import InvalidInputError
from langchain_card.limits import Limits, Pins
from tests.simulation import ToyDrafter, ToyModel, ToyTarget
from tests.simulation.simulated import Simulation, simulate

TEXT = TextStats(hits=Mean(0.8), pace=Mean(1.0))
"""A text that no test changes."""


def pays(policy: Controller, load: Load, chances: Sequence[float], lead: int) -> bool:
    """Return whether a lone request should take one more draft step."""
    return policy.draft_pays(load, [TEXT], [Frontier(chances, lead=lead)]) == [True]


def learnt(schedule: str, draft: Mapping[int, float], target: Mapping[int, float], per_token: float) -> Controller:
    """A controller that has seen these step times and one token in `per_token` seconds."""
    policy, load = Controller(shared_device=schedule == "sequential"), Load(schedule)  # type: ignore[arg-type]
    for nodes, elapsed in [*draft.items()] * 2:
        policy.observe_draft_step(load, TEXT.copy(), nodes, nodes, elapsed, 1)
    for rows, elapsed in target.items():
        policy.observe_pass(load, [TEXT], rows, 1, elapsed, per_token)
    return policy


def test_draft_steps_must_pay() -> None:
    load = Load("sequential")
    assert pays(Controller(shared_device=True), load, [0.5], 0), "nothing is known yet: measure"
    policy = learnt("sequential", {1: 0.06}, {1: 0.10, 4: 0.13, 8: 0.17}, 0.10)
    assert pays(policy, load, [0.9], 0) and not pays(policy, load, [0.5], 0)
    assert pays(policy, load, [0.5, 0.45], 0), "several nodes a step count together"


def test_a_free_running_draft_is_waited_for_while_the_target_is_the_slower() -> None:
    load = Load("parallel")
    policy = learnt("parallel", {1: 0.01, 4: 0.01}, {1: 0.1, 9: 0.1}, 0.025)
    assert pays(policy, load, [0.9], 3) and not pays(policy, load, [0.5], 3)
    assert not pays(policy, load, [0.9], 9), "ten layers a pass: the draft is the slower"
    assert policy.patience(load) == pytest.approx(0.02)


@pytest.mark.parametrize("pins", [Pins(), Pins(lead=2)])
def test_a_round_that_may_not_wait_would_find_no_step_that_pays(pins: Pins) -> None:
    """Costs some milliseconds."""
    policy, load = learnt("parallel", {1: 1.0, 4: 1.5}, {1: 4.0, 8: 4.5}, 2.0), Load("parallel")
    policy.pins = pins
    for lead in range(8):
        may = policy.may_wait(load, lead)
        assert may == (pins.lead is not None or (lead + 1) * 1.0 < 4.0)
        assert may or not any(pays(policy, load, [0.9] * nodes, lead) for nodes in (1, 2, 4, 8))
    assert Controller(shared_device=False).may_wait(load, 0), "nothing is known yet: the first step is measured"


def test_a_node_is_expanded_when_its_row_costs_less_than_it_saves() -> None:
    free = learnt("parallel", {1: 0.01, 5: 0.01}, {1: 0.1}, 0.05).grant(Load("parallel"), hit=True)
    dear = learnt("parallel", {1: 0.01, 5: 0.02}, {1: 0.1}, 0.05).grant(Load("parallel"), hit=True)
    assert free.min_chance == MIN_CHANCE and dear.min_chance == pytest.approx(0.25)
    assert free.widths == (Limits().max_draft_width,) * Limits().max_lead
    missed = learnt("parallel", {1: 0.01}, {1: 0.1}, 0.05).grant(Load("parallel"), hit=False)
    assert missed.widths[:3] == (1, 1, Limits().max_draft_width), "narrow after a miss, then wide"


def test_leave_is_for_layers_whatever_a_step_brings() -> None:
    """A draft above another drafter gets as many steps as bring the largest lead."""
    policy, load = learnt("parallel", {1: 0.01}, {1: 0.1}, 0.05), Load("parallel")
    for _ in range(100):
        policy.observe_draft_step(load, TEXT.copy(), 5, 5, 0.01, 4)
    assert len(policy.grant(load, hit=True).widths) in (4, 5), "16 layers, by steps of 4"
    for _ in range(100):
        policy.observe_draft_step(load, TEXT.copy(), 50, 50, 0.01, 50)
    assert len(policy.grant(load, hit=True).widths) == 1


def test_requests_that_share_draft_steps_make_them_cheap() -> None:
    """Rows cost nothing in steps of 4 to 16 nodes, though one request's share of them differs."""
    load, policy = Load("parallel", 8), Controller(shared_device=False)
    for nodes, together in ((1, 4), (1, 8), (2, 8), (2, 16), (4, 16)):
        policy.observe_draft_step(load, TEXT.copy(), nodes, together, 0.01 * nodes / together, 1)
    assert policy.grant(load, hit=True).min_chance == MIN_CHANCE
    assert policy.costs_of(load).draft_share(1) == pytest.approx(0.01 / policy.costs_of(load).sharing.value)


def test_a_window_is_as_wide_as_its_rows_pay() -> None:
    load = Load("sequential")
    assert Controller(shared_device=True).windows(load, [TEXT], [[0.9, 0.1]]) == [1], (
        "nothing is known yet: the likely ones"
    )
    policy = learnt("sequential", {}, {1: 0.10, 4: 0.106, 8: 0.18}, 0.10)
    times = policy.costs["sequential", 1, 0].target
    assert times.at(2) == pytest.approx(0.102) and times.at(6) == pytest.approx(0.143)
    assert policy.windows(load, [TEXT], [[0.9, 0.05, 0.05, 0.05]]) == [3], "rows are nearly free up to the knee"
    assert policy.windows(load, [TEXT], [[0.9, 0.8, 0.7, 0.6, 0.5, 0.1]]) == [5], "behind it they must pay"
    assert policy.windows(load, [TEXT], [[0.01]]) == [0]


def test_fewer_rows_than_were_measured_are_tried() -> None:
    """Where rows are dear and eight requests have run, the last request does not fill its passes to eight rows."""
    policy = Controller(shared_device=True)
    for _ in range(20):
        policy.observe_draft_step(Load("sequential", 8), TEXT.copy(), 1, 8, 0.007, 1)
        policy.observe_pass(Load("sequential", 8), [TEXT] * 8, 16, 9, 0.36, 0.36)
        policy.observe_pass(Load("sequential", 8), [TEXT] * 8, 8, 8, 0.18, 0.18)
    for num_seqs in range(7, 1, -1):
        load, chances = Load("sequential", num_seqs), [[0.3] * 7] * num_seqs
        assert policy.windows(load, [TEXT] * num_seqs, chances) == [0] * num_seqs
        policy.observe_pass(load, [TEXT] * num_seqs, num_seqs, num_seqs, max(0.06, 0.0225 * num_seqs), None)
    assert policy.windows(Load("sequential"), [TEXT], [[0.3] * 7]) == [2], "three rows cost little more than one"


def test_what_a_pass_takes_without_candidates_is_measured_first() -> None:
    """Where it decides: two candidates seem free if another load's time was too long; many sure ones pay anyway."""
    policy, texts, candidates = Controller(shared_device=True), [TEXT] * 8, [[0.5], [0.5], *[[]] * 6]
    for _ in range(3):
        policy.observe_draft_step(Load("sequential", 16), TEXT.copy(), 1, 1, 0.05, 1)
        for rows, elapsed in ((8, 0.21), (10, 0.21), (16, 0.30)):
            policy.observe_pass(Load("sequential", 16), [TEXT] * rows, rows, rows, elapsed, elapsed)
    load, widths = Load("sequential", 8), list[int]()
    assert sum(policy.windows(load, texts, [[0.9] * 2] * 8)) == 16
    for _ in range(40):
        widths.append(sum(policy.windows(load, texts, candidates)))
        elapsed = 0.17 + 0.015 * widths[-1]
        policy.observe_pass(load, texts, 8 + widths[-1], 8, elapsed, elapsed)
    assert 0 < sum(widths) <= 6, "as a trial"


def test_requests_that_are_verified_together_compete_for_rows() -> None:
    load = Load("parallel", 2)
    policy = Controller(shared_device=False)
    for rows, elapsed in ((2, 0.10), (4, 0.104), (6, 0.18)):
        policy.observe_pass(load, [TEXT] * 2, rows, 2, elapsed, 0.10)
    assert policy.windows(load, [TEXT] * 2, [[0.9, 0.8, 0.3], [0.2, 0.1]]) == [2, 0], (
        "two rows are cheap, and go to the likely"
    )
    alone = Load("parallel", 1)
    assert policy.windows(alone, [TEXT], [[0.9, 0.8, 0.3]]) == [3], "of one request alone nothing is known yet"


def test_what_is_pinned_is_not_decided() -> None:
    pinned = Controller(shared_device=False, pins=Pins(draft_width=3, window=2, lead=2))
    load = Load("parallel")
    assert set(pinned.grant(load, hit=True).widths) == {3}
    assert pinned.windows(load, [TEXT], [[0.01, 0.01]]) == [1]
    assert pays(pinned, load, [0.01], 1) and not pays(pinned, load, [0.99], 2)
    with pytest.raises(InvalidInputError, match="draft_width"):
        Pins(draft_width=0)
    with pytest.raises(InvalidInputError, match=r"pins\.window.*16.*max_window"):
        EngineConfig(pins=Pins(window=17))


def slow_once(usual: Callable[[int], float], least: int, seconds: float) -> Callable[[int], float]:
    """Step times of which the first over `least` rows or more takes long."""
    cold = [seconds]
    return lambda rows: cold.pop() if rows >= least and cold else usual(rows)


@pytest.mark.parametrize("schedule", ["sequential", "parallel"])
@pytest.mark.parametrize("cold", [(0.1, 0.02), (20.0, 0.02), (0.1, 0.5), (0.1, 20.0)])
def test_one_slow_step_does_not_end_speculation(schedule: Schedule, cold: tuple[float, float]) -> None:
    """The first one over several rows, or of the draft, may take long: a page fault, a kernel that is built."""
    model, speeds = ToyModel(200, top=0.8, second=0.7), []
    for target_cold, draft_cold in ((0.1, 0.02), cold):
        policy = Controller(shared_device=schedule == "sequential")
        target = ToyTarget(model, slow_once(lambda rows: 0.1 + 0.002 * rows, 2, target_cold))
        drafter = ToyDrafter(model, step_time=slow_once(lambda _: 0.02, 1, draft_cold))
        for number in range(2):  # the second answer counts
            params = SamplingParams(max_tokens=200, schedule=schedule)
            _, stats = simulate(Request(number, (1, 2), params), target, drafter, policy, Limits())
        speeds.append(stats.tokens_per_second)
    assert speeds[1] > 0.9 * speeds[0]


def test_what_never_pays_is_tried_less_and_less() -> None:
    load, policy, text = Load("sequential"), Controller(shared_device=True), TEXT.copy()
    for _ in range(2):
        policy.observe_draft_step(load, text, 1, 1, 1.0, 1)
    policy.observe_pass(load, [text], 2, 1, 5.0, 0.1)
    policy.observe_pass(load, [text], 1, 1, 0.1, 0.1)
    drafted, verified = [], []
    for number in range(1, 300):
        candidates = [0.9] if pays(policy, load, [0.9], 0) else []
        if candidates:
            drafted.append(number)
            policy.observe_draft_step(load, text, 1, 1, 1.0, 1)
        (width,) = policy.windows(load, [text], [candidates])
        verified += [number] * width
        policy.observe_pass(load, [text], 1 + width, 1, 5.0 if width else 0.1, 5.0 if width else 0.1)
    assert drafted == [32, 32 + 65, 32 + 65 + 129]
    assert set(verified) <= set(drafted)


def test_a_trial_that_is_due_does_not_stand_in_the_way_of_what_pays() -> None:
    """Where prompt lookup keeps candidates coming, a lead is always there."""
    load, policy = Load("sequential"), learnt("sequential", {1: 0.02}, {1: 0.10, 4: 0.13}, 0.10)
    for _ in range(40):
        policy.observe_pass(load, [TEXT], 4, 2, 0.13, 0.13)
    assert pays(policy, load, [0.9], 3) and not pays(policy, load, [0.1], 3)
    assert pays(policy, load, [0.1], 0), "the trial"


def test_requests_that_wait_are_not_in_the_pass() -> None:
    """Four run, one is verified: its candidates came true, so they go on being verified."""
    load, policy = Load("sequential", 4), Controller(shared_device=True)
    for rows, elapsed in ((1, 0.10), (4, 0.13)):
        policy.observe_pass(load, [TEXT], rows, 1, elapsed, 0.10)
    for _ in range(30):
        assert policy.windows(load, [TEXT], [[0.9]]) == [1]
        policy.observe_pass(load, [TEXT], 2, 2, 0.11, 0.11)


@pytest.mark.parametrize("schedule", ["sequential", "parallel"])
def test_the_time_per_token_is_that_of_all_answers_together(schedule: Schedule) -> None:
    """Requests that drift apart are not counted twice."""
    model, policy = ToyModel(200, top=0.8), Recorder(shared_device=schedule == "sequential")
    target, drafter = ToyTarget(model, lambda rows: 0.1), ToyDrafter(model, step_time=lambda _: 0.03)
    limits = Limits(max_num_seqs=3)
    requests = [Request(i, (1, 2 + i), SamplingParams(max_tokens=60, schedule=schedule)) for i in range(3)]
    simulation = Simulation(target, drafter, policy, limits)
    simulation.run(requests)
    assert 0.9 * simulation.now < sum(policy.since) <= simulation.now


class Recorder(Controller):
    """A controller that keeps the times between passes."""

    def observe_pass(
        self, load: Load, texts: Sequence[TextStats], rows: int, tokens: int, elapsed: float, since_last: float | None
    ) -> None:
        self.since = [*getattr(self, "since", []), since_last or 0.0]
        super().observe_pass(load, texts, rows, tokens, elapsed, since_last)


def test_reading_never_comes_to_a_halt() -> None:
    """Small steps cost more for each token, and dearer tokens made the next step smaller: it ended with one token."""
    controller, load, unread, steps = Controller(shared_device=True), Load("sequential", 6), 110, 0
    controller.observe_pass(load, [TEXT] * 6, 6, 6, 0.8, None)
    while unread and (read := controller.read_budget(load, TEXT, unread, 50, 500)):
        read = min(read, unread)
        controller.observe_reading(load, read, 0.14 + 0.001 * read)
        unread, steps = unread - read, steps + 1
    assert not unread and steps < 10


def test_a_text_is_read_to_find_out_less_and_less_often() -> None:
    """Steps pay here, and the reading before them does not: each trial once made the next one due."""
    policy, load, text = Controller(shared_device=True), Load("sequential"), TEXT.copy()
    tried = list[int]()
    for number in range(500):
        unread = 100 if not policy.costs_of(load).known or policy.costs_of(load).read_probe.due else 0
        while unread and (budget := policy.read_budget(load, text, unread, 20, 100)):
            if not tried or tried[-1] != number:
                tried.append(number)
            read = min(budget, unread)
            policy.observe_reading(load, read, 0.018 * read)
            unread -= read
            if not unread:
                for _ in range(2):
                    policy.observe_draft_step(load, text, 1, 1, 0.05, 1)
        assert not unread or number < 2 or not tried, "a text that is begun is read to its end"
        policy.observe_pass(load, [text], 1, 1, 0.067, 0.067)
    assert tried[1:] and all(b - a > 1.8 * (a - before) for before, a, b in zip(tried[1:], tried[2:], tried[3:]))  # noqa: B905


def test_the_price_of_reading_follows_the_speed_of_the_machine() -> None:
    """A price from a busy time was kept: it seemed too high, so nothing was read, and it stayed."""
    policy, load = Controller(shared_device=True), Load("sequential")
    for _ in range(20):
        policy.observe_pass(load, [TEXT.copy()], 1, 1, 0.15, None)
    for _ in range(3):
        policy.observe_reading(load, 100, 0.3)
    for _ in range(30):
        policy.observe_pass(load, [TEXT.copy()], 1, 1, 0.05, None)
    assert policy.costs_of(load).read_cost == pytest.approx(0.001, rel=0.1)


def test_a_batch_waits_no_longer_for_reading_than_its_next_token_may() -> None:
    policy, load = Controller(shared_device=True), Load("sequential", 16)
    policy.observe_pass(load, [TEXT.copy()] * 16, 16, 16, 0.4, None)
    for _ in range(2):
        policy.observe_reading(load, 100, 0.6)
    readers = policy.max_readers(load)
    assert readers == 2 and readers * LEAST_READ * 0.006 <= READ_STEPS * 0.4


def test_a_texts_own_rows_are_charged_to_it_in_full() -> None:
    policy, load = Controller(shared_device=True), Load("sequential", 8)
    for rows, elapsed in ((8, 0.100), (11, 0.106)):
        for _ in range(20):
            policy.observe_pass(load, [TEXT.copy() for _ in range(8)], rows, 8, elapsed, None)
    text = TextStats(Mean(0.8), Mean(2.0), free_rows=Mean(4.0), free_pace=Mean(2.0))
    undrafted = policy._seconds_undrafted(load, text, policy.costs_of(load))
    assert undrafted == pytest.approx((0.100 / 8 + 0.006) / 2, rel=0.03)


def test_step_times_of_few_rows_are_kept_apart() -> None:
    """A kernel that multiplies four rows at a time makes the fifth row dear."""
    policy, load = Controller(shared_device=True), Load("sequential")
    for _ in range(20):
        for rows in (1, 2, 4, 5, 8):
            policy.observe_pass(load, [TEXT], rows, 1, 0.05 if rows <= 4 else 0.08, None)
    at = policy.costs_of(load).target.at
    assert at(4) == pytest.approx(0.05, rel=0.01) and at(5) == pytest.approx(0.08, rel=0.01)


def test_a_row_that_begins_another_block_of_a_kernel_is_priced() -> None:
    """Sixteen requests have a full block of rows; one candidate more takes half as long again."""
    policy, load, texts = Controller(shared_device=True), Load("sequential", 16), [TEXT] * 16
    for _ in range(20):
        for rows, elapsed in ((16, 0.13), (17, 0.19), (19, 0.20)):
            policy.observe_pass(load, texts, rows, rows, elapsed, elapsed)
    at = policy.costs_of(load).target.at
    assert at(16) == pytest.approx(0.13, rel=0.03) and at(17) > 0.155
    assert policy.windows(load, texts, [[0.9], *[[]] * 15]) == [0] * 16


def test_passes_without_candidates_are_measured_again() -> None:
    """Eight rows were measured while the machine was busy: then two candidates more seem to be free, for ever."""
    load, texts, policy = Load("sequential", 8), [TEXT] * 8, Controller(shared_device=True)
    for rows, elapsed in ((8, 0.10), (10, 0.09), (16, 0.16)):
        policy.observe_pass(load, texts, rows, 8, elapsed, elapsed)
    candidates, widths = [[0.4], [0.3], *[[]] * 6], list[int]()
    for _ in range(200):
        widths.append(sum(policy.windows(load, texts, candidates)))
        elapsed = 0.07 + 0.01 * widths[-1]
        policy.observe_pass(load, texts, 8 + widths[-1], 8, elapsed, elapsed)
    assert widths[0] == 2 and sum(widths[-40:]) <= 4


def test_a_device_that_slows_down_slows_all_sizes_alike() -> None:
    times = StepTimes()
    for _ in range(20):
        for rows, elapsed in ((8, 0.07), (10, 0.09)):
            times.observe(rows, elapsed)
    for _ in range(12):
        times.observe(10, 0.18)
    assert times.at(8) == pytest.approx(0.14, rel=0.05) and times.at(10) == pytest.approx(0.18, rel=0.05)


def test_a_trial_of_candidates_has_a_bounded_price() -> None:
    """Sixteen requests with a dozen likely candidates each once took a pass of 200 rows to find out what one costs."""
    policy, load, texts = Controller(shared_device=True), Load("sequential", 16), [TEXT] * 16
    for _ in range(20):
        policy.observe_pass(load, texts, 16, 16, 0.1, 0.1)
        policy.observe_pass(load, texts, 17, 16, 0.2, 0.2)
    widths = list[int]()
    for _ in range(100):
        widths.append(sum(policy.windows(load, texts, [[0.25] * 12] * 16)))
        policy.observe_pass(load, texts, 16 + widths[-1], 16, 0.1 + 0.05 * widths[-1], 0.1 + 0.05 * widths[-1])
    assert 0 < max(widths) <= 16 and sum(widths) <= 32


def test_one_slow_reading_does_not_end_reading() -> None:
    """The first long text on a GPU took a second; so did each token of any text, for ever."""
    policy, load = Controller(shared_device=True), Load("sequential")
    policy.observe_pass(load, [TEXT], 1, 1, 0.05, None)
    for elapsed in (0.5, 0.1, 1000.0):
        policy.observe_reading(load, 100, elapsed)
    assert policy.read_budget(load, TEXT, 100, written=1, left=100)


def test_draft_steps_of_a_load_follow_the_speed_of_the_machine() -> None:
    """A draft that stopped on a slow machine seemed as slow ever after, while passes were fast again."""
    policy, load = Controller(shared_device=True), Load("sequential", 4)
    for slow in (1.0, 2.0):
        for _ in range(40):
            policy.observe_draft_step(load, TEXT.copy(), 1, 1, slow * 0.016, 1)
            policy.observe_pass(load, [TEXT] * 4, 4, 4, slow * 0.055, None)
    for _ in range(20):
        policy.observe_pass(load, [TEXT] * 4, 4, 4, 0.055, None)
    assert policy.costs_of(load).draft.at(1) == pytest.approx(0.016, rel=0.1)
