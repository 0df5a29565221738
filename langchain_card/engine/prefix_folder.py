"""Beginnings of texts that outlive the process: the target's keys and values in a folder (`prefix_cache="folder"`).

A file holds `BLOCK` positions, as safetensors. Its name is a keyed hash of the name before it in the text and of the
block's tokens, so that texts that begin alike share their files, and each is written once. One file per text would hold
a system prompt as often as there are texts, and would be written anew for each turn of a conversation.

```
<folder>/secret               key of all hashes, made by the first process
<folder>/<name>.safetensors   a block and its checksum
<folder>/<name>-<random>.tmp  the same while it is written; an old one is left over from a process that died
```

There is no lock, so that no process waits for another one: a file appears whole, with the same content from all.

The first name is a hash of the text's owner and of everything that keys and values depend on besides the text. So a
block is never found for another tenant, another adapter, other weights or another number format.
"""

from __future__ import annotations

import contextlib
import hmac
import importlib.metadata
import logging
import math
import os
import secrets
import shutil
import tempfile
import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np
import safetensors.torch as safetensors
import torch
from torch import Tensor

from langchain_card import __version__, runtime
from langchain_card.config import EngineConfig
from langchain_card.errors import InvalidInputError
from langchain_card.models.files import MARGIN, source_hash
from langchain_card.models.loader import ModelSpec
from langchain_card.models.store import file_state
from langchain_card.runtime.kv_cache import KVCache
from langchain_card.runtime.runner import ModelRunner
from langchain_card.runtime.threads import num_cores, processor

log = logging.getLogger(__name__)

BLOCK = 256
"""Positions in a file; a multiple of the blocks of any storage."""

LEAST_TOKENS = 1024
"""Length from which on texts are written; shorter ones are read quickly."""

CLOSE_SECONDS = 1.5
"""Time in which queued texts are written at the end."""

LEFTOVER_SECONDS = 60.0
"""Age from which on a temporary file is left over; a block is written in milliseconds."""

_LAYOUT = 1  # raise it if the contents of a file change
_CHECKSUM = "checksum"
_SECRET_BYTES = 32


class PrefixFolder:
    """A folder of blocks, shared with other processes, and a thread that writes to it.

    Args:
        folder: made if absent, readable by this user alone.
        runner: of the target.
        dependencies: what keys and values depend on besides the text (`dependencies`).
        max_bytes: size of all blocks at most; those that were unused longest are deleted first.

    Raises:
        InvalidInputError: `max_bytes` is smaller than one block.
        OSError: the folder cannot be read or written.
    """

    def __init__(self, folder: Path, runner: ModelRunner, dependencies: str, max_bytes: int) -> None:
        self._folder, self._runner, self._max_bytes = folder, runner, max_bytes
        layout = runner.pool.kv.read(0, BLOCK)
        if (size := sum(part.nbytes for part in layout.values())) > max_bytes:
            limit = f"is smaller than the keys and values of {BLOCK} tokens, {size:,} bytes"
            raise InvalidInputError("max_prefix_bytes", max_bytes, limit, 'raise it, or use prefix_cache="memory"')
        self._root = repr((_LAYOUT, dependencies, {name: (part.dtype, part.shape) for name, part in layout.items()}))
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if (status := folder.stat()).st_uid != os.getuid() or status.st_mode & 0o077:
            raise PermissionError("it is another user's, or open to others: chmod 700")
        self._secret = _shared_secret(folder / "secret")
        self._failing, self._num_lost, self._deadline = False, 0, math.inf
        self._texts: deque[tuple[str, list[int]]] = deque(maxlen=runner.pool.num_seqs)  # to be written, oldest first
        self._changed = threading.Condition()
        self._writer = threading.Thread(target=self._write_texts, name="card-prefixes", daemon=True)
        self._writer.start()

    def load(self, cache: KVCache, token_ids: Sequence[int]) -> Iterator[int]:
        """Commit the positions of a text that the folder holds and the open sequence does not.

        A file that is damaged, or was made elsewhere, is deleted with a warning, and the text from there on is read.

        Yields:
            The sequence's length after each block, so that the caller can do something else between two blocks.
        """
        for n, file in enumerate(self._files(cache.owner, token_ids)):
            if (n + 1) * BLOCK > cache.length:
                if (block := self._read(file)) is None:
                    return
                cache.write(n * BLOCK, token_ids[n * BLOCK : (n + 1) * BLOCK], block)
                yield cache.length

    def save(self, cache: KVCache) -> None:
        """Queue the text of a closed sequence. What a later sequence overwrites first is not written."""
        if cache.length < BLOCK:
            return
        with self._changed:
            self._texts.append((cache.owner, [*cache.token_ids]))
            self._changed.notify()

    def close(self) -> None:
        """Write queued texts for `CLOSE_SECONDS`, and end the thread after the block in hand."""
        with self._changed:
            self._deadline = time.monotonic() + CLOSE_SECONDS
            self._changed.notify()
        self._writer.join(2 * CLOSE_SECONDS)
        if self._writer.is_alive():
            log.warning("a text is not kept in %s: its disk took too long", self._folder)
        elif self._num_lost:
            reason = "the engine was closed before they were written"
            log.warning("%s tokens are not kept in %s: %s", f"{self._num_lost:,}", self._folder, reason)

    def _files(self, owner: str, token_ids: Sequence[int]) -> Iterator[Path]:
        """Yield the files of a text's whole blocks, in order."""
        name = self._hash(f"{self._root} {owner}".encode())
        for end in range(BLOCK, len(token_ids) + 1, BLOCK):
            name = self._hash(name.encode(), np.array(token_ids[end - BLOCK : end], np.int64).data)
            yield self._folder / f"{name}.safetensors"

    def _hash(self, *parts: bytes | memoryview) -> str:
        code = hmac.new(self._secret, digestmod="sha256")
        for part in parts:
            code.update(part)
        return code.hexdigest()

    def _checksum(self, file: Path, block: dict[str, Tensor]) -> Tensor:
        """Return a checksum of a file's name and tensors that only holders of the secret can compute, uint8 [64]."""
        parts: list[bytes | memoryview] = [file.name.encode()]
        for name in sorted(block):
            part = block[name]
            parts += [repr((name, part.dtype, part.shape)).encode(), part.view(torch.uint8).numpy().data]
        return torch.tensor([*self._hash(*parts).encode()], dtype=torch.uint8)

    def _read(self, file: Path) -> dict[str, Tensor] | None:
        try:
            block: dict[str, Tensor] = safetensors.load(file.read_bytes())
            checksum = block.pop(_CHECKSUM)
            if torch.equal(checksum, self._checksum(file, block)):
                return block
            reason = "its checksum is not that of its name and content"
        except FileNotFoundError:
            return None
        except OSError as error:  # the file may be sound
            log.warning("%s cannot be read, and its text is read anew: %r", file, error)
            return None
        except Exception as error:  # whatever the library makes of damaged bytes
            reason = repr(error)
        log.warning("%s is deleted and its text read anew: %s", file, reason)
        with contextlib.suppress(OSError):
            file.unlink()
        return None

    def _write_texts(self) -> None:
        with self._reported():
            self._make_room(0)
        while (text := self._next()) is not None:
            with self._reported():
                self._write(*text)

    def _next(self) -> tuple[str, list[int]] | None:
        """Wait for a text and take it from the queue; None at the end."""
        with self._changed:
            self._changed.wait_for(lambda: self._texts or self._deadline < math.inf)
            if self._texts:
                return self._texts.popleft()
        return None

    @contextlib.contextmanager
    def _reported(self) -> Iterator[None]:
        """Log failures, of several in a row the first."""
        try:
            yield
        except Exception as error:
            if not self._failing:
                log.warning("no prefixes are kept in %s until that works again: %r", self._folder, error)
            self._failing = True

    def _write(self, owner: str, token_ids: list[int]) -> None:
        """Write the blocks of a text that the folder lacks, and touch the others.

        Later blocks count as used earlier, so that a text loses its end first.
        """
        files, now = [*self._files(owner, token_ids)], time.time_ns()
        for n, file in enumerate(files):
            if not file.exists():
                if len(token_ids) < LEAST_TOKENS:
                    return
                if time.monotonic() >= self._deadline:
                    self._num_lost += BLOCK * sum(not file.exists() for file in files)
                    return
                end = (n + 1) * BLOCK
                with self._runner.pool.lock:
                    self._runner.synchronize()  # this thread's stream does not wait for the model's
                    block = self._runner.pool.read(end - BLOCK, token_ids[:end], owner)
                if block is None:
                    return
                content = safetensors.save({**block, _CHECKSUM: self._checksum(file, block)})
                self._check_secret()
                if not self._make_room(len(content), keep=files):
                    return
                _write_file(file, content)
                self._failing = False
            with contextlib.suppress(FileNotFoundError):  # found damaged, or deleted for other texts
                os.utime(file, ns=(now - n * 1000, now - n * 1000))

    def _make_room(self, size: int, keep: Iterable[Path] = ()) -> bool:
        """Delete leftovers, and the blocks unused longest until `size` bytes fit and `MARGIN` of the disk stays free.

        Returns:
            Whether they fit beside the files to keep; else no block is deleted.
        """
        blocks, old = [], time.time() - LEFTOVER_SECONDS
        for entry in os.scandir(self._folder):
            with contextlib.suppress(FileNotFoundError):  # another process may delete it
                status = entry.stat()
                if entry.name.endswith(".safetensors"):
                    blocks.append((status.st_mtime_ns, status.st_size, Path(entry)))
                elif entry.name.endswith(".tmp") and status.st_mtime < old:
                    os.unlink(entry)
        kept, used = {*keep}, sum(length for _, length, _ in blocks)
        limit = min(self._max_bytes, used + shutil.disk_usage(self._folder).free - MARGIN)
        if limit - sum(length for _, length, file in blocks if file in kept) < size:
            return False
        for _, length, file in sorted(blocks):
            if limit - used < size and file not in kept:
                file.unlink(missing_ok=True)
                used -= length
        return True

    def _check_secret(self) -> None:
        """Raise if the folder was deleted: files under an old secret would be found by this process alone."""
        secret = self._folder / "secret"
        if not secret.exists() or secret.read_bytes() != self._secret:
            raise FileNotFoundError("it was deleted while this process ran; start the process again")


def dependencies(spec: ModelSpec, config: EngineConfig) -> str:
    """Return a description of what the bits of keys and values depend on besides the text.

    Weights are described by path, sizes and times of their files, as conversions are (`models.store.file_state`).
    """
    gpus = [torch.cuda.get_device_name(device) for device in spec.devices if device.type == "cuda"]
    machine = (processor(), torch.backends.cpu.get_cpu_capability(), gpus)
    packages = [importlib.metadata.version(name) for name in ("torch", "transformers", "numba", "llvmlite")]
    versions = (__version__, source_hash(Path(runtime.__path__[0])))
    grid: tuple[object, ...] = (config.exact, config.execution)
    if config.exact == "strict":
        grid += (config.max_model_len, config.limits.max_window, config.limits.num_seqs, num_cores())
    return repr((file_state(spec.folder), spec, grid, machine, versions, packages))


def _shared_secret(file: Path) -> bytes:
    """Return the secret in a file; the first of several processes makes it."""
    if file.exists() and file.stat().st_size != _SECRET_BYTES:
        file.unlink(missing_ok=True)
    if not file.exists():
        with _temporary(file) as temporary:
            temporary.write_bytes(secrets.token_bytes(_SECRET_BYTES))
            with contextlib.suppress(FileExistsError):  # another process was first
                os.link(temporary, file)
    return file.read_bytes()


def _write_file(file: Path, content: bytes) -> None:
    """Write a file at once or not at all."""
    with _temporary(file) as temporary:
        temporary.write_bytes(content)
        temporary.replace(file)


@contextlib.contextmanager
def _temporary(file: Path) -> Iterator[Path]:
    """Make an empty file beside another one, which this user alone can read, and remove it unless it was renamed."""
    descriptor, name = tempfile.mkstemp(".tmp", f"{file.stem}-", file.parent)
    os.close(descriptor)
    try:
        yield Path(name)
    finally:
        Path(name).unlink(missing_ok=True)
