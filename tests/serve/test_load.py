"""A server in a process of its own under many clients: each request ends once, memory stays, SIGTERM drains."""

from __future__ import annotations

import asyncio
import collections
import random
import signal
import time
from typing import Any

import httpx
import openai
import psutil
import pytest
from prometheus_client.parser import text_string_to_metric_families
from typing_extensions import Self

from langchain_card import CARDChatModel
from tests.support.played import make_pair
from tests.support.served import LONG, ServerProcess

CLIENTS, WARM_UP, REQUESTS = 64, 300, 1000
MOST_GROWTH = 20 << 20
"""Bytes, of the server and its engine together."""
TEXT = 48 << 20
"""Bytes that n-gram tables, below and beside the draft, take of a thousand texts; their bound is tested elsewhere."""
ASKED = [
    {"messages": [{"role": "user", "content": f"Question {number}: what comes next?"}], "max_tokens": 4 + 2 * number}
    for number in range(5)
]


class Load:
    """Clients that ask, leave, or set a deadline too short, and count what became of each request."""

    def __init__(self, url: str, wanted: list[str]) -> None:
        self._wanted, self._rng = wanted, random.Random(0)
        self._client = openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="x", max_retries=0, timeout=60)
        self.outcomes: collections.Counter[str] = collections.Counter()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._client.close()

    async def run(self, requests: int) -> None:
        """So many requests, by 64 clients."""
        kinds = ["leaves"] * (requests // 10) + ["is late"] * (requests // 20)
        kinds += ["stays"] * (requests - len(kinds))
        self._rng.shuffle(kinds)
        left = iter(kinds)

        async def client() -> None:
            for kind in left:
                self.outcomes[await getattr(self, "_" + kind.replace(" ", "_"))(self._rng.randrange(len(ASKED)))] += 1

        await asyncio.gather(*(client() for _ in range(CLIENTS)))

    async def _stays(self, number: int) -> str:
        if self._rng.random() < 0.5:
            answer = await self.ask(**ASKED[number])
            text = answer.choices[0].message.content
        else:
            chunks = [chunk async for chunk in await self.ask(**ASKED[number], stream=True)]
            text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
        return "exact" if text == self._wanted[number] else "wrong"

    async def _leaves(self, number: int) -> str:
        if self._rng.random() < 0.5:
            with pytest.raises(asyncio.TimeoutError):
                await asyncio.wait_for(self.ask(**ASKED[number] | LONG), 0.3 * self._rng.random())
            return "left"
        stream = await self.ask(**ASKED[number] | LONG, stream=True)
        async for _ in stream:
            break
        await stream.close()
        return "left"

    async def _is_late(self, number: int) -> str:
        try:
            await self.ask(**ASKED[number] | LONG, extra_headers={"x-request-timeout": "0.2"})
        except openai.APIStatusError as error:
            return f"{error.status_code} {error.code}"
        return "in time"

    async def ask(self, **options: Any) -> Any:
        return await self._client.chat.completions.create(model="target", **options)


def memory(process: psutil.Process) -> int:
    """Bytes that the server and its engine have to themselves."""
    return sum(each.memory_full_info().uss for each in (process, *process.children(recursive=True)))


def counted(text: str) -> collections.Counter[str]:
    """Requests to the chat route by outcome, as the server counted them."""
    families = {family.name: family for family in text_string_to_metric_families(text)}
    found: collections.Counter[str] = collections.Counter()
    for sample in families["langchain_card_requests"].samples:
        if sample.name.endswith("_total") and sample.labels["route"] == "/v1/chat/completions":
            found[sample.labels["outcome"]] += int(sample.value)
    return found


@pytest.mark.usefixtures("one_thread")
@pytest.mark.slow
async def test_a_thousand_requests(tmp_path: Any) -> None:
    fields = make_pair(tmp_path)
    with CARDChatModel(**fields) as near:
        wanted = [near.invoke(each["messages"], max_tokens=each["max_tokens"]).text for each in ASKED]  # type: ignore[arg-type]
    pair = ("--model", fields["model"], "--draft-model", fields["draft_model"], "--dtype", "float64")
    server = await asyncio.to_thread(ServerProcess, *pair, "--max-num-seqs", "8", "--drain", "5")
    try:
        async with Load(server.url, wanted) as load:
            await answer_all(load, server)
            await drain(load, server)
    finally:
        if server.process.poll() is None:
            server.end(signal.SIGKILL)


async def answer_all(load: Load, server: ServerProcess) -> None:
    process, start = psutil.Process(server.process.pid), time.monotonic()
    await load.run(WARM_UP)
    before = memory(process)
    load.outcomes.clear()
    await load.run(REQUESTS)
    growth = memory(process) - before
    print(dict(load.outcomes), f"{growth / 2**20:.1f} MB more, {time.monotonic() - start:.0f} s")
    assert load.outcomes == {"exact": REQUESTS * 85 // 100, "left": REQUESTS // 10, "504 timeout": REQUESTS // 20}
    async with httpx.AsyncClient(base_url=server.url) as client:
        await wait_for_open(0, client)
        found = counted((await client.get("/metrics")).text)
    of_all = (WARM_UP + REQUESTS) // 100
    assert (found["200"], found["504"]) == (85 * of_all, 5 * of_all)
    assert 5 * of_all < found["499"] <= 10 * of_all, "some left before their request was read"
    assert found.total() == found["200"] + found["504"] + found["499"]
    assert growth < MOST_GROWTH + TEXT


async def wait_for_open(count: int, client: httpx.AsyncClient) -> None:
    """Wait until so many requests run or wait in the server."""
    start = time.monotonic()
    while (await client.get("/health")).json()["open_requests"] != count:
        await asyncio.sleep(0.01)
        assert time.monotonic() - start < 300


async def drain(load: Load, server: ServerProcess) -> None:
    running = [asyncio.create_task(load.ask(**ASKED[0] | LONG)) for _ in range(CLIENTS)]
    async with httpx.AsyncClient(base_url=server.url) as client:
        await wait_for_open(CLIENTS, client)
    start = time.monotonic()
    assert await asyncio.to_thread(server.end, signal.SIGTERM) == 0
    assert time.monotonic() - start < 5 + 5, "the drain's seconds, and what ending takes"
    ended = await asyncio.gather(*running, return_exceptions=True)
    assert {(type(each), getattr(each, "code", None)) for each in ended} == {
        (openai.InternalServerError, "shutting_down")
    }
    assert "Traceback" not in server.said and "Cancel" not in server.said
