"""`langchain-card models` with and without a terminal."""

from __future__ import annotations

import json
import os
import pty
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from langchain_card.cli import main
from tests.support import wheelhouse
from tests.support.processes import wait_until
from tests.support.wheelhouse import CLI, ROOT, TINY, finish, worker


@pytest.fixture
def wheels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    return wheelhouse.use(tmp_path, monkeypatch)


def test_cli(wheels: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("LANGCHAIN_CARD_HOME", str(tmp_path / "cache"))
    assert main(["models", "path", "tiny"]) == 2
    assert "langchain-card models pull tiny" in capsys.readouterr().err
    assert main(["models", "pull", "tiny"]) == 0
    out, err = capsys.readouterr()
    assert out == f"{tmp_path / 'cache/models/tiny/source.gguf'}\n"
    assert "download card-tiny-part0==1.0 (1 of 4): 0.0 MB of 0.2 MB" in err
    assert main(["models", "list"]) == 0
    assert "tiny\tdownloaded\t0.2 MB\t-\n" in capsys.readouterr().out
    assert main(["models", "rm", "tiny"]) == 0
    assert main(["models", "pull", "tinyy"]) == 2
    assert "Hint: did you mean tiny" in capsys.readouterr().err
    with pytest.raises(SystemExit, match="2"):
        main(["models", "frobnicate"])


def test_prefixes_are_listed_and_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("LANGCHAIN_CARD_HOME", str(tmp_path))
    main(["models", "list"])
    assert "prefixes" not in capsys.readouterr().out
    (tmp_path / "prefixes").mkdir()
    (tmp_path / "prefixes" / "0.safetensors").write_bytes(bytes(200_000))
    main(["models", "list"])
    assert capsys.readouterr().out.endswith("prefixes\ttexts\t0.2 MB\t-\n")
    assert main(["models", "rm", "prefixes"]) == 0 and not (tmp_path / "prefixes").exists()
    assert main(["models", "rm", "prefixes"]) == 2 and "nothing of it is in the store" in capsys.readouterr().err


def test_interrupt_exits_130_and_leaves_no_pip(wheels: Path, tmp_path: Path) -> None:
    process = worker("models", "pull", "tiny", script=CLI, LANGCHAIN_CARD_HOME=str(tmp_path / "cache"))
    wait_until(
        lambda: any(tmp_path.glob("cache/models/tiny/parts/tmp-*/log")), 60
    )  # pip runs, for the first of all parts
    process.send_signal(signal.SIGINT)
    code, _, err = finish(process)
    assert code == 130
    assert err.endswith("langchain-card: interrupted\n")
    wait_until(lambda: not alive(process.pid))


def alive(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True


def drain(descriptor: int, shown: bytearray) -> None:
    while True:
        shown += os.read(descriptor, 4096)


def test_on_a_terminal(wheels: Path, tmp_path: Path) -> None:
    ours, theirs = pty.openpty()
    env = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "LANGCHAIN_CARD_HOME": str(tmp_path),
        "TERM": "xterm",
        "COLUMNS": "120",
    }
    shown = bytearray()
    threading.Thread(target=drain, args=(ours, shown), daemon=True).start()
    for arguments in (["pull", "tiny"], ["list"]):
        command = [sys.executable, "-c", CLI, json.dumps(TINY), "models", *arguments]
        subprocess.run(command, stdin=theirs, stdout=theirs, stderr=theirs, env=env, check=True, timeout=120)
    wait_until(lambda: b"downloaded" in shown)
    assert "━".encode() in shown  # a bar and a table
    assert b"models in" in shown
