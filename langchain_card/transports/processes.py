"""Processes of our own: fresh interpreters (no fork, and the caller's main module is not run again)."""

from __future__ import annotations

import contextlib
import signal
import socket
import subprocess
import sys

from langchain_card.errors import EngineError

END_SECONDS = 1.0
"""For a process to end by itself; as much again after it was asked to; then it is killed."""

# Ctrl-C reaches every process of a terminal; it is the parent's to decide what it means.
_CODE = (
    "import signal, sys; signal.signal(signal.SIGINT, signal.SIG_IGN); sys.path[:] = sys.argv[2:]; "
    "from {} import main; main()"
)


def spawn(module: str, name: str) -> tuple[subprocess.Popen[bytes], socket.socket]:
    """Starts an interpreter with this one's module path, which runs `main` of a module.

    Args:
        module: its `main` finds the file descriptor of a connected socket in `sys.argv[1]`.
        name: of the process, for errors.

    Returns:
        The process, and this end of the connection to it.

    Raises:
        EngineError: it could not be started.
    """
    ours, theirs = socket.socketpair()
    command = [sys.executable, "-c", _CODE.format(module), str(theirs.fileno()), *map(str, sys.path)]
    with theirs:
        try:
            process = subprocess.Popen(command, stdin=subprocess.DEVNULL, pass_fds=[theirs.fileno()])  # noqa: S603
        except OSError as error:
            ours.close()
            hint = "is there enough memory"
            raise EngineError(name, sys.executable, f"could not be started ({error})", hint) from error
    return process, ours


def reap(process: subprocess.Popen[bytes]) -> int:
    """Waits for a process whose connection has ended, with more and more force; its exit code."""
    with contextlib.suppress(subprocess.TimeoutExpired):
        return process.wait(END_SECONDS)
    process.terminate()
    with contextlib.suppress(subprocess.TimeoutExpired):
        return process.wait(END_SECONDS)
    process.kill()
    return process.wait()


def last_words(code: int) -> tuple[str, str]:
    """What happened, and a hint, from an exit code."""
    if code < 0:
        return f"was ended by signal {-code} ({signal.strsignal(-code)})", "is there enough memory?"
    return f"ended with exit code {code}", "standard error may say more"
