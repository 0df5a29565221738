"""Real Ray: three raylets on this machine, whose engines are killed, stopped, updated and taken away.

Two minutes and a half: each new replica imports torch, which takes a core five seconds.
"""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
from ray import serve

from langchain_card.cluster import ClusterSettings, deploy
from langchain_card.cluster.deployment import check_model
from langchain_card.config import EngineConfig
from langchain_card.core.request import SamplingParams
from langchain_card.engine.engine import Engine
from langchain_card.errors import EngineError, InvalidInputError
from langchain_card.limits import Limits
from tests.support import tiny
from tests.support.processes import wait_until
from tests.support.raylets import Raylets, raylets, stop_for_a_while, total_memory

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(1800),
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings("default"),
]

KILLS = 200 if os.environ.get("CARD_EXPLORE") else 12
CLIENTS = 8
REPLICAS = ClusterSettings(3, 3, cpus=1, drain_seconds=0.5)
KINDS: list[dict[str, Any]] = [
    {},
    {"grammar": "%llguidance {}\nstart: /[ -z]{100,200}/"},
    {"presence_penalty": 0.7, "frequency_penalty": 0.3},
    {"logprobs": 2},
    {"stop": ("\n",)},
]
TOKENIZER = tiny.byte_tokenizer()
REQUESTS = [
    (
        TOKENIZER(f"def number_{number}(a, b):\n    return ").input_ids,
        SamplingParams(max_tokens=240, temperature=temperature, seed=number, session=f"chat {number % 7}", **kind),
    )
    for temperature in (0.0, 0.9)
    for number, kind in enumerate(KINDS * 2)
]


@pytest.fixture(scope="module")
def cluster() -> Iterator[Raylets]:
    with raylets(3, cpus=2) as made:
        yield made


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> EngineConfig:
    folder = tmp_path_factory.mktemp("pair")
    target = tiny.make_target("llama", folder / "target")
    draft = tiny.make_draft(target, folder / "draft", noise=0.02)
    limits = Limits(max_num_seqs=4, silence_seconds=2.0, max_deaths=1000, max_failures=100)
    return EngineConfig(target, draft, dtype="float64", device="cpu", max_model_len=2048, limits=limits)


class Clients:
    """Threads that send one request after the other and compare every answer with a single engine's."""

    def __init__(self, engine: Engine, wanted: list[Any]) -> None:
        self._engine, self._wanted = engine, wanted
        self.begun, self.ended, self.resumed = 0, 0, Counter[str]()
        self.wrong: list[Any] = []
        self._is_over = threading.Event()
        self._threads = [threading.Thread(target=self._send, args=(number,)) for number in range(CLIENTS)]
        for thread in self._threads:
            thread.start()

    def end(self) -> None:
        self._is_over.set()
        for thread in self._threads:
            thread.join(60)
            assert not thread.is_alive(), "a request has no end"

    def _send(self, seed: int) -> None:
        dice = random.Random(seed)
        while not self._is_over.is_set():
            number = dice.randrange(len(REQUESTS))
            self.begun += 1
            try:
                generation = self._engine.submit(*REQUESTS[number])
                text = "".join(piece.text for piece in generation) if seed % 2 else generation.result().text
                found, wanted = generation.result(), self._wanted[number]
                if (found.token_ids, found.finish_reason, text) != (
                    wanted.token_ids,
                    wanted.finish_reason,
                    wanted.text,
                ):
                    self.wrong.append((number, found, wanted))
                self.resumed.update(found.stats.resumed)
            except Exception as error:
                self.wrong.append((number, error, None))
            self.ended += 1
            time.sleep(dice.random())  # replicas that start need the cores, too


@pytest.fixture(scope="module")
def one(cluster: Raylets, config: EngineConfig) -> Iterator[Engine]:
    """An application of one replica with one seat."""
    limits = replace(config.limits, max_num_seqs=1, max_unread=200)
    deploy(replace(config, limits=limits), ClusterSettings(cpus=1), "one")
    with Engine(EngineConfig(config.model, cluster="one")) as front:
        front.submit(*REQUESTS[0]).result()
        yield front


def long_request(seed: int) -> tuple[list[int], SamplingParams]:
    no_end = ((TOKENIZER.eos_token_id, -100.0),)
    return REQUESTS[0][0], SamplingParams(max_tokens=900, temperature=1.0, seed=seed, session="long", logit_bias=no_end)


def test_what_an_application_is_not(one: Engine, config: EngineConfig) -> None:
    """A server that starts again updates its own application, and no other model's."""
    check_model(config, "one")
    check_model(replace(config, model="another"), "two")
    with pytest.raises(InvalidInputError, match="--application = 'one': is an application of this cluster that has an"):
        check_model(replace(config, model="another"), "one")
    with pytest.raises(EngineError, match="cluster = 'two': is no application of this cluster"):
        Engine(EngineConfig(config.model, cluster="two"))


def test_a_client_that_leaves_frees_its_seat(one: Engine) -> None:
    """The next one has it long before the answer that was left could have ended."""
    begun = time.monotonic()
    one.submit(*long_request(1)).result()
    whole = time.monotonic() - begun
    leaving, begun = one.submit(*long_request(1)), time.monotonic()
    pieces = iter(leaving)
    next(pieces)
    leaving.abort()
    following = iter(one.submit(*long_request(2)))
    next(following)
    assert time.monotonic() - begun < whole / 2
    following.close()


def test_a_slow_reader_gives_its_seat_back_and_gets_the_exact_rest(one: Engine, config: EngineConfig) -> None:
    slow = one.submit(*long_request(3))
    found = next(pieces := iter(slow)).text
    quick = one.submit(*REQUESTS[0])
    assert quick.result().token_ids, "it had the seat while the slow one paused"
    assert not slow.finished
    found += "".join(piece.text for piece in pieces)
    with Engine(config) as alone:
        assert alone.submit(*long_request(3)).result().text == found
    assert slow.result().stats.resumed["left"] >= 1


def test_another_model_never_goes_on_with_an_answer(
    one: Engine, config: EngineConfig, tmp_path_factory: pytest.TempPathFactory
) -> None:
    begun = one.submit(*long_request(4))
    next(pieces := iter(begun))
    other = tiny.make_target("llama", tmp_path_factory.mktemp("other"), seed=9)
    limits = replace(config.limits, max_num_seqs=1)
    deploy(replace(config, model=other, limits=limits), ClusterSettings(cpus=1, drain_seconds=0.1), "one")
    with pytest.raises(EngineError, match="is another one now than the one that this process has joined"):
        list(pieces)
    with pytest.raises(EngineError, match="is another one now"):
        one.submit(*REQUESTS[0]).result()
    serve.delete("one")
    with pytest.raises(EngineError, match="could not answer"):
        one.submit(*REQUESTS[0]).result()


def test_every_answer_is_a_single_engines_whatever_happens(
    cluster: Raylets, config: EngineConfig, say: Callable[[str], None], caplog: pytest.LogCaptureFixture
) -> None:
    began, dice = time.monotonic(), random.Random(1)
    with Engine(config) as alone:
        wanted = [alone.submit(*request).result() for request in REQUESTS]
    deploy(config, REPLICAS, "card")
    changed = replace(config, limits=replace(config.limits, max_queue=100))

    def kill() -> None:
        os.kill(dice.choice([*cluster.wait_for(1)]), signal.SIGKILL)

    def hang() -> None:
        stop_for_a_while(dice.choice([*cluster.wait_for(1)]), 3.5)

    def move() -> None:
        cluster.wait_for(1)
        cluster.remove_node()
        cluster.add_node()

    others = [hang, move, hang, lambda: deploy(changed, REPLICAS, "card"), hang, move, hang]
    acts = [kill] * KILLS
    for place, act in zip(range(2, KILLS, KILLS // len(others)), others, strict=False):
        acts.insert(2 * place, act)
    with Engine(EngineConfig(config.model, cluster="card")) as front:
        clients, memory = Clients(front, wanted), [0]
        try:
            for number, act in enumerate(acts):
                cluster.wait_for(1)
                time.sleep(dice.random())  # it gets some answers
                act()
                if number % 10 == 5:
                    memory.append(total_memory())
            deploy(changed, replace(REPLICAS, min_replicas=2, max_replicas=2), "card")
            wait_until(lambda: len(cluster.replicas()) == 2, 120)
            time.sleep(2)
        finally:
            clients.end()
        assert not front.num_open
    figures = f"{clients.ended} answers, resumed {dict(clients.resumed)}, {time.monotonic() - began:.0f} s"
    say(f"{figures}, {max(memory) / 2**30:.1f} GB")
    assert clients.begun == clients.ended and not clients.wrong, clients.wrong[:3]
    assert clients.resumed["died"] >= KILLS and "has sent nothing for 2 seconds" in caplog.text
