"""`langchain-card serve` as a real process: who may reach it, its keys, its end."""

from __future__ import annotations

import re
import signal
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from langchain_card.cli import main
from langchain_card.cli.serve import check_address, is_loopback, read_keys
from langchain_card.errors import InvalidInputError
from tests.support import tiny, vocabularies
from tests.support.played import make_pair
from tests.support.processes import gone, wait_until
from tests.support.served import LONG, ServerProcess, error_of, posted

CHAT = "/v1/chat/completions"


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, ...]:
    fields = make_pair(tmp_path_factory.mktemp("pair"))
    return "--model", fields["model"], "--draft-model", fields["draft_model"], "--dtype", "float64"


@pytest.fixture
def server(pair: tuple[str, ...], request: pytest.FixtureRequest) -> Iterator[ServerProcess]:
    started = ServerProcess(*pair, *getattr(request, "param", ()))
    yield started
    if started.process.poll() is None:
        started.end(signal.SIGKILL)


@pytest.mark.slow
def test_it_answers_drains_and_ends(server: ServerProcess) -> None:
    body = {"model": "target", "messages": [{"role": "user", "content": "Q"}]}
    answer = httpx.post(server.url + CHAT, json={**body, "max_tokens": 3}, timeout=60).json()
    assert answer["usage"]["completion_tokens"] == 3 and answer["model"] == "target"
    rebound = httpx.get(f"{server.url}/v1/models", headers={"host": "evil.example"})
    assert rebound.status_code == 403 and error_of(rebound)["code"] == "unknown_host"
    running = posted(server.url, CHAT, {**body, **LONG, "max_tokens": 1500, "stream": True})
    seen = running.recv(1000)
    for child in psutil.Process(server.process.pid).children(recursive=True):
        child.terminate()  # as systemd does with all of a service
    ended: list[int] = []
    ending = threading.Thread(target=lambda: ended.append(server.end()))
    ending.start()
    host, port = server.url.removeprefix("http://").split(":")
    refused = False
    while piece := running.recv(1 << 16):
        seen = seen[-1000:] + piece
        if not refused:
            try:
                socket.create_connection((host, int(port)), timeout=5).close()
            except OSError:
                refused = True
    running.close()
    ending.join(60)
    assert b"data: [DONE]" in seen and refused and ended == [0]
    assert not any(word in server.said for word in ("WARNING", "Traceback", "started again"))


@pytest.mark.parametrize("server", [("--host", "0.0.0.0", "--insecure", "--drain", "1")], indirect=True)
@pytest.mark.slow
def test_insecure_is_loud_and_draining_has_an_end(server: ServerProcess) -> None:
    assert server.said.count("WARNING: --insecure") == 1 and "0.0.0.0" in server.said
    assert httpx.get(f"{server.url}/v1/models", headers={"host": "any.example"}).status_code == 200
    body = {"model": "target", "messages": [{"role": "user", "content": "Q"}], **LONG, "stream": True}
    with posted(server.url, CHAT, body) as running:
        seen = running.recv(1000)
        assert server.end() == 0
        while piece := running.recv(1 << 16):
            seen = seen[-1000:] + piece
    assert b'"code":"shutting_down"' in seen and b"[DONE]" not in seen
    assert "Traceback" not in server.said


def test_nothing_outlives_a_server_that_is_killed(server: ServerProcess) -> None:
    children = psutil.Process(server.process.pid).children(recursive=True)
    assert len(children) == 1, "the engine has a process of its own"
    running = posted(server.url, CHAT, {"model": "target", "messages": [{"role": "user", "content": "Q"}], **LONG})
    server.end(signal.SIGKILL)
    running.close()
    wait_until(lambda: all(gone(child.pid) for child in children), 10)


@pytest.mark.slow
def test_asked_twice_it_ends_answers(server: ServerProcess) -> None:
    body = {"model": "target", "messages": [{"role": "user", "content": "Q"}], **LONG, "stream": True}
    with posted(server.url, CHAT, body) as running:
        seen = running.recv(1000)
        server.process.send_signal(signal.SIGINT)
        wait_until(lambda: "answers are written" in server.said)
        assert server.end(signal.SIGINT) == 0
        while piece := running.recv(1 << 16):
            seen = seen[-1000:] + piece
    assert b'"code":"shutting_down"' in seen and "Traceback" not in server.said


@pytest.mark.parametrize(("sig", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, -signal.SIGTERM)])
@pytest.mark.slow
def test_while_it_loads_it_ends_at_once(pair: tuple[str, ...], sig: int, code: int) -> None:
    server = ServerProcess(*pair, until="in a process of its own")
    children = psutil.Process(server.process.pid).children(recursive=True)
    start = time.monotonic()
    assert server.end(sig) == code and time.monotonic() - start < 20
    wait_until(lambda: all(gone(child.pid) for child in children))
    assert "Traceback" not in server.said and not server.url


@pytest.mark.slow
def test_what_keeps_it_from_starting_is_one_line(pair: tuple[str, ...], tmp_path: Path, capsys: Any) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        assert main(["serve", *pair, "--port", port]) == 2
    assert f"--port = {port}: cannot be used at 127.0.0.1 (Address already in use)" in capsys.readouterr().err
    assert main(["serve", *pair, "--host", "nowhere.invalid", "--insecure"]) == 2
    assert "--host = 'nowhere.invalid': is no address" in capsys.readouterr().err
    other = tiny.make_target("qwen2", tmp_path / "other")
    vocabularies.words().save_pretrained(other)
    server = ServerProcess(pair[0], pair[1], "--draft-model", other, until="never")
    assert server.process.wait(60) == 2 and server.said.count("\n") < 6
    assert "langchain-card: draft_model" in server.said and "Traceback" not in server.said
    server.end()


@pytest.mark.slow
def test_keys_from_a_file(pair: tuple[str, ...], tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("one\n\n two \n")
    assert read_keys(file) == ("one", "two")
    server = ServerProcess(*pair, "--host", "0.0.0.0", "--api-key-file", str(file), "--served-model-name", "a", "b")
    try:
        assert httpx.get(f"{server.url}/v1/models").status_code == 401
        found = httpx.get(f"{server.url}/v1/models", headers={"authorization": "Bearer two"}).json()["data"]
        assert [each["id"] for each in found] == ["a", "b"] and "WARNING" not in server.said
    finally:
        assert server.end(signal.SIGINT) == 0


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["--host", "0.0.0.0"], "--host = '0.0.0.0': can be reached by other machines.*--api-key-file"),
        (["--host", "example.org"], "can be reached by other machines"),
        (["--port", "70000"], "--port = 70000"),
        (["--api-key-file", "/nowhere"], "--api-key-file = '/nowhere': cannot be read"),
        (["--max-queue", "-1"], "max_queue = -1"),
        (["--max-tokens", "0"], "max_tokens = 0"),
        (["--temperature", "-1"], "temperature"),
        (["--model", "no such model"], "--model = 'no such model'"),
        (["--draft-model", "no such model"], "--draft-model = 'no such model'"),
        (["--deadline", "0"], "deadline_seconds = 0"),
        (["--max-wait", "-1"], "max_wait_seconds = -1"),
        (["--drain", "-1"], "--drain = -1"),
    ],
)
def test_what_is_wrong_is_said_at_once(args: list[str], words: str, capsys: Any, pair: tuple[str, ...]) -> None:
    assert main(["serve", *pair, *args]) == 2
    assert re.search(words, capsys.readouterr().err)


def test_addresses(tmp_path: Path) -> None:
    for host in ("127.0.0.1", "127.8.8.8", "::1", "localhost"):
        assert is_loopback(host)
        check_address(host, 0, has_keys=False, insecure=False)
    for host in ("0.0.0.0", "::", "10.0.0.1", "localhost.example", ""):
        assert not is_loopback(host)
        with pytest.raises(InvalidInputError, match="--host"):
            check_address(host, 0, has_keys=False, insecure=False)
        check_address(host, 0, has_keys=True, insecure=False)
        check_address(host, 0, has_keys=False, insecure=True)
    noted = tmp_path / "noted"
    noted.write_text("one\ntwo # of Ann\n")
    with pytest.raises(InvalidInputError, match=r"--api-key-file.*key 2 must be .* without blanks"):
        read_keys(noted)
    empty = tmp_path / "empty"
    empty.write_text("\n \n")
    with pytest.raises(InvalidInputError, match="holds no key"):
        read_keys(empty)
