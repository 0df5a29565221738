"""Beginnings of texts that outlive the process: the target's keys and values in a folder (`prefix_cache="folder"`).

A file holds `BLOCK` positions, as safetensors. Its name is a keyed hash of the name before it in the text and of the
block's tokens, so that texts that begin alike share their files, and each is written once. One file per text would hold
a system prompt as often as there are texts, and would be written anew for each turn of a conversation.

```
<folder>/secret               key of all hashes, made by the first process
<folder>/lock                 held for each write, so that a temporary file of another process is a leftover
<folder>/<name>.safetensors   a block and its checksum, renamed to this name when it is complete
```

The first name is a hash of the tenant and of everything that keys and values depend on besides the text. So a block is
never found for another tenant, other weights or another number format.
"""

from __future__ import annotations

import contextlib
import hmac
import logging
import os
import queue
import secrets
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np
import safetensors.torch as safetensors
import torch
import transformers
from torch import Tensor

from langchain_card._version import __version__
from langchain_card.config import EngineConfig
from langchain_card.errors import InvalidInputError
from langchain_card.models.files import Silent, locked
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
        with self._locked():
            secret, status = folder / "secret", folder.stat()
            if status.st_uid != os.getuid() or status.st_mode & 0o077:
                raise PermissionError("it is another user's, or open to others: chmod 700")
            if not secret.exists() or secret.stat().st_size != _SECRET_BYTES:
                _replace(secret, secrets.token_bytes(_SECRET_BYTES))
            self._secret = secret.read_bytes()
            self._make_room(0)
        self._failing = False
        self._texts: queue.SimpleQueue[tuple[KVCache, str, list[int]] | None] = queue.SimpleQueue()
        self._writer = threading.Thread(target=self._write_texts, name="card-prefixes", daemon=True)
        self._writer.start()

    def load(self, cache: KVCache, token_ids: Sequence[int]) -> None:
        """Commit the positions of a text that the folder holds and the open sequence does not.

        A file that is damaged, or was made elsewhere, is deleted with a warning, and the text from there on is read.
        """
        for n, file in enumerate(self._files(cache.tenant, token_ids)):
            if (n + 1) * BLOCK > cache.length:
                if (block := self._read(file)) is None:
                    return
                cache.write(n * BLOCK, token_ids[n * BLOCK : (n + 1) * BLOCK], block)

    def save(self, cache: KVCache) -> None:
        """Queue the text of a closed sequence. What a later sequence overwrites first is not written."""
        if cache.length >= BLOCK:
            if self._runner.device.type == "cuda":
                torch.cuda.current_stream(self._runner.device).synchronize()  # the writer has a stream of its own
            self._texts.put((cache, cache.tenant, [*cache.token_ids]))

    def close(self) -> None:
        """Write the queued texts and end the thread."""
        self._texts.put(None)
        self._writer.join()

    def _files(self, tenant: str, token_ids: Sequence[int]) -> Iterator[Path]:
        """Yield the files of a text's whole blocks, in order."""
        name = self._hash(f"{self._root} {tenant}".encode())
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
        while (text := self._texts.get()) is not None:
            self._write(*text)

    def _write(self, cache: KVCache, tenant: str, token_ids: list[int]) -> None:
        """Write a text; the first of several failures in a row is logged."""
        try:
            self._write_blocks(cache, tenant, token_ids)
        except Exception as error:
            if not self._failing:
                log.warning("no prefixes are kept in %s until that works again: %r", self._folder, error)
            self._failing = True

    def _write_blocks(self, cache: KVCache, tenant: str, token_ids: list[int]) -> None:
        """Write the blocks of a text that the folder lacks, and touch the others.

        Later blocks count as used earlier, so that a text loses its end first.
        """
        files, now = [*self._files(tenant, token_ids)], time.time_ns()
        for n, file in enumerate(files):
            with self._locked():
                if not file.exists():
                    end = (n + 1) * BLOCK
                    if len(token_ids) < LEAST_TOKENS:
                        return
                    if (block := cache.read(end - BLOCK, token_ids[:end], tenant)) is None:
                        return
                    content = safetensors.save({**block, _CHECKSUM: self._checksum(file, block)})
                    if not self._make_room(len(content), keep=files):
                        return
                    _replace(file, content)
                    self._failing = False
                with contextlib.suppress(FileNotFoundError):  # found damaged meanwhile
                    os.utime(file, ns=(now - n * 1000, now - n * 1000))

    def _make_room(self, size: int, keep: Iterable[Path] = ()) -> bool:
        """Delete leftovers, and blocks until `size` bytes fit; return whether they do without the files to keep."""
        blocks = []
        for file in self._folder.iterdir():
            with contextlib.suppress(FileNotFoundError):  # another process may delete a damaged one
                if file.suffix == ".tmp":
                    file.unlink()
                elif file.suffix == ".safetensors":
                    status = file.stat()
                    blocks.append((status.st_mtime_ns, status.st_size, file))
        kept = {*keep}
        if self._max_bytes - sum(length for _, length, file in blocks if file in kept) < size:
            return False
        free = self._max_bytes - sum(length for _, length, _ in blocks)
        for _, length, file in sorted(blocks):
            if free < size and file not in kept:
                file.unlink(missing_ok=True)
                free += length
        return True

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        with locked(self._folder / "lock", Silent()):
            yield


def dependencies(spec: ModelSpec, config: EngineConfig) -> str:
    """Return a description of what the bits of keys and values depend on besides the text.

    Weights are described by path, sizes and times of their files, as conversions are (`models.store.file_state`).
    """
    gpus = [torch.cuda.get_device_name(device) for device in spec.devices if device.type == "cuda"]
    machine = (processor(), torch.backends.cpu.get_cpu_capability(), gpus)
    versions = (__version__, torch.__version__, transformers.__version__)
    grid: tuple[object, ...] = (config.exact, config.execution)
    if config.exact == "strict":
        grid += (config.max_model_len, config.limits.max_window, config.limits.num_seqs, num_cores())
    return repr((file_state(spec.folder), spec, grid, machine, versions))


def _replace(file: Path, content: bytes) -> None:
    """Write a file that this user alone can read, at once or not at all."""
    temporary = file.with_suffix(".tmp")
    try:
        with open(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as handle:
            handle.write(content)
        temporary.replace(file)
    finally:
        temporary.unlink(missing_ok=True)
