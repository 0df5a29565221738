"""The documentation's blocks of code; as a program it runs those of one page, in order, as they are written."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from dataclasses import asdict, dataclass
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any

from tests.support import ROOT

PAGES = ("README.md", *sorted(str(page.relative_to(ROOT)) for page in (ROOT / "docs").rglob("*.md")))
MODELS = {"LANGCHAIN_CARD_MODEL": "smollm2-135m", "LANGCHAIN_CARD_DRAFT_MODEL": "ngram"}
RUN = ("python", "console")
SERVE = "langchain-card serve"
ADDRESS = "127.0.0.1:8000"
BUILT_IN = "qwen2.5-coder-1.5b"
SECONDS = 240
"""That a block of Python, or a line of a console, may take."""

_FENCE = re.compile(r"^( *)(`{3,})(\w*)[^\n]*\n(.*?)^\1\2 *$", re.MULTILINE | re.DOTALL)
_MARK = re.compile(r"<!-- runs: ([^>]*?) -->\s*\Z")
_PLUGINS_PAGE = (ROOT / "docs/plugins.md").read_text(encoding="utf-8")
PLUGIN_FILES = dict(re.findall(r"```(?:python|toml)\n# (\S+)\n(.*?)```", _PLUGINS_PAGE, re.DOTALL))
"""Files that docs/plugins.md shows, by name."""
_PAGE_MARK = re.compile(r"^<!-- the page runs: ([^>]*?) -->$", re.MULTILINE)


@dataclass(frozen=True)
class Block:
    """A fenced block.

    Attributes:
        page: from the root of the repository.
        line: of its first line of text, from 1.
        language: what the fence says.
        text: without the fences.
        elsewhere: why it is not run here: "not in CI, ..." or "by tests/..."; "" where it is.
    """

    page: str
    line: int
    language: str
    text: str
    elsewhere: str = ""

    @property
    def place(self) -> str:
        return f"{self.page}:{self.line}"

    @property
    def commands(self) -> list[str]:
        """A console's lines behind `$ `, with those that go on behind a backslash."""
        return re.findall(r"^\$ ((?:.*\\\n)*.*)$", self.text, re.MULTILINE)


def blocks_of(page: str, text: str) -> list[Block]:
    """All fenced blocks; a comment in front of one, or one for the page, says why it does not run here."""
    whole = _PAGE_MARK.search(text)
    found = []
    for fence in _FENCE.finditer(text):
        own = _MARK.search(text[: fence.start()])
        mark = own or whole
        line = text.count("\n", 0, fence.start()) + 2
        body = re.sub(f"^{fence[1]}", "", fence[4], flags=re.MULTILINE)
        found.append(Block(page, line, fence[3], body, mark[1] if mark else ""))
    return found


def run_page(blocks: list[Block], folder: Path, seconds: float) -> subprocess.CompletedProcess[str]:
    """Runs blocks in a process of their own, in a folder; what they write comes back in one text."""
    (folder / ".curlrc").write_text("fail-with-body\nsilent\nshow-error\n")
    paths = [str(Path(sys.executable).parent), os.environ.get("PATH", "")]
    environment = {
        **os.environ, **MODELS, "PATH": os.pathsep.join(paths), "PYTHONPATH": str(ROOT), "CURL_HOME": str(folder),
        "LANGSMITH_TRACING": "false", "PYTHONUNBUFFERED": "1",
    }  # fmt: skip
    command, pipe = [sys.executable, "-W", "ignore", "-m", __spec__.name], subprocess.PIPE
    with subprocess.Popen(
        command, cwd=folder, env=environment, stdin=pipe, stdout=pipe, stderr=subprocess.STDOUT, text=True,
        start_new_session=True,
    ) as process:  # fmt: skip
        try:
            said, _ = process.communicate(json.dumps([asdict(block) for block in blocks]), seconds)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)  # with the server that it may have started
            raise
    return subprocess.CompletedProcess(command, process.returncode, said)


class Page:
    """Runs blocks: Python in one namespace, commands by bash, a server beside them. Only its port is another one."""

    def __init__(self) -> None:
        module = sys.modules["__main__"] = ModuleType("__main__")  # where pydantic looks for what annotations name
        self._names: dict[str, Any] = vars(module)
        self._server: subprocess.Popen[bytes] | None = None
        with socket.create_server(("127.0.0.1", 0)) as free:
            self._address = f"127.0.0.1:{free.getsockname()[1]}"

    def run(self, block: Block) -> None:
        text = block.text.replace(ADDRESS, self._address)
        if block.language == "python":
            lines = "\n" * (block.line - 1)  # so that a traceback names the page's
            exec(compile(lines + text, str(ROOT / block.page), "exec", dont_inherit=True), self._names)
        for command in block.commands if block.language == "console" else ():
            print(f"$ {command}", flush=True)
            self._type(command.replace(ADDRESS, self._address))

    def _type(self, command: str) -> None:
        if command.startswith(SERVE):
            self._serve(command.removesuffix("&").strip())
            return
        done = subprocess.run(["bash", "-c", command], stdout=subprocess.PIPE, text=True, timeout=SECONDS, check=False)
        print(done.stdout, flush=True)
        assert done.returncode == 0, f"exit code {done.returncode}"
        if command.startswith("curl") and "/v1/" in command:
            check_answer(done.stdout)

    def _serve(self, command: str) -> None:
        """With the name of the built-in target for the model that is there, unless the line names it itself."""
        self.close()
        command = command.partition(" #")[0]  # what is added must not become part of a comment
        named = "" if "--served-model-name" in command else f" --served-model-name {BUILT_IN}"
        port = self._address.partition(":")[2]
        self._server = subprocess.Popen(["bash", "-c", f"exec {command} --port {port}{named}"])
        until = time.monotonic() + SECONDS
        while not self._answers():
            assert self._server.poll() is None, "the server ended"
            assert time.monotonic() < until, "the server does not answer"
            time.sleep(0.1)

    def _answers(self) -> bool:
        try:
            with urllib.request.urlopen(f"http://{self._address}/health", timeout=5) as answer:
                return bool(answer.status == 200)
        except urllib.error.HTTPError as error:
            return error.code == 401
        except OSError:
            return False

    def close(self) -> None:
        if self._server is not None:
            self._server.terminate()
            self._server.wait(60)
            self._server = None


def check_answer(said: str) -> None:
    """Whether a server's answer is whole: JSON, or a stream of it that came to its end."""
    if said.startswith("data: "):
        *events, last, end = said.split("\n\n")
        assert last == "data: [DONE]" and not end, "the stream has no end"
        assert json.loads(events[0].removeprefix("data: "))["choices"]
    else:
        assert "error" not in json.loads(said)


def _late(_: int, __: FrameType | None) -> None:
    raise TimeoutError(f"it took longer than {SECONDS} s")


def main() -> None:
    """Runs the blocks of standard input; the first that fails ends it."""
    page = Page()
    signal.signal(signal.SIGALRM, _late)
    try:
        for each in json.load(sys.stdin):
            block, start = Block(**each), time.monotonic()
            print(f"== {block.place}", flush=True)
            signal.alarm(SECONDS)
            page.run(block)
            signal.alarm(0)
            print(f"\n== {block.place} ran in {time.monotonic() - start:.1f} s", flush=True)
    finally:
        page.close()


if __name__ == "__main__":
    main()
