"""Rounds of a target on a simulated device: how often the host waits for it."""

from __future__ import annotations

import random
from typing import Any

import pytest

from langchain_card.config import EngineConfig
from langchain_card.core import messages as m
from langchain_card.core.request import Request, SamplingParams
from langchain_card.engine.target_worker import TargetWorker
from langchain_card.models.loader import load_model, resolve
from langchain_card.runtime.runner import ModelRunner
from tests.simulation.cuda import simulated_cuda
from tests.support import tiny

pytestmark = pytest.mark.usefixtures("one_thread")
PROMPT, ROWS, ROUNDS = 9, 4, 3


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return tiny.make_target("llama", tmp_path_factory.mktemp("model"))


def chain(request_id: int, round_: int, rng: random.Random) -> m.Window:
    """A window over a chain of candidates; the one before it had its first two rows committed."""
    start, kept = PROMPT - 1 + 2 * max(round_, 0), (0, 1) if round_ else ()
    tokens = tuple(rng.randrange(200) for _ in range(ROWS))
    return m.Window(request_id, 100 * request_id + round_, start, tokens, (m.ROOT, *range(ROWS - 1)), kept)


@pytest.mark.parametrize("execution", ["eager", "graphs"])
@pytest.mark.parametrize("num_seqs", [1, 4, 16])
@pytest.mark.parametrize(
    ("options", "waits"),
    [
        ({}, 1),
        ({"repetition_penalty": 1.2, "frequency_penalty": 0.3}, 1),
        ({"temperature": 0.8, "top_k": 20, "seed": 3}, 1),
        ({"logprobs": 3}, 2),
    ],
    ids=["greedy", "penalties", "sampled", "logprobs"],
)
def test_waits_of_a_round(model: str, options: dict[str, Any], waits: int, num_seqs: int, execution: str) -> None:
    """One for the tokens of all sequences, and one for the log-probabilities of each that wants them."""
    rng = random.Random(7)
    with simulated_cuda() as simulation:
        spec = resolve(EngineConfig(model, None, dtype="float64", max_model_len=64, device="cuda:0")).target
        runner = ModelRunner(load_model(spec), max_len=64, num_scratch=8, num_seqs=num_seqs, execution=execution)
        worker = TargetWorker(runner, lambda schedule: None, 512, constrain=lambda grammar: pytest.fail(grammar))
        for n in range(num_seqs):
            prompt = tuple(rng.randrange(200) for _ in range(PROMPT))
            params = SamplingParams(max_tokens=40, logprobs=options.get("logprobs") if not n else None, **{
                name: value for name, value in options.items() if name != "logprobs"
            })  # fmt: skip
            worker.begin(m.Begin(m.TARGET, Request(n, prompt, params, ()), "plain"))
        for round_ in range(ROUNDS):
            before = len(simulation.syncs)
            verdicts = worker.verify([chain(n, round_, rng) for n in range(num_seqs)])
            assert len(verdicts) == num_seqs
        assert simulation.syncs[before:] == ["tolist"] * waits
