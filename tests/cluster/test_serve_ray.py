"""`langchain-card serve --ray` as a real process, and `build` behind Ray's own proxy. Half a minute each."""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import httpx
import openai
import psutil
import pytest
from ray import serve

from langchain_card import CARDChatModel
from langchain_card.cluster import build
from tests.support import tiny
from tests.support.played import make_pair
from tests.support.processes import gone, wait_until
from tests.support.raylets import Raylets, raylets
from tests.support.served import ServerProcess, numbers

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings("default"),
]

QUESTION: Any = [{"role": "user", "content": "What comes next?"}]
LENGTH = {
    "max_tokens": 1800,
    "temperature": 0.9,
    "seed": 4,
    "logit_bias": {str(tiny.byte_tokenizer().eos_token_id): -100},
}


@pytest.fixture(scope="module")
def fields(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    pair = make_pair(tmp_path_factory.mktemp("pair"))
    return {name: pair[name] for name in ("model", "draft_model")} | {"dtype": "float64", "device": "cpu"}


@pytest.fixture(scope="module")
def wanted(fields: dict[str, Any]) -> str:
    with CARDChatModel(**fields).load() as model:
        return str(model.invoke("What comes next?", **LENGTH).content)


def client(url: str, key: str = "x") -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0, timeout=120)


def worked(process: psutil.Process) -> float:
    return float(sum(process.cpu_times()[:2]))


def test_a_server_with_engines_on_ray(fields: dict[str, Any], wanted: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """An answer goes on when its replica is killed; nothing of Ray is left when the server has ended."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("RAY_worker_niceness", "0")
    options = ("--model", fields["model"], "--draft-model", fields["draft_model"], "--dtype", "float64")
    on_ray = ("--ray", "--replicas", "2", "--cpus-per-replica", "1", "--no-isolate")
    server = ServerProcess(*options, *on_ray, seconds=400)
    children = psutil.Process(server.process.pid).children(recursive=True)
    replicas = [child for child in children if "ServeReplica:card" in " ".join(child.cmdline())]
    try:
        before = {replica: worked(replica) for replica in replicas}
        with client(server.url) as http:
            stream = http.chat.completions.create(model="target", messages=QUESTION, stream=True, **LENGTH)
            chunks = (chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices)
            text = "".join(islice(chunks, 3))
            max(replicas, key=lambda replica: worked(replica) - before[replica]).kill()
            text += "".join(chunks)
        assert text == wanted
        with httpx.Client(base_url=server.url) as http:
            assert numbers(http)["resumed_total", "died"] == 1
    finally:
        code = server.end(signal.SIGTERM)
    assert code == 0 and "Traceback" not in server.said
    assert "usage statistics are off" in server.said
    wait_until(lambda: all(gone(child.pid) for child in children), 30)


@pytest.fixture(scope="module")
def cluster() -> Iterator[Raylets]:
    with raylets(1, cpus=4) as made:
        yield made


def test_an_application_behind_rays_proxy(cluster: Raylets, wanted: str, tmp_path: Path) -> None:
    """Keys; and a model that is exchanged in the middle of an answer: no text of both, then answers of the new one."""
    now, next_one = make_pair(tmp_path / "pair"), make_pair(tmp_path / "next", seed=9)
    with CARDChatModel(**next_one).load() as model:
        other = str(model.invoke("What comes next?", **LENGTH).content)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    serve.start(http_options={"host": "127.0.0.1", "port": port})
    keys = tmp_path / "keys"
    keys.write_text("secret\n")
    fields = {name: now[name] for name in ("model", "draft_model", "dtype")}
    arguments = {**fields, "api_key_file": str(keys), "cpus": "1", "insecure": "true", "deadline_seconds": 99}
    serve.run(build(arguments), name="web", blocking=False)
    url = f"http://127.0.0.1:{port}"
    assert httpx.get(f"{url}/v1/models").status_code == 401
    assert httpx.get(f"{url}/health").json()["workers"]["engine replica 1"]["state"] == "up"
    with client(url, "secret") as http:

        def pieces() -> Iterator[str]:
            stream = http.chat.completions.create(model="target", messages=QUESTION, stream=True, **LENGTH)
            yield from (chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices)

        assert "".join(pieces()) == wanted
        begun = pieces()
        text = next(begun)
        (tmp_path / "pair").rename(tmp_path / "old")
        (tmp_path / "next").rename(tmp_path / "pair")
        (pid,) = cluster.replicas("web")
        os.kill(pid, signal.SIGKILL)
        with pytest.raises(openai.APIError) as caught:
            for piece in begun:
                text += piece
        assert caught.value.code == "engine_error" and wanted.startswith(text)
        wait_until(lambda: httpx.get(f"{url}/health").status_code == 200, 60)  # of the server after that one
        assert "".join(pieces()) == other
