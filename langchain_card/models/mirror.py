"""Wheels from the package index: downloaded with pip, opened, never installed or run."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from langchain_card.errors import DownloadError
from langchain_card.models.files import size_on_disk

_POLL_SECONDS = 0.5


def download_wheel(
    package: str, folder: Path, hint: str, before: str = "", tell: Callable[[int], None] = lambda _: None
) -> Path:
    """Runs pip in a process of its own, with the user's pip configuration.

    Args:
        package: an exact requirement.
        folder: empty; where the wheel goes, and pip's own temporary files, so that they are cleaned up with it.
        hint: what else could be done.
        before: why another source was of no use.
        tell: told the bytes that are there, now and then.

    Returns:
        The wheel's path.

    Raises:
        DownloadError: pip is not installed, or could not get it.
    """
    reason = f"; {before}" if before else ""
    if importlib.util.find_spec("pip") is None:
        limit = f"needs pip in {sys.executable}{reason}"
        raise DownloadError("pip", "not installed", limit, f"run `python -m ensurepip`, or {hint}")
    options = ["--no-deps", "--only-binary", ":all:", "--no-cache-dir", "--progress-bar", "off", "--no-input"]
    command = [sys.executable, "-m", "pip", "download", *options, "--dest", str(folder), package]
    with (folder / "log").open("w+") as log:
        environment = {**os.environ, "TMPDIR": str(folder)}
        process = subprocess.Popen(command, cwd=folder, env=environment, stdout=log, stderr=log)  # noqa: S603
        try:
            while process.poll() is None:
                tell(size_on_disk(folder))
                _wait(process)
        finally:
            process.kill()
            process.wait()
        log.seek(0)
        lines = [line.strip() for line in log if line.startswith("ERROR")] or ["pip gave no reason"]
    wheels = list(folder.glob("*.whl"))
    if process.returncode or len(wheels) != 1:
        limit = f"pip could not download it ({lines[-1]}{reason})"
        raise DownloadError("package", package, limit, f"check the network and pip's configuration, or {hint}")
    return wheels[0]


def _wait(process: subprocess.Popen[bytes]) -> None:
    try:
        process.wait(_POLL_SECONDS)
    except subprocess.TimeoutExpired:
        return
