"""Several engines on one machine: a process may die at any time, and every answer is that of a single engine."""

from __future__ import annotations

import os
import random
import signal
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from langchain_card.config import EngineConfig
from langchain_card.core.request import SamplingParams
from langchain_card.engine.engine import Engine
from langchain_card.engine.isolated import sites
from langchain_card.engine.isolated.sites import Site, split
from langchain_card.errors import InvalidInputError
from langchain_card.limits import Limits
from langchain_card.runtime.threads import num_cores
from langchain_card.serve.health import judge
from tests.support import tiny
from tests.support.isolated import pool_of, process_of
from tests.support.processes import wait_until

TOKENIZER = tiny.byte_tokenizer()
STOP = "\n"
REQUESTS: list[tuple[list[int], SamplingParams]] = [
    (
        TOKENIZER(f"def number_{i}(a, b):\n    return ").input_ids,
        SamplingParams(
            max_tokens=60,
            temperature=float(i % 2),
            seed=i,
            logprobs=2 if i % 4 == 0 else None,
            grammar="%llguidance {}\nstart: /[ -z]{30,50}/" if i % 4 == 1 else "",
            presence_penalty=0.5 if i % 4 == 2 else 0.0,
            stop=(STOP,) if i % 4 == 3 else (),
            session=f"session {i % 3}",
        ),
    )
    for i in range(8)
]


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> EngineConfig:
    folder = tmp_path_factory.mktemp("pair")
    target = tiny.make_target("llama", folder / "target")
    draft = tiny.make_draft(target, folder / "draft", noise=0.02)
    limits = Limits(max_num_seqs=4, restart_seconds=0.01, max_deaths=1000)
    return EngineConfig(target, draft, device="cpu", dtype="float64", max_model_len=512, limits=limits)


@pytest.fixture(scope="module")
def wanted(pair: EngineConfig) -> list[tuple[int, ...]]:
    with Engine(pair) as engine:
        return [engine.submit(*request).result().token_ids for request in REQUESTS]


@pytest.fixture(scope="module")
def engine(pair: EngineConfig) -> Iterator[Engine]:
    """Half a minute: two processes import torch and transformers."""
    with Engine(replace(pair, replicas=2)) as engine:
        wait_until(lambda: all(process.is_up for process in pool_of(engine).processes), 120)
        yield engine


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.skipif(num_cores() < 2, reason="two replicas need a core each")
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_answers_go_on_in_the_other_process(engine: Engine, wanted: list[tuple[int, ...]], number: int) -> None:
    """A process that is stopped is killed after the time of silence."""
    pool = pool_of(engine)
    if number == signal.SIGSTOP:
        for process in pool.processes:
            process.config = replace(process.config, limits=replace(process.config.limits, silence_seconds=4.0))
    rng = random.Random(number)
    for turn in range(4 if number == signal.SIGKILL else 1):
        wait_until(lambda: all(process.is_up for process in pool.processes), 120)
        generations = [engine.submit(*request) for request in REQUESTS]
        pieces = iter(generations[turn])
        for _ in range(rng.randrange(1, 20)):
            next(pieces)
        victim = process_of(engine, turn % 2)
        victim.send_signal(number)
        others = {process.pid for process in pool.processes} - {victim.pid}
        assert [generation.result().token_ids for generation in generations] == wanted
        assert others <= {process.pid for process in pool.processes}, "the other process answered"
    assert not engine.num_open


@pytest.mark.slow
@pytest.mark.skipif(num_cores() < 2, reason="two replicas need a core each")
def test_processes_share_out_the_cores(engine: Engine) -> None:
    wait_until(lambda: all(process.is_up for process in pool_of(engine).processes), 120)
    cores = [os.sched_getaffinity(process_of(engine, number).pid) for number in range(2)]
    assert not cores[0] & cores[1] and len(cores[0]) == len(cores[1])
    assert engine.backend.num_seats == 8
    health = engine.health()
    assert judge(health) == "ok"
    assert {"engine process 1", "engine process 2", "engine process 2: target"} <= {*health}


def test_parts_of_a_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 2, 4, 5, 7})
    config = EngineConfig(device="cpu", replicas=2)
    assert split(replace(config, replicas=1)) == [Site()]
    monkeypatch.setattr(sites, "_place", lambda core: (int(core) % 2, int(core)))  # two processors
    assert split(config) == [Site((0, 2, 4)), Site((5, 7))]
    with pytest.raises(InvalidInputError, match=r"replicas = 6: must be 5 at most: this process may use 5 cores"):
        split(replace(config, replicas=6))
    for field in ("device", "draft_device"):
        with pytest.raises(InvalidInputError, match=rf"{field} = 'cuda:0': names its devices"):
            split(replace(config, **{field: "cuda:0"}))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    assert split(replace(config, device="auto")) == [Site((0, 2, 4), "0,1"), Site((5, 7), "2,3")]
    assert split(replace(config, draft_device="cpu")) == [Site((0, 2, 4)), Site((5, 7))]
    monkeypatch.setenv(sites.VISIBLE, "3, 1, GPU-ab, 0")
    assert [site.environment for site in split(replace(config, device="cuda"))] == [
        {sites.VISIBLE: "3,1"}, {sites.VISIBLE: "GPU-ab,0"}
    ]  # fmt: skip
