"""Real Ray: three raylets on this machine, replicas that are killed, stopped, removed, updated and taken away."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import psutil
import pytest
import ray
from ray import serve
from ray.cluster_utils import Cluster

from langchain_card.cluster.deployment import ClusterSettings, deploy
from langchain_card.config import EngineConfig
from langchain_card.core.request import SamplingParams
from langchain_card.engine.engine import Engine
from langchain_card.limits import Limits
from tests.support import tiny

pytestmark = [
    pytest.mark.slow,
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings("default"),
]

SCHEMA = 'root ::= "[" [0-9]+ ("," [0-9]+){20,40} "]"'
KINDS: list[dict[str, Any]] = [
    {},
    {"temperature": 0.9},
    {"presence_penalty": 0.7, "frequency_penalty": 0.3},
    {"logprobs": 2},
    {"temperature": 0.7, "stop": ("zz",)},
]


def requests(tokenizer: Any, count: int, first: int = 0) -> list[tuple[list[int], SamplingParams]]:
    return [
        (
            tokenizer(f"def number_{number}(a, b):\n    return ").input_ids,
            SamplingParams(max_tokens=240, seed=number, session=f"chat {number % 5}", **KINDS[number % len(KINDS)]),
        )
        for number in range(first, first + count)
    ]


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> EngineConfig:
    target = tiny.make_target("llama", tmp_path_factory.mktemp("target"))
    limits = Limits(max_num_seqs=4, silence_seconds=2.0, max_deaths=100, max_failures=10)
    return EngineConfig(target, "ngram", dtype="float64", device="cpu", max_model_len=512, limits=limits)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    patch = pytest.MonkeyPatch()
    patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    patch.setenv("PYTHONPATH", os.getcwd())
    patch.setenv("OMP_NUM_THREADS", "1")
    node = {"num_cpus": 2, "object_store_memory": 80 << 20, "include_dashboard": False}
    cluster = Cluster(initialize_head=True, head_node_args=node)
    try:
        for _ in range(2):
            cluster.add_node(num_cpus=2, object_store_memory=80 << 20)
        ray.init(address=cluster.address, log_to_driver=False)
        yield cluster
    finally:
        serve.shutdown()
        ray.shutdown()
        cluster.shutdown()
        patch.undo()


def replicas() -> list[psutil.Process]:
    running = psutil.process_iter(["cmdline"])
    return [process for process in running if "ServeReplica:card" in " ".join(process.info["cmdline"] or ())]


def wait_for(count: int, front: Engine, seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while sum(health.state == "up" for health in front.health().values()) != count or len(replicas()) < count:
        assert time.monotonic() < deadline, f"there are no {count} replicas: {front.health()}"
        time.sleep(0.2)


def test_answers_survive_everything(cluster: Any, config: EngineConfig) -> None:
    dice = random.Random(3)
    with Engine(config) as alone:
        tokenizer = alone.tokenizer
        prompts = requests(tokenizer, 24)
        wanted = [alone.submit(*prompt).result() for prompt in prompts]
    deploy(config, ClusterSettings(3, 3, cpus=1), "card")
    front = Engine(EngineConfig(config.model, cluster="card"))
    ended, wrong, done = [0], [], [False]

    def client(number: int) -> None:
        while not done[0]:
            index = dice.randrange(len(prompts))
            generation = front.submit(*prompts[index])
            if number % 2:
                for _ in generation:
                    pass
            found = generation.result()
            ended[0] += 1
            if found.token_ids != wanted[index].token_ids or found.text != wanted[index].text:
                wrong.append((index, found, wanted[index]))

    def disturb(act: Callable[[], None]) -> None:
        wait_for(3, front)
        time.sleep(0.5)
        act()

    with front, ThreadPoolExecutor(8) as pool:
        clients = [pool.submit(client, number) for number in range(8)]
        try:
            for _ in range(4):
                disturb(lambda: dice.choice(replicas()).kill())
            disturb(lambda: os.kill(dice.choice(replicas()).pid, signal.SIGSTOP))
            changed = replace(config, limits=replace(config.limits, max_queue=100))
            disturb(lambda: deploy(changed, ClusterSettings(3, 3, cpus=1, drain_seconds=0.5), "card"))
            disturb(lambda: deploy(changed, ClusterSettings(2, 2, cpus=1, drain_seconds=0.5), "card"))
            wait_for(2, front)
        finally:
            done[0] = True
        for each in clients:
            each.result(60)
    assert not wrong
    assert ended[0] > 20
