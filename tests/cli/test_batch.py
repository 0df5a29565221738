"""`langchain-card batch` with a model here, and with servers that fail or vanish; killed and started again."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from langchain_card import CARDChatModel
from langchain_card.cli import main
from langchain_card.serve import batch_run
from tests.support.played import make_pair
from tests.support.processes import wait_until
from tests.support.served import CHAT, CLI, NAME, TEXT, served

Reply = tuple[int, Any, dict[str, str]]
"""Status, body and headers of an answer."""
LOADED = 600.0
"""Seconds that a process may take to load a pair and answer, where others run."""


def write(path: Path, bodies: dict[str, dict[str, Any]]) -> Path:
    """Write requests by `custom_id`; a body with a prompt is for completions."""
    lines = (
        {"custom_id": name, "method": "POST", "url": TEXT if "prompt" in body else CHAT, "body": body}
        for name, body in bodies.items()
    )
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def questions(count: int) -> dict[str, dict[str, Any]]:
    """Requests whose text is their `custom_id`."""
    return {f"q{i}": {"model": NAME, "messages": [{"role": "user", "content": f"q{i}"}]} for i in range(count)}


def read(path: Path) -> dict[str, Any]:
    """Results by `custom_id`; no file has one twice, or a line that is no JSON."""
    lines = [json.loads(line) for line in path.read_bytes().splitlines()]
    assert len({line["id"] for line in lines}) == len({line["custom_id"] for line in lines}) == len(lines)
    return {line["custom_id"]: line for line in lines}


def texts(path: Path) -> dict[str, str]:
    """Texts of the answers with status 200."""
    choices = {
        name: line["response"]["body"]["choices"][0]
        for name, line in read(path).items()
        if line["response"]["status_code"] == 200
    }
    return {
        name: choice["text"] if "text" in choice else choice["message"]["content"] for name, choice in choices.items()
    }


class Scripted:
    """A small HTTP server that answers as `reply` says; None loses the connection.

    Attributes:
        reply: from the text of a request and how often it came to the answer.
        times: how often each text came.
    """

    def __init__(self) -> None:
        self.reply: Callable[[str, int], Reply | None] = lambda text, _: said(text)
        self.times: Counter[str] = Counter()
        outer = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["content-length"])))
                text = body["messages"][0]["content"]
                outer.times[text] += 1
                reply = outer.reply(text, outer.times[text])
                if reply is None:
                    self.close_connection = True
                    return
                data = reply[1] if isinstance(reply[1], bytes) else json.dumps(reply[1]).encode()
                self.send_response(reply[0])
                for name, value in {**reply[2], "content-length": str(len(data))}.items():
                    self.send_header(name, value)
                self.end_headers()
                self.wfile.write(data)

            def log_message(self, *_: Any) -> None:
                pass

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.http.server_address[1]}"


def said(text: str, status: int = 200, **headers: str) -> Reply:
    choice = {"index": 0, "message": {"role": "assistant", "content": text.upper()}, "finish_reason": "stop"}
    return status, {"id": f"chatcmpl-{text}", "choices": [choice], "usage": {"completion_tokens": 1}}, headers


def failed(status: int, **headers: str) -> Reply:
    error = {"message": f"It is {status}.", "type": "t", "param": None, "code": f"code_{status}"}
    return status, {"error": error}, {name.replace("_", "-"): value for name, value in headers.items()}


@pytest.fixture
def scripted() -> Iterator[Scripted]:
    server = Scripted()
    thread = threading.Thread(target=server.http.serve_forever, args=(0.01,))
    thread.start()
    yield server
    server.http.shutdown()
    thread.join()
    server.http.server_close()


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batch_run, "PAUSES", (0.01, 0.01))


def arguments(fields: dict[str, Any], *more: str) -> list[str]:
    """The options of a model here."""
    names = {"model": "--model", "draft_model": "--draft-model", "dtype": "--dtype", "max_tokens": "--max-tokens"}
    given = [part for name, option in names.items() for part in (option, str(fields[name] or "none"))]
    return [*given, "--served-model-name", NAME, *more]


# Against a model here and a real server.


@pytest.mark.usefixtures("one_thread")
def test_a_model_here_and_a_server_write_the_same(toy: dict[str, Any], tmp_path: Path, capsys: Any) -> None:
    """Costs 3 s."""
    bodies = questions(3) | {"text": {"model": NAME, "prompt": "Once"}, "bad": {"model": NAME, "prompt": "", "n": 2}}
    requests, here, there = write(tmp_path / "in", bodies), tmp_path / "here", tmp_path / "there"
    assert main(["batch", str(requests), str(here), *arguments(toy, "--no-isolate")]) == 0
    out, err = capsys.readouterr()
    assert out.startswith(f"5 of 5 answers are in {here} (5 new at ") and "1 refused: see response.body.error)" in out
    assert "answers: 0 of 5, 0.0 tokens/s" in err and "Traceback" not in err
    refused = read(here)["bad"]
    assert refused["response"]["status_code"] == 400 and refused["error"] is None
    assert refused["response"]["body"]["error"]["message"].startswith("n = 2: must be 1.")
    keys, wrong = tmp_path / "keys", tmp_path / "wrong"
    keys.write_text("key\n")
    wrong.write_text("other\n")
    with CARDChatModel(**toy).load() as model, served(model, api_keys=("key",)) as url:
        command = ["batch", str(requests), str(there), "--server", f"{url}/v1/"]
        for given in ([], ["--api-key-file", str(wrong)]):
            assert main([*command, *given]) == 2
            assert "--server = " in (err := capsys.readouterr().err) and "refuses requests with status 401" in err
            assert "Hint: --api-key-file FILE gives a key" in err and not there.read_bytes()
        assert main([*command, "--api-key-file", str(keys)]) == 0
    assert texts(here) == texts(there) and len(texts(here)) == 4
    assert main(["batch", str(requests), str(there), "--server", url]) == 0, "nothing is left to send"
    assert capsys.readouterr().out.endswith(f"5 of 5 answers are in {there} (none new, 5 were there; 1 refused: "
                                            "see response.body.error)\n")  # fmt: skip


def test_what_is_wrong_is_said_before_anything_is_loaded(toy: dict[str, Any], tmp_path: Path, capsys: Any) -> None:
    requests, out = write(tmp_path / "in", questions(2) | {"x": {"model": "gpt", "messages": []}}), tmp_path / "out"
    keys = tmp_path / "keys"
    keys.write_text("key\n")
    here = arguments(toy)
    for given, words in (
        (here, "in, line 3: body.model = 'gpt': is not served here; there is tiny. Hint: --served-model-name gpt"),
        (["--server", "ftp://x"], "--server = 'ftp://x': must be http:// or https:// and a host"),
        (["--server", "http://x:y"], "--server = 'http://x:y': is no address"),
        (["--server", "http://x", "--model", "m"], "--model = 'm': is an option of a model here, not of a server"),
        (["--concurrency", "0"], "--concurrency = 0"),
        ([*here, "--api-key-file", str(keys)], "goes with --server only"),
        ([*here, "--temperature", "-1"], "temperature"),
    ):
        assert main(["batch", str(requests), str(out), *given]) == 2
        assert words in capsys.readouterr().err
    requests.write_text("no JSON\n" * 12)
    assert main(["batch", str(requests), str(out), *here]) == 2
    said = capsys.readouterr().err.splitlines()
    assert len(said) == 11 and "line 10 = 'no JSON'" in said[9] and "more lines are bad" in said[10]
    assert not out.exists()


@pytest.mark.parametrize("missing", ["fastapi", "httpx"])
def test_missing_packages_are_named(missing: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    requests = write(tmp_path / "in", questions(1))
    for name in ("app", "batch_run"):
        monkeypatch.delitem(sys.modules, f"langchain_card.serve.{name}", raising=False)
    monkeypatch.setitem(sys.modules, missing, None)
    assert main(["batch", str(requests), str(tmp_path / "out")]) == 2
    assert f"batch = '{missing}': is missing" in (err := capsys.readouterr().err) and "pip install fastapi httpx" in err


# Against servers that fail.


@pytest.mark.usefixtures("quick")
def test_passing_failures_are_waited_for_and_tried_again(scripted: Scripted, tmp_path: Path) -> None:
    """A server that says when to come again is not given up after a few tries."""

    def reply(text: str, times: int) -> Reply | None:
        failures = {
            "q0": [failed(503, retry_after="0")] * 6,
            "q1": [failed(429, retry_after="0")] * 4,
            "q2": [failed(500), failed(502)],
            "q3": [None, None],
            "q4": [(502, b"<html>", {})],
            "q5": [(200, b"half an ans", {})],
        }.get(text, [])
        return failures[times - 1] if times <= len(failures) else said(text)

    scripted.reply = reply
    requests, out = write(tmp_path / "in", questions(8)), tmp_path / "out"
    assert main(["batch", str(requests), str(out), "--server", scripted.url]) == 1
    assert scripted.times == {"q0": 7, "q1": 5, "q2": 3, "q3": 3, "q4": 2, "q5": 1, "q6": 1, "q7": 1}
    assert read(out)["q5"]["error"]["code"] == "http_200", "an answer that is no JSON is none"
    scripted.times["q5"] = 1
    assert main(["batch", str(requests), str(out), "--server", scripted.url]) == 0
    assert texts(out) == {name: name.upper() for name in questions(8)}
    assert read(out)["q7"]["response"]["request_id"] == "chatcmpl-q7"


@pytest.mark.usefixtures("quick")
def test_what_fails_is_recorded_and_tried_by_the_next_run(scripted: Scripted, tmp_path: Path, capsys: Any) -> None:
    replies = {"q1": failed(500), "q2": failed(404), "q3": failed(504, x_should_retry="false"), "q4": failed(400)}
    scripted.reply = lambda text, _: replies.get(text) or said(text)
    requests, out = write(tmp_path / "in", questions(6)), tmp_path / "out"
    command = ["batch", str(requests), str(out), "--server", scripted.url, "--concurrency", "1"]
    assert main(command) == 1
    said_out, said_err = capsys.readouterr()
    assert said_out.startswith(f"3 of 6 answers are in {out} (3 new at ") and "; 1 refused" in said_out
    assert "3 failed, the last with 'status 504: It is 504.'; the same command tries again" in said_err
    assert read(out)["q1"]["error"] == {"code": "code_500", "message": "status 500: It is 500."}
    assert read(out)["q1"]["response"] is None and read(out)["q4"]["response"]["status_code"] == 400
    assert scripted.times == {"q0": 1, "q1": 3, "q2": 1, "q3": 1, "q4": 1, "q5": 1}
    replies.clear()
    assert main(command) == 0
    assert scripted.times == {"q0": 1, "q1": 4, "q2": 2, "q3": 2, "q4": 1, "q5": 1}
    assert len(texts(out)) == 5 and len(read(out)) == 6


@pytest.mark.usefixtures("quick")
def test_a_server_that_is_gone_is_given_up(scripted: Scripted, tmp_path: Path, capsys: Any) -> None:
    scripted.reply = lambda text, _: said(text) if text in ("q0", "q1") else None
    requests, out = write(tmp_path / "in", questions(50)), tmp_path / "out"
    command = ["batch", str(requests), str(out), "--server", scripted.url, "--concurrency", "2"]
    assert main(command) == 1
    said_err = capsys.readouterr().err
    assert f"{scripted.url} does not answer: " in said_err and "RemoteProtocolError" in said_err
    failures = len(read(out)) - 2
    assert 16 <= failures <= 17 and f"{48 - failures} were not sent" in said_err
    scripted.reply = lambda text, _: said(text)
    assert main(command) == 0 and len(texts(out)) == 50


# Processes that end early.


@contextmanager
def running(*args: str) -> Iterator[subprocess.Popen[str]]:
    """A `langchain-card batch` in a process."""
    command = [sys.executable, "-W", "ignore", "-c", CLI, "batch", *args]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


def num_lines(path: Path) -> int:
    return path.read_bytes().count(b"\n") if path.exists() else 0


def kill_at(count: int, out: Path, *args: str) -> None:
    """Run a batch and kill it once OUT has so many lines."""
    with running(*args) as process:
        wait_until(lambda: num_lines(out) >= count or process.poll() is not None, LOADED)
        process.send_signal(signal.SIGKILL)
        process.wait(20)


def test_killed_twice_it_asks_for_the_rest(scripted: Scripted, tmp_path: Path) -> None:
    """Costs 3 s."""
    paused = threading.Event()

    def reply(text: str, _: int) -> Reply:
        paused.wait(0.01)
        return said(text)

    scripted.reply = reply
    requests, out = write(tmp_path / "in", questions(200)), tmp_path / "out"
    command = (str(requests), str(out), "--server", scripted.url, "--concurrency", "4")
    for count in (20, 60):
        kill_at(count, out, *command)
        done = out.read_bytes()[: out.read_bytes().rindex(b"\n")].splitlines()
        assert count <= len(done) < 200
        again = {json.loads(line)["custom_id"] for line in done}
        scripted.times.clear()
    paused.set()
    assert main(["batch", *command]) == 0
    assert texts(out) == {name: name.upper() for name in questions(200)}
    assert {*scripted.times} == {*questions(200)} - again and {*scripted.times.values()} == {1}


def test_ctrl_c_leaves_a_file_that_goes_on(scripted: Scripted, tmp_path: Path) -> None:
    """Costs 2 s. Requests without an answer are given up, however long they would take."""
    ended = threading.Event()

    def reply(text: str, _: int) -> Reply:
        if text in ("q5", "q9"):
            ended.wait(60)
        return said(text)

    scripted.reply = reply
    requests, out = write(tmp_path / "in", questions(10)), tmp_path / "out"
    command = (str(requests), str(out), "--server", scripted.url, "--concurrency", "4")
    with running(*command) as process:
        wait_until(lambda: num_lines(out) == 8)
        process.send_signal(signal.SIGINT)
        assert process.wait(20) == 130
        assert process.stderr is not None and "Traceback" not in (err := process.stderr.read())
    ended.set()
    assert f"langchain-card: interrupted; 8 of 10 answers are in {out}, and the same command goes on" in err
    assert len(texts(out)) == 8 and main(["batch", *command]) == 0 and len(texts(out)) == 10


@pytest.mark.timeout(2400)
@pytest.mark.slow
def test_killed_twice_a_model_here_writes_what_one_run_writes(tmp_path: Path) -> None:
    """Costs a minute or more: four processes load a pair and write 200 answers, greedy and drawn."""
    pair = make_pair(tmp_path)
    bodies = {
        name: body | {"max_tokens": 4 + i % 20, "temperature": i % 2, "seed": i}
        for i, (name, body) in enumerate(questions(200).items())
    }
    requests, out, whole = write(tmp_path / "in", bodies), tmp_path / "out", tmp_path / "whole"
    options = arguments(pair, "--max-model-len", "512")
    kill_at(30, out, str(requests), str(out), *options)
    kill_at(100, out, str(requests), str(out), *options)
    assert 100 <= num_lines(out) < 200
    for path in (out, whole):
        with running(str(requests), str(path), *options) as process:
            said_out, said_err = process.communicate(timeout=LOADED)
            assert process.returncode == 0, said_err
    assert "were there" not in said_out and len(texts(whole)) == 200
    assert texts(out) == texts(whole)


@pytest.mark.timeout(1200)
@pytest.mark.slow
def test_ctrl_c_ends_answers_of_a_model_here(tmp_path: Path) -> None:
    """Costs 15 s: a process loads a pair."""
    pair, long = make_pair(tmp_path), {"max_tokens": 7000, "logit_bias": {"256": -100}}
    bodies = questions(12) | {name: body | long for name, body in [*questions(12).items()][4:]}
    requests, out = write(tmp_path / "in", bodies), tmp_path / "out"
    with running(str(requests), str(out), *arguments(pair)) as process:
        wait_until(lambda: num_lines(out) == 4 or process.poll() is not None, LOADED)
        process.send_signal(signal.SIGINT)
        _, said_err = process.communicate(timeout=120)
    assert process.returncode == 130 and "4 of 12 answers" in said_err and "Traceback" not in said_err
    assert len(texts(out)) == 4
