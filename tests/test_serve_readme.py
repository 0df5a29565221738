"""What README tells people to type against a server, typed."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from played import make_pair
from served import served

from langchain_card import CARDChatModel

README = (Path(__file__).parent.parent / "README.md").read_text()
ADDRESS, MODEL = "http://127.0.0.1:8000", "qwen2.5-coder-1.5b"
COMMANDS = re.findall(r"^\$ (curl (?:.*\\\n)*.*)$", README, re.MULTILINE)

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed"),
]


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    fields = make_pair(tmp_path_factory.mktemp("pair")) | {"max_tokens": 20}
    with CARDChatModel(**fields).load() as model, served(model, model_names=(MODEL,)) as url:
        yield url


def test_there_are_some() -> None:
    assert len(COMMANDS) >= 3 and all(ADDRESS in command for command in COMMANDS)


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command.split("'")[0][:60])
def test_a_line(url: str, command: str) -> None:
    typed = command.replace(ADDRESS, url).replace("curl ", "curl --fail-with-body --silent --show-error ", 1)
    done = subprocess.run(["bash", "-c", typed], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    if "stream" in command:
        *events, last, end = done.stdout.split("\n\n")
        assert last == "data: [DONE]" and not end and json.loads(events[0].removeprefix("data: "))["choices"]
    else:
        assert json.loads(done.stdout)
