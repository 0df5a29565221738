"""llama-server as a peer, with small programs in its place: what it is asked, what is read, how it ends."""

from __future__ import annotations

import contextlib
import json
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from langchain_card.bench.method_table import PEER_OPTIONS, PEERS, check_methods
from langchain_card.bench.peers import llama_server
from langchain_card.bench.peers.llama_server import LlamaServer, read_events, server_version
from langchain_card.cli import main
from langchain_card.config import EngineConfig
from langchain_card.errors import EngineError, InvalidInputError
from tests.support.processes import gone, wait_until

pytestmark = pytest.mark.usefixtures("one_thread")
SMALL = EngineConfig("smollm2-135m", None)
DIES, HANGS, FAILS, UNREADABLE = 666, 555, 444, 9

SERVER = f"""#!{sys.executable} -ES
import http.server, json, os, sys, time
assert not [name for name in os.environ if name.startswith("LLAMA_ARG_")]
if "--version" in sys.argv:
    print("version: 12 (abc)", file=sys.stderr)
    sys.exit()

class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self):
        self.reply(200, b"{{}}")

    def reply(self, status, body):
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def chunk(self, event):
        data = b"data: " + json.dumps(event).encode() + b"\\n\\n"
        self.wfile.write(b"%x\\r\\n%s\\r\\n" % (len(data), data))
        self.wfile.flush()

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        print("body", json.dumps(body), flush=True)
        answer = body["prompt"][: body["n_predict"]]
        if answer[0] == {FAILS}:
            return self.reply(400, b'{{"error": "the prompt is too long"}}')
        if not body.get("stream"):
            return self.reply(200, json.dumps({{"tokens": answer}}).encode())
        self.send_response(200)
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        for number, token in enumerate(answer, start=1):
            if token == {DIES}:
                print("ggml: out of luck", flush=True)
                os._exit(7)
            if token == {HANGS}:
                time.sleep(60)
            if token != {UNREADABLE}:
                self.chunk({{"tokens": [token], "stop": False, "tokens_predicted": number}})
            time.sleep(0.01)
        drafts = {{"draft_n": 8, "draft_n_accepted": len(answer) // 2}} if len(answer) > 2 else {{}}
        self.chunk({{"tokens": [], "stop": True, "tokens_predicted": len(answer), "timings": drafts}})
        self.wfile.write(b"0\\r\\n\\r\\n")

http.server.ThreadingHTTPServer(("127.0.0.1", int(sys.argv[sys.argv.index("--port") + 1])), Handler).serve_forever()
"""


@pytest.fixture(autouse=True)
def _quick(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave out what reads a whole GGUF file, but in the test of files."""
    if "files" not in request.node.name:
        monkeypatch.setattr(llama_server, "peer_weights", lambda *_: ("Q4_1 of the file", 1 << 20))


@pytest.fixture
def program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Path]:
    """Return a function that puts a program in the place of llama-server."""

    def place(text: str) -> Path:
        path = tmp_path / "llama-server"
        path.write_text(text)
        path.chmod(0o755)
        monkeypatch.setenv("LLAMA_SERVER", str(path))
        return path

    return place


@pytest.fixture
def server(program: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch) -> Iterator[LlamaServer]:
    program(SERVER)
    monkeypatch.setenv("LLAMA_ARG_THREADS", "99")
    with contextlib.closing(LlamaServer("llama-server", SMALL)) as started:
        yield started


def test_an_answer_is_read_with_its_times(server: LlamaServer) -> None:
    run = server.run([[40, 41, UNREADABLE, 42, 43, 44, 45]], 6, 0)
    assert run.token_ids == ((40, 41, UNREADABLE, 42, 43, 44),), "the id without an event is asked for"
    assert run.tokens == 5 and run.first > 0 and 0.04 < run.seconds < 2 and 0.015 < run.gap < run.seconds
    assert run.figures == {"acceptance": 3 / 8, "accepted_length": 2.0} and run.peak > 1 << 22
    assert server.run([[40, 41]], 2, 0).figures == {"accepted_length": 1.0}, "without drafts"
    assert len(server.run([[40]], 9, 0).token_ids[0]) == 1


def test_an_answer_ends_with_its_end_of_text(server: LlamaServer) -> None:
    (end, *_) = server._ends
    run = server.run([[40, 41, end, 43]], 4, 0)
    assert run.token_ids == ((40, 41, end),) and run.tokens == 2


def test_it_is_asked_for_the_likeliest_token_and_reuses_nothing(server: LlamaServer) -> None:
    server.run([[40, 41]], 2, 0)
    server._log.seek(0)
    (line,) = [line for line in server._log if line.startswith("body ")]
    body = json.loads(line[5:])
    assert body["prompt"] == [40, 41] and body["n_predict"] == 2 and body["stream"] and body["return_tokens"]
    assert body["temperature"] == 0 and body["top_k"] == 1 and body["cache_prompt"] is False
    assert set(body["samplers"]) <= {"top_k", "temperature"} and "ignore_eos" not in body
    drawn = llama_server._sampling(0.7, ignore_end=True)
    assert drawn["temperature"] == 0.7 and "top_k" not in drawn["samplers"] and drawn["ignore_eos"]


def test_n_grams_learn_nothing_from_another_repeat(program: Callable[[str], Path]) -> None:
    program(SERVER)
    for name, stays in (("llama-server", True), ("llama-server-ngram", False)):
        with contextlib.closing(LlamaServer(name, SMALL)) as started:
            pids = []
            for repeat in (-1, -1, 0, 0):
                started.run([[40]], 1, repeat)
                pids.append(started._process.pid)
            assert pids[0] == pids[1] and pids[2] == pids[3] and (pids[1] == pids[2]) == stays
            assert gone(pids[0]) != stays
        assert gone(pids[-1])


@pytest.mark.slow
def test_options_and_files_are_on_its_command_line(program: Callable[[str], Path]) -> None:
    program(SERVER)
    pair = EngineConfig("smollm2-135m", "smollm2-135m", max_model_len=512)
    options = {"spec-type": "draft-simple", "spec-draft-n-max": 7, "kv-offload": False, "mlock": True}
    with contextlib.closing(LlamaServer("llama-server-draft", pair, options=options)) as started:
        said = " ".join(started._arguments)
        assert started.weights == "Q4_1 of the file, draft Q4_1 of the file"
    assert "--spec-type draft-simple" in said and "--spec-draft-n-max 7" in said
    assert (
        "--no-kv-offload --mlock --" in said
        and "--spec-draft-model" in said
        and (started._slots, started._max_len) == (1, 512)
    )
    assert said.count(".gguf") == 2


def test_speculation_is_switched_on_where_a_method_promises_it() -> None:
    """The server's default type is none, whatever models it is given."""
    types = {name: set(str(options.get("spec-type", "")).split(",")) for name, options in PEER_OPTIONS.items()}
    assert types["llama-server"] == {""} and types["llama-server-draft"] == {"draft-simple"}
    assert all(kind.startswith("ngram-") for kind in types["llama-server-ngram"])
    assert "draft-simple" in types["llama-server-both"] and len(types["llama-server-both"]) == 2
    assert {name for name, kind in PEERS.items() if kind.weights == "gguf"} == {*PEER_OPTIONS, "openvino-batching"}


def test_a_server_that_dies_says_why_and_leaves_nothing(program: Callable[[str], Path]) -> None:
    program("#!/bin/sh\necho loading\necho 'error: unknown model' >&2\nexit 3\n")
    before = set(psutil.Process().children())
    with pytest.raises(EngineError, match=r"exit code 3.*its process ended \(error: unknown model\)"):
        LlamaServer("llama-server", SMALL)
    assert set(psutil.Process().children()) <= before


def test_a_server_that_dies_while_it_answers(server: LlamaServer) -> None:
    with pytest.raises(EngineError, match=r"exit code 7.*ended \(ggml: out of luck\)"):
        server.run([[40, DIES]], 4, 0)
    with pytest.raises(EngineError, match="exit code 7"):
        server.run([[40]], 4, 0)


def test_a_server_that_refuses_or_hangs(server: LlamaServer, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(EngineError, match=r"status 400.*the prompt is too long"):
        server.run([[FAILS]], 4, 0)
    assert server.run([[40]], 4, 0).token_ids == ((40,),), "bad input ends one run"
    monkeypatch.setattr(llama_server, "SECONDS", 0.3)
    with pytest.raises(EngineError, match="no answer"):
        server.run([[40, HANGS]], 4, 0)
    assert server._process.wait(10) == -signal.SIGKILL


def test_it_ends_with_the_process_that_started_it() -> None:
    code = (
        "import os, subprocess, sys, time\n"
        "child = subprocess.Popen([sys.executable, '-ISc', sys.argv[1], str(os.getpid()), '/bin/sleep', '60'])\n"
        "print(child.pid, flush=True)\ntime.sleep(60)\n"
    )
    command = [sys.executable, "-c", code, llama_server._LAUNCH]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        wait_until(lambda: "sleep" in psutil.Process(pid).name())
        parent.kill()
    wait_until(lambda: gone(pid))


def event(token: int, number: int) -> bytes:
    return b"data: " + json.dumps({"tokens": [token], "stop": False, "tokens_predicted": number}).encode()


def test_tokens_without_an_event_come_with_the_next_one() -> None:
    last = b'data: {"tokens": [], "stop": true, "tokens_predicted": 5, "timings": {}}'
    lines = [(1.0, event(7, 1)), (1.5, b""), (2.0, b": a comment"), (3.0, event(8, 4)), (4.0, last)]
    answer = read_events("llama-server", lines)
    unknown = llama_server.UNKNOWN
    assert answer.token_ids == [7, unknown, unknown, 8, unknown] and answer.times == [1.0, 3.0, 3.0, 3.0, 4.0]


def test_a_stream_without_an_end_or_with_an_error() -> None:
    with pytest.raises(EngineError, match="the answer has no end"):
        read_events("llama-server", [(1.0, event(7, 1))])
    with pytest.raises(EngineError, match="out of context"):
        read_events("llama-server", [(1.0, b'data: {"error": {"message": "out of context"}}')])


def test_without_a_server(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.delenv("LLAMA_SERVER", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert main(["bench", "--methods", "llama-server"]) == 2
    said = capsys.readouterr().err
    assert "not on PATH" in said and "set LLAMA_SERVER" in said
    monkeypatch.setenv("LLAMA_SERVER", str(tmp_path / "absent"))
    with pytest.raises(InvalidInputError, match=r"LLAMA_SERVER.*absent.*is no program"):
        LlamaServer("llama-server", SMALL)


def test_an_answer_is_cut_where_an_id_stays_unknown(server: LlamaServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "_filled", lambda token_ids, body: token_ids)
    run = server.run([[40, 41, UNREADABLE, 42]], 4, 0)
    assert run.token_ids == ((40, 41),) and run.tokens == 1


def test_its_own_plain_decoding_runs_beside_it(program: Callable[[str], Path]) -> None:
    path = program(SERVER)
    names = check_methods(("card", "llama-server-ngram"), EngineConfig(), 1)
    assert names == ("plain", "card", "llama-server", "llama-server-ngram")
    with pytest.raises(InvalidInputError, match="needs a draft model"):
        check_methods(("llama-server-draft",), SMALL, 1)
    assert server_version(str(path)) == "12 (abc)"
