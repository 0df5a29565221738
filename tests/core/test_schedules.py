"""The schedule that "auto" stands for: measurements decide, and what was not measured is tried at a bounded price."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from langchain_card.config import Schedule
from langchain_card.core.controller import Controller
from langchain_card.core.costs import Mean
from langchain_card.core.policy import Load, TextStats
from langchain_card.core.schedules import STAY, TRIAL_AFTER, TRIAL_ROUNDS

TEXT = TextStats(Mean(0.8, 5.0), Mean(1.0, 4.0))
"""A text that no test changes."""


def observe(policy: Controller, load: Load, one: float, eight: float, step: float) -> None:
    """Show a policy passes of one row and of eight, and draft steps, of these seconds."""
    for _ in range(40):
        policy.observe_pass(load, [TEXT.copy()], 1, 1, one, None)
        policy.observe_pass(load, [TEXT.copy()], 8, 4, eight, None)
        policy.observe_draft_step(load, TEXT.copy(), 1, 1, step, 1)


def measured(parallel: tuple[float, float, float], sequential: tuple[float, float, float], hits: int) -> Controller:
    """A policy that saw passes of one row and of eight, and draft steps, of these seconds; and `hits` of ten tokens."""
    policy = Controller(shared_device=True, overlaps=True)
    for schedule, (one, eight, step) in (("parallel", parallel), ("sequential", sequential)):
        observe(policy, Load(schedule), one, eight, step)  # type: ignore[arg-type]
    for i in range(600):
        policy.observe_token(policy.new_text(), hit=i % 10 < hits, first=i % 10 < hits)
    return policy


def auto(policy: Controller, num_seqs: int, current: Schedule | None, positions: int = 0) -> Schedule:
    """The choice for so many new texts."""
    return policy.auto([policy.new_text() for _ in range(num_seqs)], current, positions)


def test_auto_is_the_schedule_that_measured_steps_make_faster() -> None:
    overlap_pays = measured((0.06, 0.10, 0.02), (0.055, 0.09, 0.015), hits=9)
    assert auto(overlap_pays, 1, None) == "parallel"
    cores_are_few = measured((0.11, 0.20, 0.04), (0.055, 0.09, 0.015), hits=9)
    assert auto(cores_are_few, 1, None) == "sequential"


def test_auto_changes_with_the_number_of_requests() -> None:
    policy = measured((0.06, 0.14, 0.02), (0.055, 0.09, 0.015), hits=9)
    assert auto(policy, 1, None) == "parallel"
    assert auto(policy, 1, "parallel") == "parallel"
    assert auto(policy, 16, "parallel") == "sequential", "they share draft steps, and passes want all cores"
    assert auto(policy, 16, "sequential") == "sequential"
    assert auto(policy, 1, "sequential") == "parallel", "the last one of a batch"
    assert auto(policy, 1, "parallel") == "parallel"


def test_auto_follows_what_was_measured_where_steps_let_expect_something_else() -> None:
    policy, load = measured((0.06, 0.10, 0.02), (0.055, 0.09, 0.015), hits=9), Load("parallel")
    assert auto(policy, 1, None) == "parallel"
    expected = policy.seconds_a_token(load)
    text = policy.new_text()
    for _ in range(100):  # misses waste more than the model says
        policy.observe_draft_step(load, text, 1, 1, 0.02, 1)
        policy.observe_pass(load, [text], 8, 4, 0.10, 4 * 1.6 * expected)
    assert policy.seconds_a_token(load) == pytest.approx(1.6 * expected, rel=0.1)
    assert auto(policy, 1, None) == "sequential"
    for _ in range(200):  # a harder text, or a busy machine
        policy.observe_draft_step(Load("sequential"), text, 1, 1, 0.015, 1)
        policy.observe_pass(Load("sequential"), [text], 8, 2, 0.09, 2 * 4 * expected)
    assert auto(policy, 1, None) == "parallel"


def test_one_pass_that_was_held_up_changes_little() -> None:
    policy, load = measured((0.06, 0.10, 0.02), (0.055, 0.09, 0.015), hits=9), Load("sequential")
    usual, text = policy.seconds_a_token(load), policy.new_text()
    text.drafted = True
    policy.observe_pass(load, [text], 8, 4, 0.09, 30.0)
    assert policy.seconds_a_token(load) < 1.6 * usual


@pytest.mark.parametrize("rows", [1, 8])
def test_passes_without_a_draft_say_nothing_about_drafting(rows: int) -> None:
    """Also those that verify what n-grams proposed."""
    policy, load = measured((0.06, 0.10, 0.02), (0.055, 0.09, 0.015), hits=9), Load("sequential")
    usual = policy.costs_of(load).per_expected.value
    for _ in range(50):
        policy.observe_pass(load, [policy.new_text()], rows, 1, 0.055, 0.055)
    assert policy.costs_of(load).per_expected.value == usual


def test_passes_of_which_some_texts_are_drafted_for_say_nothing_about_drafting() -> None:
    """Four answers of which one drafts take longer than four that do: the others once took that for their own price."""
    policy, load = Controller(shared_device=True), Load("sequential", 4)
    texts = [policy.new_text() for _ in range(4)]
    for _ in range(50):
        policy.observe_draft_step(load, texts[0], 1, 1, 0.01, 1)
        policy.observe_pass(load, texts, 8, 6, 0.12, 0.3)
    assert policy.costs_of(load).per_expected.value == 1.0
    for _ in range(50):
        for text in texts:
            policy.observe_draft_step(load, text, 1, 4, 0.003, 1)
        policy.observe_pass(load, texts, 8, 6, 0.12, 0.3)
    assert policy.costs_of(load).per_expected.value > 1.2


def test_a_trial_outweighs_what_a_busy_machine_has_left() -> None:
    policy, load = measured((0.06, 0.10, 0.02), (0.055, 0.09, 0.015), hits=9), Load("parallel")
    usual, text = policy.seconds_a_token(load), policy.new_text()

    def run(passes: int, slow: float) -> None:
        for _ in range(passes):
            policy.observe_draft_step(load, text, 1, 1, 0.02, 1)
            policy.observe_pass(load, [text], 8, 4, 0.10, 4 * slow * usual)

    run(500, 1.0)
    run(300, 1.6)
    begun = policy.costs_of(load).per_expected.value
    for _ in range(4):
        policy.choice._rounds = TRIAL_AFTER
        policy.choice._try("sequential", due=True)
        run(TRIAL_ROUNDS, 1.0)
    assert policy.costs_of(load).per_expected.value - 1.0 < 0.4 * (begun - 1.0)


def test_long_texts_have_step_times_of_their_own() -> None:
    policy, long = measured((0.06, 0.10, 0.02), (0.055, 0.09, 0.03), hits=9), 8000
    assert auto(policy, 1, None, 100) == auto(policy, 1, None, long) == "parallel", "as short ones, before any was seen"
    observe(policy, Load("parallel", 1, long), 0.60, 1.0, 0.02)
    assert auto(policy, 1, None, long) == "parallel", "short texts say nothing about the other schedule"
    observe(policy, Load("sequential", 1, long), 0.30, 0.4, 0.03)
    assert auto(policy, 1, None, 100) == "parallel"
    assert auto(policy, 1, None, long) == "sequential"


def test_a_draft_that_saves_little_of_a_long_text_does_not_read_it() -> None:
    policy, load = measured((0.06, 0.10, 0.02), (0.055, 0.09, 0.015), hits=9), Load("sequential", 1, 8000)
    for _ in range(2):
        policy.observe_reading(load, 100, 0.1)
    assert policy.read_budget(load, policy.new_text(), 1000, 20, 60), "it would save what it saves of short texts"
    observe(policy, load, 0.30, 2.4, 0.29)
    assert not policy.read_budget(load, policy.new_text(), 1000, 20, 60)


def test_passes_beside_which_no_draft_works_say_nothing_about_overlap() -> None:
    policy = measured((0.11, 0.20, 0.04), (0.055, 0.09, 0.015), hits=9)
    assert auto(policy, 1, None) == "sequential"
    for _ in range(100):
        policy.observe_pass(Load("parallel", drafting=False), [TEXT], 1, 1, 0.055, 0.055)
    assert policy.costs_of(Load("parallel")).target.at(1) == pytest.approx(0.11, rel=0.05)
    assert auto(policy, 1, None) == "sequential"


def test_a_draft_that_does_not_pay_beside_the_target_reads_a_text_now_and_then_to_find_out() -> None:
    policy, load = measured((0.11, 0.20, 0.2), (0.055, 0.09, 0.015), hits=5), Load("parallel")
    for _ in range(2):
        policy.observe_reading(load, 100, 0.1)
    policy.costs_of(load).read_probe.paid()
    tried = list[int]()
    for number in range(120):
        if policy.read_budget(load, policy.new_text(), 60, 20, 100):
            tried.append(number)
        policy.observe_pass(load._replace(drafting=False), [TEXT.copy()], 1, 1, 0.055, 0.055)
    assert tried == [32, 96]


QUOTED = TextStats(Mean(0.9), Mean(4.0), free_rows=Mean(4.0), free_pace=Mean(4.0))
"""A text that n-grams write as it stands in the prompt."""


def test_a_draft_does_not_read_a_text_that_free_drafters_write_faster() -> None:
    policy = measured((0.06, 0.10, 0.02), (0.055, 0.09, 0.015), hits=9)
    for schedule in ("sequential", "parallel"):
        load = Load(schedule)  # type: ignore[arg-type]
        for _ in range(2):
            policy.observe_reading(load, 100, 0.1)
        assert policy.read_budget(load, policy.new_text(), 200, 20, 60)
        assert not policy.read_budget(load, QUOTED, 200, 20, 60)


def test_auto_chooses_for_a_text_that_free_drafters_write_faster() -> None:
    policy = measured((0.06, 0.10, 0.02), (0.055, 0.09, 0.015), hits=9)
    assert auto(policy, 1, None) == "parallel"
    assert policy.auto([QUOTED], None) == "sequential", "its passes are shorter while no draft works"


def test_a_schedule_whose_draft_only_read_counts_as_plain_decoding() -> None:
    policy = Controller(shared_device=True, overlaps=True)
    observe(policy, Load("parallel"), 0.06, 0.10, 0.02)
    for _ in range(40):
        policy.observe_pass(Load("sequential"), [TEXT], 1, 1, 0.055, 0.055)
    assert auto(policy, 1, None) == "sequential", "an answer too short to draft for says nothing"
    for _ in range(2):
        policy.observe_reading(Load("sequential"), 100, 10.0)
    assert policy.seconds_a_token(Load("sequential")) == pytest.approx(0.055)
    assert auto(policy, 1, None) == "parallel"


def test_auto_does_not_change_for_little() -> None:
    policy = measured((0.06, 0.1, 0.02), (0.058, 0.099, 0.003), hits=9)
    better, worse = (policy.seconds_a_token(Load(schedule)) for schedule in ("sequential", "parallel"))
    assert STAY * worse < better < worse
    assert auto(policy, 1, "parallel") == "parallel"
    assert auto(policy, 1, None) == "sequential"


def test_several_requests_that_begin_where_nothing_is_known_have_all_cores() -> None:
    fresh = Controller(shared_device=True, overlaps=True)
    assert auto(fresh, 8, None) == "sequential"
    assert auto(fresh, 1, "sequential") == "sequential", "what nobody knows goes on as it was"


@pytest.mark.parametrize(("shared", "schedule"), [(True, "sequential"), (False, "parallel")])
def test_auto_elsewhere_is_what_the_devices_say(shared: bool, schedule: str) -> None:
    policy = Controller(shared_device=shared)
    assert {auto(policy, count, None) for count in (1, 2, 16)} == {schedule}


def answer(policy: Controller, rounds: int = 20) -> list[Schedule]:
    """Return the schedules of an answer's rounds, whose steps take twice as long under `parallel`."""
    ran, schedule = list[Schedule](), None
    for _ in range(rounds):
        schedule = auto(policy, 1, schedule)
        ran.append(schedule)
        load, slow = Load(schedule), 2 if schedule == "parallel" else 1
        policy.observe_pass(load, [TEXT], 8, 4, 0.09 * slow, None)
        policy.observe_draft_step(load, TEXT.copy(), 1, 1, 0.015 * slow, 1)
    return ran


def test_auto_tries_what_was_never_measured_and_seldom_what_is_slower() -> None:
    policy = Controller(shared_device=True, overlaps=True)
    trial = ["sequential"] * TRIAL_AFTER + ["parallel"] * TRIAL_ROUNDS
    assert answer(policy) == [*trial, *["sequential"] * (20 - len(trial))], "a trial is short, and in the first answer"
    ran = [answer(policy) for _ in range(200)]
    assert [i for i, schedules in enumerate(ran) if "parallel" in schedules] == [8, 25, 58, 123]
    assert all(schedules.count("parallel") <= TRIAL_ROUNDS for schedules in ran)


def test_a_trial_that_measured_nothing_ends_with_what_ran_before() -> None:
    policy, schedule = Controller(shared_device=True, overlaps=True), "sequential"
    assert auto(policy, 1, None) == "sequential"
    ran = list[Schedule]()
    for _ in range(20):
        policy.observe_pass(Load(schedule), [TEXT], 1, 1, 0.05, 0.05)  # a draft that has nothing to do
        schedule = auto(policy, 1, schedule)
        ran.append(schedule)
    assert ran.count("parallel") == TRIAL_ROUNDS and ran[-1] == "sequential"


def test_a_short_answer_is_no_trial() -> None:
    policy = Controller(shared_device=True, overlaps=True)
    assert all(answer(policy, TRIAL_AFTER) == ["sequential"] * TRIAL_AFTER for _ in range(20))


def test_an_answer_changes_to_what_its_own_text_makes_faster() -> None:
    policy = measured((0.06, 0.10, 0.02), (0.055, 0.09, 0.015), hits=9)
    text = policy.new_text()
    assert policy.auto([text], None) == "parallel"
    for _ in range(30):
        policy.observe_token(text, hit=False, first=False)
    assert policy.auto([text], "parallel") == "sequential", "drafts of this text are wrong"
    assert auto(policy, 1, None) == "parallel", "those of the next one are as right as usual"


PASS: dict[Schedule, float] = {"sequential": 0.09, "parallel": 0.20}
STEP: dict[Schedule, float] = {"sequential": 0.015, "parallel": 0.03}
"""Seconds of a pass of eight rows and of a draft step where cores are few."""


def test_a_schedule_that_did_not_run_is_expected_to_slow_down_with_the_machine() -> None:
    policy = measured((0.11, 0.20, 0.03), (0.055, 0.09, 0.015), hits=9)
    for schedule, slow in (("parallel", 1.0), ("sequential", 1.0), ("sequential", 1.45)):
        for _ in range(40):
            policy.observe_pass(Load(schedule), [TEXT], 8, 4, slow * PASS[schedule], None)
            policy.observe_draft_step(Load(schedule), TEXT.copy(), 1, 1, slow * STEP[schedule], 1)
    sequential, parallel = (policy.seconds_a_token(Load(schedule)) for schedule in ("sequential", "parallel"))
    assert sequential < parallel
    assert auto(policy, 1, "sequential") == auto(policy, 1, None) == "sequential"


def run(policy: Controller, rounds: int, slow: Callable[[int, Schedule], float]) -> list[Schedule]:
    """Return the schedules of an answer's rounds on a machine that is so many times slower in each round."""
    ran, schedule = list[Schedule](), None
    for i in range(rounds):
        schedule = auto(policy, 1, schedule)
        ran.append(schedule)
        policy.observe_draft_step(Load(schedule), TEXT.copy(), 1, 1, slow(i, schedule) * STEP[schedule], 1)
        policy.observe_pass(Load(schedule), [TEXT], 8, 4, slow(i, schedule) * PASS[schedule], None)
    return ran


def test_a_machine_that_became_busy_is_measured_again() -> None:
    """A program that takes one of two cores slows passes on both of them more than those that share the cores."""
    policy = Controller(shared_device=True, overlaps=True)
    for _ in range(40):
        assert run(policy, 30, lambda i, schedule: 1.0)[-1] == "sequential"
    busy = run(policy, 80, lambda i, schedule: 3.0 if schedule == "sequential" else 1.2)
    assert set(busy[-40:]) == {"parallel"}
    idle = [run(policy, 30, lambda i, schedule: 1.0) for _ in range(10)]
    assert set(idle[-1]) == {"sequential"}, "after the usual number of answers"


def test_the_price_of_trials_is_bounded_where_the_speed_of_a_machine_changes_all_the_time() -> None:
    policy = Controller(shared_device=True, overlaps=True)
    ran = run(policy, 4000, lambda i, schedule: 2.0 if i // 40 % 2 else 1.0)
    assert ran.count("parallel") < 0.06 * len(ran)
