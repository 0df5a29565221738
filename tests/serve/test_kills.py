"""Processes are killed while clients wait: every request ends once, with the exact text or an error that says what."""

from __future__ import annotations

import collections
import contextlib
import os
import random
import threading
from typing import Any

import openai
import psutil
import pytest

from langchain_card import CARDChatModel, Limits
from tests.support.played import make_pair
from tests.support.processes import wait_until
from tests.support.served import NAME, served

pytestmark = pytest.mark.usefixtures("one_thread")

DRAFT_KILLS, ENGINE_KILLS = (20, 10) if os.environ.get("CARD_EXPLORE") else (4, 2)
CLIENTS = 8
ASKED: list[dict[str, Any]] = [
    {
        "messages": [{"role": "user", "content": f"Question {number}: what comes next?"}],
        "max_tokens": 40 + 10 * number,
        "temperature": number % 2,
        "seed": number,
        "extra_body": {"schedule": ("parallel", "sequential", "plain")[number % 3]},
    }
    for number in range(6)
]


class Clients:
    """Threads that ask one question after the other, and hold every answer against the one that is wanted."""

    def __init__(self, url: str, wanted: list[str]) -> None:
        self._url, self._wanted = url, wanted
        self.outcomes: collections.Counter[str] = collections.Counter()
        self.wrong: list[tuple[int, str]] = []
        self._enough = threading.Event()
        self._threads = [threading.Thread(target=self._ask, args=(number,)) for number in range(CLIENTS)]
        for thread in self._threads:
            thread.start()

    def end(self) -> None:
        self._enough.set()
        for thread in self._threads:
            thread.join(120)
            assert not thread.is_alive(), "a request has no end"

    def _ask(self, seed: int) -> None:
        rng = random.Random(seed)
        with openai.OpenAI(base_url=f"{self._url}/v1", api_key="x", max_retries=0, timeout=100) as client:
            while not self._enough.is_set():
                number = rng.randrange(len(ASKED))
                try:
                    text = self._answer(client, number, rng.random() < 0.5)
                except openai.APIStatusError as error:
                    self.outcomes[f"{error.status_code} {error.code}"] += 1
                except openai.APIError as error:  # in the middle of a stream
                    self.outcomes[f"in a stream: {error.code}"] += 1
                else:
                    self.outcomes["exact"] += 1
                    if text != self._wanted[number]:
                        self.wrong.append((number, text))

    def _answer(self, client: openai.OpenAI, number: int, stream: bool) -> str:
        if not stream:
            return client.chat.completions.create(model=NAME, **ASKED[number]).choices[0].message.content or ""
        chunks = [*client.chat.completions.create(model=NAME, stream=True, **ASKED[number])]
        assert [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices[0].finish_reason] == ["length"]
        return "".join(chunk.choices[0].delta.content or "" for chunk in chunks)


def process(module: str, but: int = 0) -> psutil.Process | None:
    """Ours that runs a module, with another process id than one that is gone."""
    for child in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            if child.pid != but and child.status() != psutil.STATUS_ZOMBIE and module in " ".join(child.cmdline()):
                return child
    return None


def kill(module: str, model: CARDChatModel, worker: str, rng: random.Random, but: int) -> int:
    """Kills a process of ours as soon as it has worked for a moment; its process id."""
    found: list[psutil.Process | None] = [None]

    def works() -> bool:
        found[0] = process(module, but)
        health = model.engine.health()
        return found[0] is not None and worker in health and health[worker].state == "up"

    wait_until(works, 120)
    threading.Event().wait(rng.random() / 2)
    assert found[0] is not None
    try:
        found[0].kill()
    except psutil.NoSuchProcess:  # with the engine, of which it is a child
        return kill(module, model, worker, rng, found[0].pid)
    return found[0].pid


@pytest.mark.timeout(1200)
@pytest.mark.slow
def test_kills_under_load(tmp_path: Any) -> None:
    fields = make_pair(tmp_path)
    with CARDChatModel(**fields) as near:
        wanted = [near.invoke(each["messages"], **options_of(each)).text for each in ASKED]
    limits = Limits(max_num_seqs=4, restart_seconds=0.01, deaths_seconds=1.0, max_deaths=100)
    apart = CARDChatModel(**fields, isolate=True, draft_transport="process", limits=limits)
    todo = ["draft"] * DRAFT_KILLS + ["engine"] * ENGINE_KILLS
    rng, pid = random.Random(0), {"draft": 0, "engine": 0}
    rng.shuffle(todo)
    with apart.load() as model, served(model) as url:
        clients = Clients(url, wanted)
        for each in todo:
            module, worker = (
                ("transports.worker_main", "model") if each == "draft" else ("isolated.main", "engine process")
            )
            pid[each] = kill(f"langchain_card.engine.{module}", model, worker, rng, pid[each])
        enough = clients.outcomes["exact"] + CLIENTS
        wait_until(lambda: clients.outcomes["exact"] >= enough, 60)
        clients.end()
        print(dict(clients.outcomes))
        assert not clients.wrong
        assert {*clients.outcomes} <= {"exact", "503 engine_error", "in a stream: engine_error"}
        wait_until(lambda: model.engine.num_open == 0, 10)
    assert process("langchain_card") is None, "a process is left"


def options_of(asked: dict[str, Any]) -> dict[str, Any]:
    return {**{name: asked[name] for name in ("max_tokens", "temperature", "seed")}, **asked["extra_body"]}
