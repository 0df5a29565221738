"""Files: progress reports, locks, free space, atomic folders, hashes."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import stat
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

from langchain_card.errors import DiskSpaceError

SMALL_FILE = 1 << 20
"""Bytes below which a file is hashed each time."""

_CHUNK = 1 << 22
_SETTLED_SECONDS = 2.0  # a file that changes once more within a tick of its disk's clock keeps its times
MARGIN = 64 << 20  # bytes left free beside every estimate: tokenizer, config, other programs


class Progress(Protocol):
    """A receiver of progress reports."""

    def update(self, stage: str, done: int, total: int) -> None:
        """Report a step.

        Args:
            stage: a text for the user, such as "download part 3 of 22".
            done: bytes done.
            total: bytes in all; 0 if unknown.
        """
        ...


class Silent:
    """The default receiver, which ignores reports."""

    def update(self, stage: str, done: int, total: int) -> None:
        """Ignore the report."""


@contextmanager
def locked(path: Path, progress: Progress) -> Iterator[None]:
    """Hold an exclusive lock between processes. The kernel releases it when its process dies."""
    import fcntl

    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            progress.update("wait for another process", 0, 0)
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield


def need_space(folder: Path, needed: int) -> None:
    """Raise unless a folder's disk has enough free space.

    Args:
        folder: the destination; need not exist yet.
        needed: bytes that will be written, without the margin.

    Raises:
        DiskSpaceError: fewer bytes are free.
    """
    existing = next(p for p in (folder, *folder.parents) if p.exists())
    free = shutil.disk_usage(existing).free
    if free < needed + MARGIN:
        hint = "free some space, or set LANGCHAIN_CARD_HOME to a folder on a larger disk"
        raise DiskSpaceError("free disk", str(folder), f"needs {needed + MARGIN} bytes, {free} are free", hint)


def size_on_disk(path: Path) -> int:
    """Return the bytes of all files under a folder, or of one file; 0 if it is absent.

    Files may appear and vanish meanwhile, since another process may download: a vanished file counts as 0.
    """
    inside = (os.path.join(folder, name) for folder, _, names in os.walk(path) for name in names)
    return sum(_file_size(file) for file in (str(path), *inside))


def _file_size(path: str) -> int:
    try:
        status = os.stat(path)
    except OSError:
        return 0
    return status.st_size if stat.S_ISREG(status.st_mode) else 0


@contextmanager
def fresh_folder(target: Path) -> Iterator[Path]:
    """Create a temporary folder that becomes `target` on success and is removed on failure.

    Leftovers of killed runs are removed first, so the caller must hold the lock of the parent folder.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    for leftover in target.parent.glob(f".{target.name}-*"):
        shutil.rmtree(leftover, ignore_errors=True)
    temporary = target.parent / f".{target.name}-{os.getpid()}"
    temporary.mkdir()
    try:
        yield temporary
        if target.exists():
            shutil.rmtree(target)
        os.rename(temporary, target)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def source_hash(folder: Path) -> str:
    """Return a hash of the code in a folder: other code makes other bits, also under the same version."""
    digest = hashlib.sha256()
    for file in sorted(folder.rglob("*.py")):
        digest.update(f"{file.relative_to(folder)}\n".encode() + hashlib.sha256(file.read_bytes()).digest())
    return digest.hexdigest()


def file_hash(file: Path, known: Path) -> str:
    """Return the SHA-256 of a file's content. That of a large file is kept, so that its content is read once.

    Args:
        file: the file.
        known: folder of hashes. Each is kept with the file's path, size and times, which change with its content; files
            that changed just now are not kept yet.
    """
    status = file.stat()
    if status.st_size < SMALL_FILE:
        return hashlib.sha256(file.read_bytes()).hexdigest()
    state = [str(file.resolve()), status.st_size, status.st_mtime_ns, status.st_ctime_ns]
    note = known / f"{hashlib.sha256(str(file.resolve()).encode()).hexdigest()[:32]}.json"
    with contextlib.suppress(OSError, ValueError, TypeError):  # absent, or damaged
        *noted, digest = json.loads(note.read_text())
        if noted == state:
            return str(digest)
    content = hashlib.sha256()
    with file.open("rb") as source:
        while chunk := source.read(_CHUNK):
            content.update(chunk)
    digest = content.hexdigest()
    if time.time() - max(status.st_mtime, status.st_ctime) > _SETTLED_SECONDS:
        with contextlib.suppress(OSError):  # it is hashed again
            known.mkdir(parents=True, exist_ok=True)
            temporary = note.with_suffix(f".{os.getpid()}")
            temporary.write_text(json.dumps([*state, digest]))
            temporary.replace(note)
    return digest
