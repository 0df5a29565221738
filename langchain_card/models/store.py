"""The model store: find, download and convert a model, and return a folder that the engine can load.

A model's name is a built-in name, a folder, a `.gguf` file, or a hub id, tried in this order. Layout of the cache:

```
<cache>/models/<built-in>/source.gguf, and a folder for each form
<cache>/converted/<name>-<key>/                      folders made from the user's folders and files
<cache>/prefixes/                                    texts' keys and values (`engine.prefix_folder`)
<cache>/hashes/                                      hashes of large files (`ModelStore.content_hash`)
<cache>/locks/
```
"""

from __future__ import annotations

import difflib
import hashlib
import json
import os
import re
import shutil
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from langchain_card.errors import CARDError, InvalidInputError, ModelStoreError, UnknownModelError
from langchain_card.models.download import BUILTINS, fetch, fetch_hub_folder
from langchain_card.models.files import Progress, Silent, file_hash, fresh_folder, locked, size_on_disk
from langchain_card.models.headers import cached_hub_file
from langchain_card.models.safety import inspect_folder

__all__ = ["ModelStore", "Progress", "StoredModel", "default_cache"]

PREFIXES = "prefixes"
STAMP = "langchain-card.json"
CONVERTER = 6  # raise it if the written form changes: older conversions are then replaced
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
State = Literal["absent", "downloaded", "converted"]
Form = Literal["float", "file", "int8", "int4"]
FORMS: tuple[Form, ...] = ("float", "file", "int8", "int4")
_OTHER_NAMES = (
    f"built in are {', '.join(BUILTINS)}; names of Ollama or OpenAI are not known: give a hub id such as "
    '"meta-llama/Llama-3.2-3B-Instruct", a folder, or a .gguf file'
)
_HASHED = (".json", ".jinja", ".safetensors", ".model", ".txt")
_COPIED = ("*.json", "*.jinja", "tokenizer.model", "merges.txt", "vocab.txt")


@dataclass(frozen=True, slots=True)
class StoredModel:
    """An entry of the store's list.

    Attributes:
        name: built-in name, or the converted path or hub id.
        state: absent, downloaded, or converted (at least one form is ready).
        size: bytes on disk.
        forms: the forms that are ready.
    """

    name: str
    state: State
    size: int
    forms: tuple[str, ...]


def default_cache() -> Path:
    """Return `LANGCHAIN_CARD_HOME`, or `~/.cache/langchain-card`."""
    home = os.environ.get("LANGCHAIN_CARD_HOME")
    return Path(home).expanduser() if home else Path.home() / ".cache" / "langchain-card"


class ModelStore:
    """A cache folder of models: find, download, convert and remove them.

    Args:
        cache_dir: folder of downloads and conversions; default `default_cache()`.
    """

    def __init__(self, cache_dir: str | os.PathLike[str] | None = None) -> None:
        self.cache = Path(cache_dir).expanduser() if cache_dir is not None else default_cache()

    def list(self) -> list[StoredModel]:
        """List the built-in models, then the user's converted ones."""
        builtins = [_describe(name, self._home(name)) for name in BUILTINS]
        return builtins + [_describe(name, folder) for folder, name in self._conversions()]

    def prefix_bytes(self) -> int:
        """Return the bytes of the prefixes on disk; 0 without any."""
        return size_on_disk(self.cache / PREFIXES)

    def check(self, name: str, field: str = "model") -> None:
        """Raise `UnknownModelError`, naming `field`, unless this can be a model's name. Nothing is downloaded."""
        try:
            _ = name in BUILTINS or _local(name)
        except UnknownModelError as error:
            raise UnknownModelError(field, error.value, error.limit, error.hint) from None

    def pull(self, name: str, progress: Progress | None = None) -> Path:
        """Download a model unless it is on this machine.

        Returns:
            The GGUF file of a built-in, the folder of a hub id, or the path itself.

        Raises:
            UnknownModelError: no such model.
            ModelStoreError: it could not be downloaded; see `download.fetch`.
        """
        if name not in BUILTINS:
            return _local(name) or fetch_hub_folder(name)
        report, source = progress or Silent(), self._source(name)
        if not self._downloaded(name):
            with self._lock(name, report):
                if not self._downloaded(name):
                    fetch(BUILTINS[name], source, report)
        return source

    def path(self, name: str) -> Path:
        """Return the path of a model that was pulled.

        Raises:
            UnknownModelError: no such model.
            ModelStoreError: the model was not pulled yet.
        """
        if name not in BUILTINS:
            return _local(name) or fetch_hub_folder(name, offline=True)
        if not self._downloaded(name):
            raise ModelStoreError("model", name, "is not downloaded", f"run `langchain-card models pull {name}`")
        return self._source(name)

    def remove(self, name: str) -> None:
        """Delete a built-in model, the conversions of a path or hub id, or the `PREFIXES`.

        The user's files are never touched. Engines that run write no more prefixes; later ones do.

        Raises:
            UnknownModelError: the store holds nothing of this name.
            ModelStoreError: files are left.
        """
        wanted = {name, str(Path(name).expanduser().resolve())} if name else set()
        folders = [folder for folder, source in self._conversions() if source in wanted]
        if name in BUILTINS:
            folders = [self._home(name)]
        if name == PREFIXES and (self.cache / PREFIXES).exists():
            folders = [self.cache / PREFIXES]
        if not folders:
            if name != PREFIXES:
                _local(name)
            raise UnknownModelError("model", name, "nothing of it is in the store", "see `langchain-card models list`")
        for folder in folders:
            with self._lock(folder.name, Silent()):
                for _ in range(2):  # a process that writes a prefix meanwhile misses the secret next
                    shutil.rmtree(folder, ignore_errors=True)
            if folder.exists():
                raise ModelStoreError("model", name, "could not be deleted", f"delete {folder} by hand")

    def prepare(self, model: str, form: Form, progress: Progress | None = None) -> Path:
        """Download and convert a model if needed.

        Args:
            model: built-in name, folder, `.gguf` file or hub id.
            form: "float" (float16 matrices; a folder or hub id is used unchanged); "file", the blocks of a GGUF file
                as they are; or "int8" or "int4", matrices that are rounded to blocks.
            progress: receives reports of long steps.

        Returns:
            A folder with config.json, tokenizer files and weights in the form.

        Raises:
            UnknownModelError: no such model.
            UnsafeModelError: the folder holds pickle weights or code.
            CorruptModelError: weights are damaged.
            DiskSpaceError: not enough free disk.
            DownloadError: no source provided the model.
        """
        if form not in FORMS:
            raise InvalidInputError("form", form, f"must be one of {', '.join(FORMS)}")
        report = progress or Silent()
        source = self.pull(model, report)
        if model in BUILTINS:
            return self._converted(model, source, self._home(model), form, report)
        if source.is_dir():
            inspect_folder(source)
            if form == "file":
                hint = 'use quantization="int8" or "int4"'
                raise InvalidInputError("model", model, "has no blocks: its weights are not in a GGUF file", hint)
            if form == "float":
                return source
        name = str(source) if _local(model) else model
        home = self.cache / "converted" / file_state(source)
        folder = self._converted(name, source, home, form, report)
        for older in [other for other, of in self._conversions() if of == name and other != home]:
            shutil.rmtree(older, ignore_errors=True)
        return folder

    def is_in_blocks(self, model: str) -> bool:
        """Return whether a model is a GGUF file whose blocks can be run as they are, for the most part."""
        if model in BUILTINS:
            return True
        source = _local(model)
        if source is None or source.is_dir():
            return False
        from langchain_card.models import gguf

        home = self.cache / "converted" / file_state(source)
        ready = {form: _stamp(home / form).get("converter") == CONVERTER for form in FORMS}
        return ready["file"] or (not ready["int8"] and gguf.is_in_blocks(source))

    def source(self, model: str, folder: Path) -> Path:
        """Return the GGUF file or folder that a folder of `prepare` was made of, or is.

        Raises:
            UnknownModelError: the model is gone.
            ModelStoreError: the same, of one that was downloaded.
        """
        return self.path(model) if (folder / STAMP).exists() else folder

    def content_hash(self, source: Path) -> str:
        """Return a hash of a model's config, tokenizer and weights, wherever they lie.

        The first call reads the files, a second for each one to two gigabytes; later ones take milliseconds
        (`files.file_hash`). The hash of a built-in model is known: it was compared when the file was downloaded.

        Args:
            source: a GGUF file or a folder of safetensors.
        """
        builtins = [BUILTINS[name].sha256 for name in BUILTINS if source == self._source(name)]
        if not source.is_dir():
            return builtins[0] if builtins else file_hash(source, self.cache / "hashes")
        files = sorted(file for file in source.iterdir() if file.suffix in _HASHED and file.name != STAMP)
        hashes = [(file.name, file_hash(file, self.cache / "hashes")) for file in files]
        return hashlib.sha256(json.dumps(hashes).encode()).hexdigest()

    def tokenizer_source(self, name: str) -> Path:
        """Return the folder or GGUF file with a model's tokenizer; download the model only if nothing of it is here.

        Raises:
            UnknownModelError: no such model.
            ModelStoreError: it could not be downloaded; see `download.fetch`.
        """
        source = None if name in BUILTINS else _local(name) or _cached(name)
        if source is not None and source.is_dir():
            return source
        home = self._home(name) if source is None else self.cache / "converted" / file_state(source)
        ready = (home / form for form in FORMS if _stamp(home / form).get("converter") == CONVERTER)
        return next(ready, None) or source or self.pull(name)

    def _converted(self, name: str, source: Path, home: Path, form: Form, report: Progress) -> Path:
        target = home / form
        if _ready(target):
            return target
        with self._lock(home.name, report):
            if not _ready(target):
                for older in [path for path in home.glob("*") if path.is_dir() and not _ready(path)]:
                    shutil.rmtree(older, ignore_errors=True)
                with fresh_folder(target) as folder:
                    _convert(source, folder, form, report)
                    stamp = {"converter": CONVERTER, "model": name, "form": form}
                    (folder / STAMP).write_text(json.dumps(stamp))
                    inspect_folder(folder)
        return target

    def _conversions(self) -> Iterable[tuple[Path, str]]:
        for home in sorted((self.cache / "converted").glob("*")):
            names = [name for form in home.iterdir() if (name := _stamp(form).get("model"))]
            if names:
                yield home, str(names[0])

    def _home(self, name: str) -> Path:
        return self.cache / "models" / name

    def _source(self, name: str) -> Path:
        return self._home(name) / "source.gguf"

    def _downloaded(self, name: str) -> bool:
        source = self._source(name)
        return source.is_file() and source.stat().st_size == BUILTINS[name].size

    def _lock(self, name: str, report: Progress) -> Any:
        return locked(self.cache / "locks" / f"{name}.lock", report)


def _local(name: str) -> Path | None:
    """Return the folder or GGUF file of this name, or None for a hub id; raise for any other name."""
    path = Path(name).expanduser()
    if (name and path.is_dir()) or (path.is_file() and path.suffix == ".gguf"):
        return path.resolve()
    if path.is_file():
        raise UnknownModelError("model", name, "a model file must end in .gguf", "give the folder of safetensors files")
    if name.endswith(".gguf"):
        raise UnknownModelError("model", name, f"there is no file {path}", "give the path of a .gguf file")
    if _HUB_ID.fullmatch(name):
        return None
    near = difflib.get_close_matches(name, BUILTINS, n=3)
    hint = f"did you mean {' or '.join(near)}" if near else _OTHER_NAMES
    limit = "neither a built-in name, a folder, a .gguf file nor a hub id (owner/name)"
    raise UnknownModelError("model", name, limit, hint)


def _cached(repo_id: str) -> Path | None:
    file = cached_hub_file(repo_id, "tokenizer_config.json")
    return file and file.parent


def file_state(source: Path) -> str:
    """Return a name for the present state of a user's files, made from their path, sizes and times."""
    files = sorted(p for p in source.iterdir() if p.is_file()) if source.is_dir() else [source]
    state = [(p.name, p.stat().st_size, p.stat().st_mtime_ns) for p in files]
    digest = hashlib.sha256(json.dumps([str(source), state]).encode()).hexdigest()
    return f"{source.name[:40]}-{digest[:16]}"


def _stamp(folder: Path) -> dict[str, Any]:
    try:
        return dict(json.loads((folder / STAMP).read_text()))
    except (OSError, ValueError, TypeError):
        return {}


def _ready(folder: Path) -> bool:
    """Return whether a conversion is complete and undamaged; others are replaced."""
    if _stamp(folder).get("converter") != CONVERTER:
        return False
    try:
        inspect_folder(folder)
    except CARDError:
        return False
    return True


def _describe(name: str, home: Path) -> StoredModel:
    forms = tuple(form for form in FORMS if _ready(home / form))
    state: State = "converted" if forms else "downloaded" if (home / "source.gguf").exists() else "absent"
    return StoredModel(name, state, size_on_disk(home), forms)


def _convert(source: Path, folder: Path, form: Form, report: Progress) -> None:
    """Write config, tokenizer and weights of a GGUF file or a folder in a form."""
    from langchain_card.models import convert, gguf

    report.update("read config and tokenizer", 0, 0)
    reader = None if source.is_dir() else gguf.open_gguf(source)
    config = gguf.load_config(source, reader)
    layout = convert.Layout(config)
    if reader is None:
        for pattern in _COPIED:
            for file in source.glob(pattern):
                if not file.name.endswith(".index.json"):
                    shutil.copyfile(file, folder / file.name)
        tensors = convert.folder_tensors(inspect_folder(source))
    else:
        config.architectures, config.dtype = [type(layout.model).__name__], "float16"
        config.save_pretrained(folder)
        gguf.save_tokenizer(source, reader, folder)
        tensors = (gguf.blocks_and_numbers if form == "file" else gguf.tensors)(reader, layout.model)
    writer: convert.Writer
    if form == "float":
        writer = convert.FloatWriter(folder / "model.safetensors", layout.shapes)
    else:
        from langchain_card.models.block_index import BlockWriter  # imports numba

        writer = BlockWriter(folder, layout, form, source)
    convert.write_weights(tensors, layout, writer, folder, report)
