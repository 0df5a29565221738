"""Terminal output of the commands: streamed text, statistics and colours; plain text if there is no terminal."""

from __future__ import annotations

import io
import os
import sys
import termios
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING

from rich.console import Console, ConsoleOptions, RenderResult
from rich.live import Live
from rich.text import Text

if TYPE_CHECKING:
    from typing_extensions import Self

    from langchain_card.core.messages import Reading
    from langchain_card.core.request import RequestStats
    from langchain_card.engine.generation import Generation
    from langchain_card.errors import CARDError
    from langchain_card.text.detokenizer import Piece

REFRESH = 10  # times a second
_STYLES = {"": "default", "ngram": "yellow"}
_NAMES = {"": "target's own", "model": "model draft", "ngram": "n-gram"}
_CONTROLS = dict.fromkeys([*range(9), *range(11, 32), *range(127, 160)])


def style_of(source: str) -> str:
    """Return the colour of tokens that `source` proposed; the target's own have the default one."""
    return _STYLES.get(source, "cyan")


def name_of(source: str) -> str:
    """Return the display name of a source of tokens."""
    return _NAMES.get(source, source)


def clean(text: str) -> str:
    """Remove control characters other than tab and newline, so that an answer cannot control the terminal."""
    return text.translate(_CONTROLS)


def share(part: float, whole: float) -> str:
    """Return a share as "42%"; 100% at most, although a step may have begun before the clock."""
    return f"{min(1.0, part / whole) if whole > 0 else 0.0:.0%}"


def seconds_of(stats: RequestStats) -> float:
    """Return the seconds since the first token, up to the end if the answer is complete."""
    return stats.seconds(time.perf_counter())


def progress(stats: RequestStats | None, reading: Reading | None = None) -> str:
    """Return an answer's length and speed as text.

    Args:
        stats: of the answer; None before the request has started.
        reading: how much of a long prompt was read.
    """
    if (stats is None or not stats.rounds) and reading is not None:
        return f"reading {reading.total:,} tokens: {share(reading.read, reading.total)}"
    if stats is None or not stats.rounds:
        return "reading the prompt"
    seconds = seconds_of(stats)
    rate = (stats.output_tokens - 1) / seconds if seconds > 0 else 0.0
    return f"{stats.output_tokens} tokens at {max(0.0, rate):.1f}/s"


def status(stats: RequestStats | None, reading: Reading | None = None) -> str:
    """Return `progress` with acceptance, hit rate and how busy the devices are."""
    line = progress(stats, reading)
    if stats is None or not stats.rounds or stats.schedule == "plain":
        return line
    seconds = seconds_of(stats)
    busy = f"target {share(stats.target_busy, seconds)} busy"
    if stats.draft_busy:
        busy = f"draft {share(stats.draft_busy, seconds)}, {busy}"
    lossy = f"lossy: {stats.rescued} kept · " if stats.lossy else ""
    return f"{line} · {lossy}accepted {stats.mean_accepted_length:.1f} · hits {stats.hit_rate:.0%} · {busy}"


class Screen:
    """The program's output: answers on standard output, remarks on standard error if there is no terminal.

    Attributes:
        console: standard output.
        errors: standard error.
        is_terminal: whether to redraw lines; a pipe gets plain lines, coloured if FORCE_COLOR is set, as in notebooks.
    """

    def __init__(self) -> None:
        for stream in (sys.stdin, sys.stdout, sys.stderr):
            if isinstance(stream, io.TextIOWrapper):
                stream.reconfigure(errors="replace")
        self.console = Console(highlight=False)
        self.errors = Console(highlight=False, stderr=True)
        self.is_terminal = sys.stdout.isatty() and self.console.is_terminal and not self.console.is_dumb_terminal

    def print(self, text: str, style: str = "") -> None:
        """Print a paragraph on standard output; it is wrapped on a terminal only."""
        self._write(self.console, text, style)

    def note(self, text: str, style: str = "dim") -> None:
        """Print a remark: on a terminal below the output, else on standard error."""
        self._write(self.console if self.is_terminal else self.errors, text, style)

    def waiting(self, text: str) -> AbstractContextManager[object]:
        """Show a message while the context runs."""
        if self.is_terminal:
            return self.console.status(Text(text, "dim"), spinner_style="dim")
        self.note(text)
        return nullcontext()

    def fail(self, error: CARDError) -> None:
        """Print an error after which the program continues."""
        self.errors.print(Text(clean(f"langchain-card: {error}")), soft_wrap=True)

    def legend(self) -> None:
        """Print the meaning of the colours, if there are colours."""
        if self.is_terminal and self.console.color_system and not self.console.no_color:
            text = Text()
            for source in ("model", "ngram", ""):
                text.append("■ ", style_of(source)).append(f"{name_of(source)}   ", "dim")
            self.console.print(text)

    def stream(self, generation: Generation, *, tint: bool = False) -> None:
        """Print an answer as it is written, until it ends or is aborted.

        Args:
            generation: the answer.
            tint: colour each token by its source, if there are colours.
        """
        if self.is_terminal:
            with _echo_off(), _Drawing(self.console, generation, tint) as drawing:
                for piece in generation:
                    drawing.push(piece)
            return
        self._show_reading(generation)
        for piece in generation:
            print(clean(piece.text), end="", flush=True)
        print(flush=True)

    def _show_reading(self, generation: Generation) -> None:
        """Show how much of a long prompt was read, until the answer begins: on standard error if it is a terminal."""
        if not (self.errors.is_terminal and sys.stderr.isatty()):
            return
        line = self.errors.status("", spinner_style="dim")
        try:
            for reading in generation.readings():
                line.update(Text(progress(None, reading), "dim"))
                line.start()
        finally:
            line.stop()

    def _write(self, console: Console, text: str, style: str) -> None:
        console.print(Text(clean(text), style), soft_wrap=not console.is_terminal or not self.is_terminal)


def _is_foreground() -> bool:
    """Return True if standard input is a terminal and this process is in its foreground."""
    try:
        return os.tcgetpgrp(sys.stdin.fileno()) == os.getpgrp()
    except (OSError, ValueError):
        return False


@contextmanager
def _echo_off() -> Iterator[None]:
    """Turn off the terminal's echo, so that typed keys do not disturb the drawing; the next prompt reads them."""
    if not _is_foreground():
        yield
        return
    before = termios.tcgetattr(sys.stdin)
    quiet = [*before]
    quiet[3] &= ~termios.ECHO
    termios.tcsetattr(sys.stdin, termios.TCSANOW, quiet)
    try:
        yield
    finally:
        termios.tcsetattr(sys.stdin, termios.TCSANOW, before)


class _Drawing:
    """An answer that grows on a terminal: full rows scroll away, the last row and the status below it are redrawn."""

    def __init__(self, console: Console, generation: Generation, tint: bool) -> None:
        self._console, self._generation, self._tint = console, generation, tint
        self._line, self._printed = Text(), 0  # the current line, and how many of its rows have scrolled away
        self._last_row = Text()
        self._live = Live(self, console=console, transient=True, refresh_per_second=REFRESH)

    def __enter__(self) -> Self:
        self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._scroll(whole=True)
        self._live.stop()

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield self._last_row
        yield Text(status(self._generation.stats, self._generation.reading), "dim", no_wrap=True, overflow="ellipsis")

    def push(self, piece: Piece) -> None:
        """Add the next token."""
        style = style_of(piece.source) if self._tint else ""
        first, *others = clean(piece.text).expandtabs(4).split("\n")
        self._line.append(first, style)
        for text in others:
            self._scroll(whole=True)
            self._line, self._printed = Text(text, style), 0
        self._scroll()

    def _scroll(self, *, whole: bool = False) -> None:
        """Print the rows of the line that can no longer change."""
        rows = list(self._line.wrap(self._console, self._console.width))
        ready = rows[self._printed :] if whole else rows[self._printed : -1]
        self._last_row = Text() if whole else rows[-1]
        self._printed += len(ready)
        for row in ready:
            self._console.print(row)
