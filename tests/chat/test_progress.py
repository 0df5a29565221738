"""Progress that users see: bars on a terminal and in a notebook, lines elsewhere."""

from __future__ import annotations

import io
import os
import pty
import subprocess
import sys
from typing import Any

import nbformat
import pytest
from nbclient import NotebookClient

from langchain_card import CARDChatModel
from langchain_card.chat import progress
from langchain_card.chat.progress import ConsoleProgress, tokens
from langchain_card.engine import backends, build, engine
from langchain_card.runtime.cpu import compilations
from tests.support import ROOT

STEPS = """
import time
from langchain_card.chat.progress import ConsoleProgress, tokens
with ConsoleProgress(lines=False) as bar:
    bar.update("load it", 0, 0)
    time.sleep(0.3)
    bar.update("read the prompt", 1024, 2400, tokens)
    time.sleep(0.3)
print("done")
"""


def test_lines_where_no_bar_can_be_drawn(capsys: pytest.CaptureFixture[str]) -> None:
    with ConsoleProgress() as shown:
        shown.update("load it", 0, 0)
        shown.update("convert", 10**6, 2 * 10**6)
        shown.update("convert", 11 * 10**5, 2 * 10**6)
    assert capsys.readouterr().err == "load it\nconvert: 1.0 MB of 2.0 MB\n"
    with ConsoleProgress(lines=False) as hidden, ConsoleProgress(delay=60) as late:
        hidden.update("load it", 0, 0)
        late.update("load it", 0, 0)
    assert not capsys.readouterr().err


def test_a_terminal_shows_one_bar_which_disappears() -> None:
    master, slave = pty.openpty()
    environment = {**os.environ, "TERM": "xterm", "COLUMNS": "100", "PYTHONPATH": str(ROOT)}
    with subprocess.Popen([sys.executable, "-c", STEPS], stderr=slave, stdout=subprocess.PIPE, env=environment):
        os.close(slave)
        sent = io.BytesIO()
        while True:
            try:
                piece = os.read(master, 4096)
            except OSError:
                break
            if not piece:
                break
            sent.write(piece)
    os.close(master)
    text = sent.getvalue().decode()
    assert "load it" in text and "1,024 tokens of 2,400 tokens" in text
    assert text.rstrip().endswith(("\x1b[2K", "\x1b[?25h", "\x1b[1A\x1b[2K")), "nothing stays"


def test_a_second_bar_of_a_terminal_is_not_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    monkeypatch.setattr(sys, "stderr", Terminal())
    with ConsoleProgress() as first, ConsoleProgress() as second:
        first.update("first", 1, 2)
        second.update("second", 1, 2)
        assert isinstance(first._view, progress._TerminalBar) and isinstance(second._view, progress._Lines)
    with ConsoleProgress() as third:
        third.update("third", 1, 2)
        assert isinstance(third._view, progress._TerminalBar)


def test_a_notebook_shows_a_bar_which_disappears() -> None:
    seen = list[str]()

    class Client(NotebookClient):
        def process_message(self, message: dict[str, Any], cell: Any, cell_index: int) -> Any:
            seen.append(str(message["content"].get("data", {}).get("text/html", "")))
            return super().process_message(message, cell, cell_index)

    code = f"import sys; sys.modules['ipywidgets'] = None\n{STEPS}import tqdm.auto\n"
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(code)])
    Client(notebook, timeout=60, resources={"metadata": {"path": str(ROOT)}}).execute()
    assert any("<progress></progress> load it" in text for text in seen)
    assert any("read the prompt 1,024 tokens of 2,400 tokens" in text for text in seen)
    outputs = notebook.cells[0].outputs
    streams = [output.get("text") for output in outputs if output.output_type == "stream"]
    assert streams == ["done\n"], "no warning that ipywidgets is missing"
    assert [output.data["text/html"] for output in outputs if output.output_type == "display_data"] == [""]


def test_amounts() -> None:
    assert tokens(2400) == "2,400 tokens" and progress.megabytes(98_400_000) == "98.4 MB"


def test_kernels_that_no_cache_holds_are_announced_as_they_begin(
    toy: dict[str, Any], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    announced = list[str]()

    def start_driver(*args: Any) -> Any:
        for _ in range(11):
            compilations.begin()
        announced.append(capsys.readouterr().err)
        return build.start_driver(*args)

    monkeypatch.setattr(backends, "start_driver", start_driver)
    monkeypatch.setattr(compilations, "_begun", 0)
    monkeypatch.setattr(engine, "_compilations", 0)
    with CARDChatModel(**toy).load() as model:
        lines = [line for line in announced[0].splitlines() if line.startswith("compile")]
        assert lines == [f"compile kernels for this CPU, once: a minute ({count} so far)" for count in (1, 11)]
        assert model.engine.num_open == 0 and engine._compilations == compilations.num_begun(), "two tokens, too"
        compilations.begin()
        assert model.load() is model and not capsys.readouterr().err, "once"
