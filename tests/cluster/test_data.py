"""`Answers` on a real Ray: two actors answer a dataset, and are killed meanwhile."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import Any

import psutil
import pytest
import ray

from langchain_card import CARDChatModel
from langchain_card.cluster import Answers
from tests.support.processes import wait_until

pytestmark = [
    pytest.mark.slow,
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings("default"),
]

COUNT = 200


@pytest.fixture(scope="module")
def started() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        patch.setenv("PYTHONPATH", os.getcwd())
        patch.setenv("OMP_NUM_THREADS", "1")
        patch.setenv("RAY_worker_niceness", "0")
        try:
            ray.init("local", num_cpus=2, object_store_memory=100 << 20, include_dashboard=False, log_to_driver=False)
            ray.data.DataContext.get_current().enable_progress_bars = False
            yield
        finally:
            ray.shutdown()


def answering() -> set[psutil.Process]:
    """The actors of this test's Ray that have rows to answer."""
    found = set()
    for child in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):  # of one that has just ended
            if "MapWorker(MapBatches(Answers)).submit" in " ".join(child.cmdline()):
                found.add(child)
    return found


def kill_one(killed: set[psutil.Process]) -> None:
    """Kill an actor in the middle of its work."""
    found: set[psutil.Process] = set()
    wait_until(lambda: bool(found.update(answering() - killed) or found), 240)
    victim = found.pop()
    victim.kill()
    killed.add(victim)


@pytest.mark.timeout(900)
@pytest.mark.usefixtures("started")
def test_killed_twice_each_row_comes_out_once(tiny_pairs: dict[str, tuple[str, str]]) -> None:
    """Costs 25 s, or 60 s beside other programs: Ray starts, and four actors load a pair."""
    target, draft = tiny_pairs["llama"]
    fields = {"model": target, "draft_model": draft, "dtype": "float64", "device": "cpu", "max_model_len": 512}
    fields |= {"max_tokens": 40, "temperature": 0.8, "seed": 3}
    prompts = {f"request {i}": "" if i % 50 == 7 else f"number {i}" for i in range(COUNT)}
    rows = [{"custom_id": name, "prompt": prompt} for name, prompt in prompts.items()]
    answered = ray.data.from_items(rows, override_num_blocks=40).map_batches(
        Answers, fn_constructor_kwargs=fields, concurrency=2, num_cpus=1
    )
    found: list[dict[str, Any]] = []
    killed: set[psutil.Process] = set()
    for row in answered.iter_rows():
        found.append(row)
        if len(found) in (30, 90):
            kill_one(killed)
    with CARDChatModel(**fields) as model:
        texts = iter(model.batch([prompt for prompt in prompts.values() if prompt]))
        wanted = {name: next(texts).text if prompt else "" for name, prompt in prompts.items()}
    assert len(killed) == 2 and len(found) == COUNT
    assert {row["custom_id"]: row["answer"] for row in found} == wanted
    assert {row["custom_id"]: row["prompt"] for row in found} == prompts
    assert sum(bool(row["error"]) for row in found) == sum(not prompt for prompt in prompts.values())
