"""Real weights: the same tokens under every schedule; quality and memory of weights in blocks.

`CARD_PROMPTS` names a JSON-lines file to take the prompts from; the project's own are used otherwise.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from langchain_core.callbacks import BaseCallbackHandler
from transformers import AutoModelForCausalLM, AutoTokenizer

from benchmarks import quality
from langchain_card import CARDChatModel
from langchain_card.bench import prompts
from langchain_card.config import EngineConfig
from langchain_card.core.request import SamplingParams
from langchain_card.engine.engine import Engine
from langchain_card.models.store import ModelStore
from tests.support.processes import child_processes

PROMPTS = Path(os.environ.get("CARD_PROMPTS", prompts.OWN))
SCHEDULES = ("plain", "sequential", "parallel")
FLOORS = [("smollm2-135m", 0.94, 0.02), ("qwen2.5-coder-1.5b", 0.98, 0.01)]  # of agreement; of loss in perplexity


@pytest.fixture(scope="module")
def noisy_pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    """SmolLM2 in its file's blocks, with its own weights plus noise as draft, and prompt lookup."""
    folder = tmp_path_factory.mktemp("noisy")
    source = ModelStore().prepare("smollm2-135m", "float")
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter += 0.1 * parameter.std() * torch.randn(parameter.shape, generator=generator)
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(source).save_pretrained(folder)
    del model
    with Engine(EngineConfig(model="smollm2-135m", draft_model=str(folder))) as engine:
        yield engine


def check_equal(engine: Engine, texts: list[str], max_tokens: int, say: Callable[[str], None]) -> tuple[int, int, int]:
    """Asserts equality under all schedules; tokens compared, accepted and verified candidates."""
    compared = accepted = verified = 0
    for number, text in enumerate(texts):
        prompt_ids = engine.tokenizer.apply_chat_template(
            [{"role": "user", "content": text}], add_generation_prompt=True, return_dict=False
        )
        answers = {
            name: engine.submit(prompt_ids, SamplingParams(max_tokens=max_tokens, schedule=name)).result()  # type: ignore[arg-type]
            for name in SCHEDULES
        }
        wanted = answers["plain"].token_ids
        for name in SCHEDULES[1:]:
            assert answers[name].token_ids == wanted, f"prompt {number}, {name}"
            assert answers[name].text == answers["plain"].text
            compared += len(wanted)
            accepted += answers[name].stats.accepted
            verified += answers[name].stats.verified
        share = f"{accepted} of {verified} candidates accepted"
        say(f"prompt {number + 1} of {len(texts)}: {compared} tokens compared, 0 different; {share}")
    return compared, accepted, verified


def test_smollm2_and_a_draft_that_matches_in_part(noisy_pair: Engine, say: Callable[[str], None]) -> None:
    compared, accepted, verified = check_equal(noisy_pair, prompts.load(PROMPTS, 3), 48, say)
    assert compared > 100 and 0.05 * verified < accepted < 0.98 * verified, "the draft must match in part"


class Calls(BaseCallbackHandler):
    """Each token and when it came."""

    def __init__(self) -> None:
        self.times: list[float] = []
        self.tokens: list[str] = []

    def on_llm_new_token(self, token: str, **_: Any) -> None:
        self.times.append(time.perf_counter())
        self.tokens.append(token)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_ten_streamed_answers(noisy_pair: Engine, say: Callable[[str], None]) -> None:
    """Tokens come round by round, the first of them early, and make up the text, which `invoke` gives, too."""
    draft = str(noisy_pair.config.draft_model)
    firsts, rounds, tokens = [], 0, 0
    with CARDChatModel(model="smollm2-135m", draft_model=draft, max_tokens=100, schedule="sequential") as chat:
        for i, text in enumerate(prompts.load(PROMPTS, 10)):
            calls, started = Calls(), time.perf_counter()
            chunks = list(chat.stream(text, config={"callbacks": [calls]}))
            total = time.perf_counter() - started
            card = chunks[-1].response_metadata["card"]
            assert len(calls.times) >= card["rounds"] > 0
            answer = "".join(str(chunk.content) for chunk in chunks)
            assert answer == "".join(calls.tokens)
            assert i > 2 or answer == chat.invoke(text).content
            firsts.append((calls.times[0] - started) / total)
            rounds, tokens = rounds + card["rounds"], tokens + chunks[-1].usage_metadata["output_tokens"]
    say(f"{tokens} tokens in {rounds} rounds; first call after {statistics.median(firsts):.2f} of the time")
    assert (
        tokens > 600 and rounds < 0.95 * tokens
    )  # how long they are, and how many fewer, depends on what steps cost here
    assert statistics.median(firsts) < 0.3


@pytest.mark.pair
@pytest.mark.timeout(3600)
def test_smollm2_twenty_prompts(noisy_pair: Engine, say: Callable[[str], None]) -> None:
    check_equal(noisy_pair, prompts.load(PROMPTS, 20), 128, say)


@pytest.mark.pair
@pytest.mark.timeout(3600)
def test_the_built_in_pair_ten_prompts(say: Callable[[str], None]) -> None:
    with Engine() as engine:
        check_equal(engine, prompts.load(PROMPTS, 10), 128, say)
        rss = int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**30
        say(f"resident memory {rss:.2f} GiB")
        assert rss < 3.0


@pytest.mark.pair
@pytest.mark.timeout(3600)
def test_the_built_in_pair_in_two_processes(say: Callable[[str], None]) -> None:
    """Each model in one of them, and the draft killed once on the way."""
    before = child_processes()
    with Engine(EngineConfig(draft_transport="process")) as engine:
        check_equal(engine, prompts.load(PROMPTS, 2), 48, say)
        (child,) = child_processes() - before
        child.kill()
        check_equal(engine, prompts.load(PROMPTS, 1), 48, say)
        (new,) = child_processes() - before
        engine.backend.transports["model"].wait_ready()
        _, accepted, _ = check_equal(engine, prompts.load(PROMPTS, 1), 48, say)
        assert new != child and accepted > 10
        rss = [process.memory_info().rss / 2**30 for process in (psutil.Process(), new)]
        say(f"resident memory of target and draft: {rss[0]:.2f} and {rss[1]:.2f} GiB")


@pytest.mark.pair
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(("model", "agreement", "loss"), FLOORS)
def test_blocks_keep_the_quality_of_float32(
    model: str, agreement: float, loss: float, say: Callable[[str], None]
) -> None:
    """Floors under what was measured (docs/LOG.md), teacher-forced on forty question and answer rows."""
    sets = {PROMPTS.stem: quality.texts(PROMPTS, 40)} if "CARD_PROMPTS" in os.environ else {"own": own_rows()}
    for form, name, seen in quality.measure(model, ["file", "int8"], sets):
        say(f"{model} {name}, {form}: {seen}")
        assert seen.agreement >= agreement
        assert seen.increase <= loss


def own_rows() -> list[tuple[str, str]]:
    """Questions with a text that a model might answer: the next prompt's own words."""
    texts = prompts.load(prompts.OWN, 20)
    return [("Repeat this text word for word:\n\n" + text, text) for text in texts]
