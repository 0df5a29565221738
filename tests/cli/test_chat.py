"""`langchain-card chat` and its demo, as real processes: through pipes and in a terminal."""

from __future__ import annotations

import contextlib
import io
import os
import re
import select
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
from rich.console import Console

from langchain_card.chat.progress import ConsoleProgress
from langchain_card.cli import main
from langchain_card.cli.demo import Board, _compare, verdict
from langchain_card.cli.render import Screen, clean, progress, status
from langchain_card.config import EngineConfig
from langchain_card.core.messages import Reading
from langchain_card.core.request import FinishReason, RequestStats, SamplingParams
from langchain_card.engine.engine import Engine
from langchain_card.engine.generation import Completion
from langchain_card.text.detokenizer import Piece
from tests.support import tiny

SMALL = ("--model", "smollm2-135m", "--draft-model", "ngram")
QUESTION = "Name three large rivers."
SCHEDULES = ("plain", "sequential", "parallel", "auto")


CLI = "import sys; from langchain_card.cli import main; sys.exit(main())"
TAKE_TERMINAL = "import fcntl, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0);"


def command(*args: str, before: str = "") -> list[str]:
    return [sys.executable, "-c", before + CLI, "chat", *args]


def piped(*args: str, said: str = "") -> subprocess.CompletedProcess[str]:
    done = subprocess.run(command(*args), input=said, capture_output=True, text=True, timeout=300)
    assert "\x1b" not in done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    return done


# Through pipes.


@pytest.mark.slow
def test_conversation_through_pipes() -> None:
    """History is kept and forgotten; an overflow is explained and survived."""
    lines = [
        QUESTION,
        "/stats",
        QUESTION,
        "/stats",
        "/reset",
        QUESTION,
        "/stats",
        "many words " * 5000,
        "/huh",
        "/help",
    ]
    done = piped(*SMALL, "--max-tokens", "8", said="\n".join(lines))
    assert done.returncode == 0, done.stderr
    one, two, three = (int(n) for n in re.findall(r"context +(\d+) of 8,192 tokens", done.stdout))
    assert one == three
    assert two > one + 8
    assert re.findall(r"all answers +(\d), +(\d+) tokens", done.stdout) == [("1", "8"), ("2", "16"), ("3", "24")]
    answers = re.split(r"last answer.*\n(?:.+\n)*?all answers.*\n", done.stdout)
    assert answers[0] == answers[2]
    assert "the context holds 8,192" in done.stderr
    assert "Hint: shorten the prompt" in done.stderr
    assert "There is no command /huh" in done.stderr
    assert "/reset   forget the conversation" in done.stdout


@pytest.mark.slow
def test_drafters_beside_and_below() -> None:
    """Asked again, n-grams know the answer; without them no token is theirs."""
    own = ("--model", "smollm2-135m", "--draft-model", "smollm2-135m", "--schedule", "sequential", "--max-tokens", "24")
    said = f"{QUESTION}\n/reset\n{QUESTION}\n/stats"
    for args, from_ngrams in (((), True), (("--drafters", "none"), False)):
        done = piped(*own, *args, said=said)
        origins = re.search(r"last answer.*\n +(.*)", done.stdout)
        assert origins, done.stdout + done.stderr
        assert bool(re.search(r"[1-9]\d* n-gram", origins[1])) == from_ngrams


@pytest.mark.slow
def test_demo_without_a_terminal() -> None:
    done = piped(*SMALL, "--demo", "--max-tokens", "20")
    assert done.returncode == 0, done.stderr
    rows = {line.split()[0]: line for line in done.stdout.splitlines() if line.split()[:1] and "x  " in line}
    assert tuple(rows) == SCHEDULES
    assert rows["plain"].split()[2:6] == ["1.00x", "1.00", "0%", "0%"]
    assert len({len(row) for row in rows.values()}) == 1, "the table is not aligned"
    assert done.stdout.endswith("identical: yes\n")
    assert "run 8 of 8: plain" in done.stderr


def test_no_run_of_the_demo_copies_another(tiny_pairs: dict[str, tuple[str, str]]) -> None:
    target, draft = tiny_pairs["llama"]
    prompt_ids = tiny.byte_tokenizer()("def add(a, b):").input_ids
    with Engine(EngineConfig(target, draft, max_model_len=256)) as engine:
        runs = _compare(Screen(), engine, prompt_ids, SamplingParams(max_tokens=8))
        again = engine.submit(prompt_ids, SamplingParams(max_tokens=8, tenant="run 1 of 8: plain")).result()
    assert again.stats.cached_tokens > 0, "it would be seen"
    assert [made.stats.cached_tokens for each in runs.values() for made in each] == [0] * 8


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (("--model", "smolm-135m"), "did you mean smollm2-135m"),
        (("--max-tokens", "0"), "max_tokens = 0: must be a whole number between 1 and"),
        (("--demo", "--draft-model", "none"), "draft_model = 'none'"),
        (("--drafters", "ngrams"), "drafters = 'ngrams'"),
        ((*SMALL[:2], "--draft-model", "forced", "--drafters", "ngram?max_nodes=0"), "max_nodes = 0"),
        ((*SMALL, "--stack", "ngram"), "stack = "),
    ],
)
@pytest.mark.slow
def test_mistakes_end_with_2(args: tuple[str, ...], said: str) -> None:
    done = piped(*args)
    assert (done.returncode, done.stdout) == (2, "")
    assert said in done.stderr


# In a terminal.


@dataclass
class Terminal:
    """A child process that believes a person sits in front of it."""

    args: tuple[str, ...]
    seen: str = ""

    def __post_init__(self) -> None:
        self.master, slave = os.openpty()
        env = {**os.environ, "TERM": "xterm-256color", "COLUMNS": "80", "LINES": "24"}
        self.process = subprocess.Popen(
            command(*self.args, before=TAKE_TERMINAL),
            stdin=slave,
            stdout=slave,
            stderr=slave,
            env=env,
            start_new_session=True,
        )
        os.close(slave)

    def wait_for(self, text: str, seconds: float = 120) -> None:
        """Reads until `text` shows, and forgets all before it."""
        end = time.monotonic() + seconds
        while text not in self.seen:
            assert time.monotonic() < end, f"no {text!r} in {self.seen!r}"
            if select.select([self.master], [], [], 0.5)[0]:
                self.seen += os.read(self.master, 65536).decode(errors="replace")
        self.seen = self.seen.partition(text)[2]

    def type(self, line: str) -> None:
        os.write(self.master, f"{line}\n".encode())

    def press_ctrl_c(self) -> None:
        os.write(self.master, b"\x03")


@pytest.fixture
def terminal() -> Iterator[Terminal]:
    terminal = Terminal((*SMALL, "--max-tokens", "2000"))
    yield terminal
    terminal.process.kill()
    terminal.process.wait()
    os.close(terminal.master)


@pytest.mark.slow
def test_ctrl_c_stops_the_answer_and_keeps_the_program(terminal: Terminal) -> None:
    terminal.wait_for("/help lists commands")
    terminal.wait_for("> ")
    terminal.type("Write a very long story about a river, a boat and a dog.")
    terminal.wait_for("tokens at")
    terminal.press_ctrl_c()
    terminal.wait_for("stopped")
    terminal.type("/stats")
    terminal.wait_for("all answers  1, ")
    terminal.type("/quit")
    assert terminal.process.wait(60) == 0


# Drawing, without models.


@dataclass
class Script:
    """An answer that is already written."""

    pieces: list[Piece]
    stats: RequestStats = field(default_factory=RequestStats)

    reading: Reading | None = None

    def __iter__(self) -> Iterator[Piece]:
        return iter(self.pieces)


def test_colours_asked_for_make_no_terminal_of_a_pipe(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A notebook's kernel sets FORCE_COLOR for what it starts."""
    monkeypatch.setenv("FORCE_COLOR", "1")
    screen, words = Screen(), " ".join(["word"] * 60)
    with screen.waiting("waiting"), ConsoleProgress() as bars:
        screen.print(words)
        bars.update("stage", 1, 2)
    said = capsys.readouterr()
    assert not screen.is_terminal and words in said.out, "neither drawn nor wrapped"
    assert "waiting" in said.err and "stage: " in said.err and "\x1b[?25l" not in said.out + said.err


def drawn(pieces: list[Piece], **options: Any) -> str:
    """What a terminal of 20 columns was sent."""
    screen = Screen()
    sent = io.StringIO()
    screen.console = Console(file=sent, force_terminal=True, width=20, color_system="standard", **options)
    screen.is_terminal = True
    screen.stream(Script(pieces), tint=True)  # type: ignore[arg-type]
    return sent.getvalue()


def final_text(sent: str) -> str:
    """What remains on the screen: the rows that scrolled, without those that were drawn over."""
    rows: list[str] = [""]
    for part in re.split(r"(\n|\r|\x1b\[[?0-9;]*[A-Za-z])", sent):
        if part == "\n":
            rows.append("")
        elif part.endswith("A") and part.startswith("\x1b"):
            del rows[-int(part[2:-1] or 1) :]
        elif part == "\x1b[2K":
            rows[-1] = ""
        elif part and not part.startswith(("\x1b", "\r")):
            rows[-1] += part
    return "\n".join(row.rstrip() for row in rows)


def test_drawing_wraps_and_keeps_every_row_once() -> None:
    text = "The quick brown fox jumps over the lazy dog.\n\n    indented\nend"
    sent = drawn([Piece(i, char) for i, char in enumerate(text)])
    assert final_text(sent).strip("\n") == ("The quick brown fox\njumps over the lazy\ndog.\n\n    indented\nend")


def test_tints_follow_the_source_and_the_users_wish(monkeypatch: pytest.MonkeyPatch) -> None:
    pieces = [Piece(0, "own "), Piece(1, "draft ", "model"), Piece(2, "copy", "ngram")]
    sent = drawn(pieces)
    assert "\x1b[36mdraft " in sent
    assert "\x1b[33mcopy" in sent
    monkeypatch.setenv("NO_COLOR", "1")
    assert not re.search(r"\x1b\[3[36]m", drawn(pieces))


def test_an_answer_cannot_steer_the_terminal() -> None:
    assert clean("a\x1b[2Jb\x07\x9bc\td\r\n") == "a[2Jbc\td\n"
    assert "\x1b]0;title" not in drawn([Piece(0, "x\x1b]0;title\x07y")])


def test_status_lines() -> None:
    assert status(None) == progress(RequestStats()) == "reading the prompt"
    stats = RequestStats("parallel", rounds=5, output_tokens=21, hits=2, target_busy=3.0, draft_busy=4.4)
    stats.first_token, stats.ended = 10.0, 14.0
    assert status(stats) == "21 tokens at 5.0/s · accepted 4.2 · hits 40% · draft 100%, target 75% busy"


def test_a_long_prompt_shows_how_much_of_it_was_read() -> None:
    reading = Reading(0, 1024, 3278)
    assert status(None, reading) == progress(RequestStats(), reading) == "reading 3,278 tokens: 31%"
    assert progress(RequestStats(rounds=1, output_tokens=1), reading).startswith("1 tokens"), "the answer has begun"


class Read(Script):
    """An answer to a long prompt."""

    def readings(self) -> Iterator[Reading]:
        for read in (512, 1024):
            yield Reading(0, read, 3278)


def test_a_terminal_beside_a_pipe_shows_it_on_one_line_and_a_pipe_does_not(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    master, slave = os.openpty()
    with os.fdopen(slave, "w") as stderr:
        for stream in (stderr, sys.stderr):
            monkeypatch.setattr(sys, "stderr", stream)
            monkeypatch.setenv("TERM", "xterm")
            screen = Screen()
            screen.stream(Read([Piece(0, "Yes.")]))  # type: ignore[arg-type]
            said = capsys.readouterr()
            assert said.out == "Yes.\n" and said.err == ""
    shown = read_to_end(master)
    os.close(master)
    assert "reading 3,278 tokens: 31%" in shown
    assert final_text(shown).strip() == ""


def read_to_end(master: int) -> str:
    """What a closed terminal was sent.

    The kernel passes it on by a thread of its own, so that one read may miss the end.
    """
    shown = b""
    with contextlib.suppress(OSError):  # "input/output error" after the last byte
        while part := os.read(master, 65536):
            shown += part
    return shown.decode()


def test_the_table_fits_80_columns_while_it_fills() -> None:
    board, stats = Board(), RequestStats("sequential", rounds=10, output_tokens=9999, first_token=10.0, ended=12.0)
    board.runs["auto"] = [Completion("", (), FinishReason.LENGTH, stats)]
    console = Console(file=io.StringIO(), force_terminal=True, no_color=True, width=80)
    console.print(board)
    rows = re.sub(r"\x1b\[[0-9;]*m", "", console.file.getvalue()).splitlines()  # type: ignore[attr-defined]
    assert max(map(len, rows)) <= 80
    assert [row.split()[0] for row in rows[-5:-1]] == list(SCHEDULES)
    assert rows[-2].split()[1:4] == ["(sequential)", "4999.0", "-"]


class Letters:
    def decode(self, ids: tuple[int, ...]) -> str:
        return "".join(chr(i) for i in ids)


def test_a_difference_is_shown_with_its_place() -> None:
    ours, theirs = (tuple(map(ord, text)) for text in ("return x + 1", "return x * 1"))
    assert verdict(Letters(), [("plain", ours), ("auto", ours)]) == "identical: yes"
    shown = verdict(Letters(), [("plain", ours), ("parallel", theirs), ("auto", ours)])
    assert shown.startswith("identical: no\nparallel differs from plain at token 9:\n")
    assert "'return x + 1'" in shown
    assert "'return x * 1'" in shown
    assert "at token 6:" in verdict(Letters(), [("plain", ours), ("auto", ours[:6])])


def test_help_needs_no_model(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["chat", "--help"])
    assert "--draft-model" in capsys.readouterr().out
