"""A relay, and 1,000 replicas that die, hang, are updated and leave: each answer ends once, as one of them writes it.

Three seconds, and 20 of a slow test.
"""

from __future__ import annotations

from random import Random
from typing import Any

import pytest

from langchain_card.core.messages import Emit
from langchain_card.core.request import RequestStats
from langchain_card.engine.relay.messages import Submit
from langchain_card.engine.relay.open_requests import OpenRequest
from langchain_card.engine.relay.relay import Relay
from langchain_card.runtime.kind import Kind
from tests.simulation.cluster import SILENCE_SECONDS
from tests.simulation.traffic import KIND, OTHER_WEIGHTS, Traffic

OTHER_MACHINE = Kind(KIND.answer, "another machine")


def with_faults(num_replicas: int, seconds: float, deaths: int, hangs: int, gone: int, seed: int = 0) -> Traffic:
    """Return traffic with deaths and hangs at any time, and with an update and a downscale.

    Every second hang ends before it is noticed.
    """
    traffic, random = Traffic(num_replicas, seconds, seed), Random(seed)
    for _ in range(deaths):
        traffic.at(random.uniform(0.2, 0.9) * seconds, traffic.cluster.kill)
    for place in range(hangs):
        lasts = random.uniform(0.5, 1.0) if place % 2 else random.uniform(1.5, 2.5)
        traffic.at(random.uniform(0.2, 0.9) * seconds, traffic.cluster.hang, lasts * SILENCE_SECONDS)
    traffic.at(0.2 * seconds, traffic.cluster.update, OTHER_MACHINE, 0.3 * seconds / num_replicas, 3.0)
    traffic.at(0.7 * seconds, traffic.cluster.downscale, gone, 3.0)
    return traffic


def update_weights(seed: int = 0) -> Traffic:
    """Run an update to other weights, which drains each replica for less time than an answer takes."""
    traffic = Traffic(10, 15.0, seed, kinds=(KIND, OTHER_WEIGHTS))
    traffic.at(4.0, traffic.cluster.update, OTHER_WEIGHTS, 0.4, 3.0)
    traffic.run()
    return traffic


def poison(seed: int = 0) -> Traffic:
    """Run a request that kills every replica which begins it."""
    traffic = Traffic(10, 8.0, seed)
    traffic.at(4.0, lambda: traffic.begin_chat(1, poisonous=True))
    traffic.run()
    return traffic


SIZES = [
    pytest.param(10, 15.0, 2, 2, 1, id="10"),
    pytest.param(100, 8.0, 4, 3, 10, id="100"),
    pytest.param(1000, 6.0, 20, 10, 100, id="1000", marks=pytest.mark.slow),
]


@pytest.mark.parametrize("num_replicas, seconds, deaths, hangs, gone", SIZES)
def test_every_answer_is_that_of_one_replica(
    num_replicas: int, seconds: float, deaths: int, hangs: int, gone: int
) -> None:
    traffic = with_faults(num_replicas, seconds, deaths, hangs, gone)
    traffic.run()
    assert not traffic.problems
    assert len(traffic.failures) <= num_replicas // 500  # two replicas in a row died with these
    assert {*traffic.cluster.resumes} == {"pause", "death", "hang", "update", "downscale"}
    assert {*traffic.ends} >= {"stop", "length", "abort"}
    assert traffic.num_requests >= 20 * num_replicas
    assert len(traffic.cluster.up()) >= num_replicas - gone


def test_runs_are_the_same_for_the_same_seed() -> None:
    first, again, other = (with_faults(5, 8.0, 1, 1, 1, seed) for seed in (1, 1, 2))
    for traffic in (first, again, other):
        traffic.run()
    assert (first.ends, first.cluster.gaps, first.loads) == (again.ends, again.cluster.gaps, again.loads)
    assert first.loads != other.loads


@pytest.mark.parametrize("load, least", [(0.5, 0.95), (0.7, 0.85)])
def test_a_chat_comes_back_to_where_it_was_read(load: float, least: float) -> None:
    """Three replicas. A higher load would have more sessions go to another replica, for want of a seat."""
    traffic = Traffic(3, 150.0, load=load)
    traffic.run()
    assert not traffic.problems and not traffic.failures
    assert abs(sum(traffic.loads) / len(traffic.loads) - load) < 0.1
    assert len(traffic.hits) > 100 and sum(traffic.hits) >= least * len(traffic.hits)


def test_an_update_to_other_weights_mixes_no_answers() -> None:
    """An answer that cannot go on where it was begun ends with an error."""
    traffic = update_weights()
    assert not traffic.problems
    assert traffic.failures and all("is another one now" in str(error) for error in traffic.failures)
    assert traffic.cluster.resumes["update"] > 0


def test_a_poisonous_request_kills_two_replicas() -> None:
    traffic = poison()
    assert not traffic.problems
    assert [*traffic.cluster.killed.values()] == [traffic.limits.max_failures]
    assert any("died of it" in str(error) for error in traffic.failures)


def test_planted_token_that_is_handed_out_before_it_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    def push(entry: OpenRequest, emit: Emit, stats: RequestStats) -> None:
        entry.num_tokens = entry.consumer.push(emit)
        entry.output_ids += emit.token_ids

    monkeypatch.setattr(OpenRequest, "push", push)
    assert found(with_faults(3, 2.0, 0, 0, 0), "before it is kept")


@pytest.mark.parametrize("place", ["pool", "relay"])
def test_planted_kind_that_is_not_compared(place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if place == "pool":
        monkeypatch.setattr(Kind, "continues", lambda kind, other: True)
    else:
        rest = property(lambda entry: Submit(entry.consumer.request, tuple(entry.output_ids)))
        monkeypatch.setattr(OpenRequest, "rest", rest)
    assert any("that no replica writes alone" in problem for problem in update_weights().problems)


def test_planted_deaths_that_are_not_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    left = OpenRequest.left
    monkeypatch.setattr(OpenRequest, "left", lambda entry, died=False: left(entry, died=False))
    traffic = poison()
    assert any("after too many deaths" in problem for problem in traffic.problems)
    assert max(traffic.cluster.killed.values()) > traffic.limits.max_failures


def test_planted_replica_that_is_still_read_after_it_was_left(monkeypatch: pytest.MonkeyPatch) -> None:
    receive = Relay._receive

    def receive_all(relay: Relay, entry: OpenRequest, number: int, reply: Any) -> None:
        receive(relay, entry, entry.number, reply)

    monkeypatch.setattr(Relay, "_receive", receive_all)
    assert found(with_faults(10, 8.0, 2, 2, 1), "that no replica writes alone")


def test_planted_reader_that_keeps_its_seat(monkeypatch: pytest.MonkeyPatch) -> None:
    def pause(relay: Relay, request_id: int, paused: bool) -> None:
        if (entry := relay._open.get(request_id)) is not None:
            entry.paused = paused

    monkeypatch.setattr(Relay, "_pause", pause)
    assert found(Traffic(3, 8.0), "keeps a seat")


def found(traffic: Traffic, problem: str) -> bool:
    """Run traffic; return whether a check finds the problem."""
    traffic.run()
    return any(problem in each for each in traffic.problems)
